"""YAML 1.2 (core schema) read with line numbers, and written so that it reads back the same.

Built from parser events instead of a library's constructor: under the core schema ``1e-6`` is a
number, ``on``, ``1_000`` and ``2026-01-01`` are texts, and neither tags nor merge keys exist.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError
from ruamel.yaml.events import (
    AliasEvent,
    DocumentStartEvent,
    Event,
    MappingEndEvent,
    MappingStartEvent,
    ScalarEvent,
    SequenceEndEvent,
    SequenceStartEvent,
    StreamEndEvent,
)

from miniverl_dist.errors import ConfigError

FieldPath = tuple[str | int, ...]

_MAX_DEPTH = 32
_MAX_NODES = 100_000
_MAX_DIGITS = 300

_NULL = re.compile(r"null|Null|NULL|~|")
_TRUE = re.compile(r"true|True|TRUE")
_FALSE = re.compile(r"false|False|FALSE")
_INT = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


@dataclass(frozen=True)
class YamlText:
    """One document: JSON values, and the 1-based line on which each path starts."""

    data: Any
    lines: dict[FieldPath, int] = field(default_factory=dict)


def parse_yaml(raw: bytes | str, source: str) -> YamlText:
    """Read one document; ``source`` names it in errors.

    Raises:
        ConfigError: not YAML, a repeated key, a tag, a merge key, a second document.
    """
    try:
        text = raw if isinstance(raw, str) else raw.decode("utf-8")
        reader = _Reader(source, iter(YAML(typ="safe", pure=True).parse(io.StringIO(text))))
        return YamlText(reader.document(), reader.lines)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: expected UTF-8, found byte 0x{error.object[error.start]:02x} "
            f"at offset {error.start}"
        ) from None
    except MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        problem = " ".join(filter(None, (error.context, error.problem)))
        raise ConfigError(f"{source}{line}: not valid YAML: {problem}") from None
    except YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {str(error).splitlines()[0]}") from None


def dump_yaml(data: Any) -> str:  # noqa: ANN401 - any JSON value
    """Block-style YAML of JSON values in their order; ``parse_yaml`` gives the same back."""
    yaml = YAML(typ="safe", pure=True)
    yaml.default_flow_style = False
    yaml.allow_unicode = True
    yaml.width = 10_000
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment] # untyped there
    out = io.StringIO()
    yaml.dump(data, out)
    return out.getvalue()


class _Reader:
    """Recursive descent over parser events."""

    def __init__(self, source: str, events: Iterator[Event]) -> None:
        self.lines: dict[FieldPath, int] = {}
        self._source = source
        self._events = events
        self._anchors: dict[str, tuple[Any, int]] = {}
        self._num_nodes = 0  # values so far, those behind an alias counted each time

    def document(self) -> Any:  # noqa: ANN401 - any JSON value
        next(self._events)
        if isinstance(next(self._events), StreamEndEvent):
            return None
        data = self._node(next(self._events), ())
        next(self._events)
        behind = next(self._events)
        if isinstance(behind, DocumentStartEvent):
            self._refuse(behind, "a second document starts here, expected one per file")
        return data

    def _node(self, event: Event, path: FieldPath) -> Any:  # noqa: ANN401 - any JSON value
        self.lines[path] = event.start_mark.line + 1
        if len(path) > _MAX_DEPTH:
            self._refuse(event, f"values nested more than {_MAX_DEPTH} deep")
        before, self._num_nodes = self._num_nodes, self._num_nodes + 1
        if isinstance(event, AliasEvent):
            if event.anchor not in self._anchors:
                self._refuse(event, f"alias *{event.anchor} without an anchor before it")
            value, size = self._anchors[event.anchor]
            self._num_nodes += size
            if self._num_nodes > _MAX_NODES:
                self._refuse(event, f"aliases that spell out more than {_MAX_NODES} values")
            return value
        if not isinstance(event, ScalarEvent | SequenceStartEvent | MappingStartEvent):
            self._refuse(event, f"{type(event).__name__}, expected a value")
        if event.tag not in (None, "!"):
            self._refuse(event, f"tag {event.tag!r}; values here are plain YAML, without tags")
        if isinstance(event, ScalarEvent):
            value = self._scalar(event)
        elif isinstance(event, SequenceStartEvent):
            value = self._sequence(path)
        else:
            value = self._mapping(path)
        if event.anchor:
            self._anchors[event.anchor] = value, self._num_nodes - before
        return value

    def _sequence(self, path: FieldPath) -> list[Any]:
        values: list[Any] = []
        while not isinstance(event := next(self._events), SequenceEndEvent):
            values.append(self._node(event, (*path, len(values))))
        return values

    def _mapping(self, path: FieldPath) -> dict[str, Any]:
        values: dict[str, Any] = {}
        while not isinstance(event := next(self._events), MappingEndEvent):
            if not isinstance(event, ScalarEvent):
                self._refuse(event, "a key that is not plain text")
            key = event.value
            if key == "<<" and event.style is None:
                self._refuse(event, "merge key `<<` (not YAML 1.2); use `extends:` instead")
            if key in values:
                first = self.lines[*path, key]
                self._refuse(event, f"key `{key}` repeated, first given in line {first}")
            values[key] = self._node(next(self._events), (*path, key))
            self.lines[*path, key] = event.start_mark.line + 1
        return values

    def _scalar(self, event: ScalarEvent) -> str | int | float | bool | None:
        if event.style is not None or event.tag == "!":
            return str(event.value)
        if _NOT_FINITE.fullmatch(event.value):
            self._refuse(event, f"{event.value}, expected a finite number")
        if len(event.value) > _MAX_DIGITS and _INT.fullmatch(event.value):
            self._refuse(event, f"a number of {len(event.value)} digits")
        value = core_scalar(event.value)
        if isinstance(value, float) and math.isinf(value):
            self._refuse(event, f"{event.value} does not fit a 64-bit float")
        return value

    def _refuse(self, event: Event, found: str) -> NoReturn:
        raise ConfigError(f"{self._source}:{event.start_mark.line + 1}: found {found}")


def core_scalar(text: str) -> str | int | float | bool | None:
    """Value of an unquoted scalar under YAML 1.2's core schema (finite numbers only)."""
    if _NULL.fullmatch(text):
        return None
    if _TRUE.fullmatch(text) or _FALSE.fullmatch(text):
        return text.lower() == "true"
    if _INT.fullmatch(text):
        return int(text)
    if _OCTAL.fullmatch(text) or _HEX.fullmatch(text):
        return int(text, 0)
    return float(text) if _FLOAT.fullmatch(text) else text
