"""From a recipe file to a checked ``RunConfig``, and back from a run directory.

A recipe may build on others (``extends: base.yaml`` or a list, relative to the file that says so).
Later files win: mappings merge, everything else is replaced. A mapping that names another
``kind`` replaces the former one, whose other keys would be foreign to it. Overrides
(``optim.lr=3e-6``) come last and follow the same rules.

Paths inside a recipe (``student.model.path``, ``teacher.headers_file``) stay as written and are
resolved against the working directory of the process that uses them, not against the recipe: a
run directory then holds no absolute path that its author did not write, and can be moved.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from pydantic import BaseModel, ValidationError

from miniverl_dist import __version__
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.problems import Problem, dotted, explain
from miniverl_dist.config.serve import TEACHER_SERVICES, TeacherServiceConfig
from miniverl_dist.config.yaml_text import FieldPath, dump_yaml, parse_yaml
from miniverl_dist.errors import ConfigError
from miniverl_dist.observability.run_dir import (
    CONFIG_RESOLVED,
    CONFIG_SUBMITTED,
    CONFIG_VALIDATED,
    MANIFEST,
    RunDirectory,
)

M = TypeVar("M", bound=BaseModel)
_OVERRIDE: Final = "override "
"""What the origin of an overridden field begins with."""


@dataclass(frozen=True)
class LoadedConfig:
    """A checked recipe in all the forms that a run keeps."""

    config: RunConfig
    digest: str
    """SHA-256 (hex) of the resolved form; equal means the same run."""
    data: Mapping[str, Any]
    """The validated form: what was written, bases and overrides merged, no defaults."""
    submitted: bytes
    """The recipe file, byte for byte."""
    source: Path
    """Where it was read; never saved."""

    def validated_yaml(self) -> str:
        """What was written, bases and overrides merged."""
        return dump_yaml(dict(self.data))

    def resolved_yaml(self) -> str:
        """Every field, defaults included."""
        return dump_yaml(self.config.model_dump(mode="json"))

    def save(self, run: RunDirectory) -> None:
        """Write the three forms into a run directory."""
        run.write_bytes(CONFIG_SUBMITTED, self.submitted)
        run.write_text(CONFIG_VALIDATED, self.validated_yaml())
        run.write_text(CONFIG_RESOLVED, self.resolved_yaml())


def config_digest(config: RunConfig) -> str:
    """SHA-256 (hex) over the canonical JSON of every field, defaults included."""
    text = json.dumps(
        config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"), allow_nan=False
    )
    return hashlib.sha256(text.encode()).hexdigest()


def load_config(path: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """Read a recipe with its bases, apply ``key.path=value`` overrides, check it as a whole.

    Raises:
        ConfigError: one message with every problem as ``file:line: field: found X, expected Y``.
    """
    submitted = _read(path)
    layers = _Layers()
    layers.add_file(path, submitted, chain=())
    for override in overrides:
        layers.add_override(override)
    if layers.data.get("kind") in TEACHER_SERVICES:
        raise ConfigError(
            f"{path}: found the config of a teacher's service (`miniverl-dist serve teacher` takes "
            "it), expected a run's recipe"
        )
    return _validated(layers, path, submitted)


def config_kind(path: Path) -> str | None:
    """The ``kind`` at the top of a config: which service it describes; a recipe has none."""
    data = _layers(path, ()).data
    return str(data["kind"]) if "kind" in data else None


def load_teacher_service(path: Path, overrides: Sequence[str] = ()) -> TeacherServiceConfig:
    """Read the config of a teacher's service; `extends`, overrides and errors as in a recipe.

    Raises:
        ConfigError: one message with every problem as ``file:line: field: found X, expected Y``.
    """
    layers = _layers(path, overrides)
    kind = layers.data.get("kind")
    form = TEACHER_SERVICES.get(kind) if isinstance(kind, str) else None
    if form is None:
        found = "no `kind`" if kind is None else f"kind {kind!r}"
        if "tasks" in layers.data or "loop" in layers.data:
            found = "a run's recipe (`miniverl-dist train` takes it)"
        raise ConfigError(
            f"{layers.origin(('kind',)) or path}: found {found}, expected the config of a "
            f"teacher's service, of kind {' or '.join(TEACHER_SERVICES)}, as in "
            "configs/teacher_local.yaml"
        )
    return _checked(layers, path, form)


def _layers(path: Path, overrides: Sequence[str]) -> _Layers:
    layers = _Layers()
    layers.add_file(path, _read(path), chain=())
    for override in overrides:
        layers.add_override(override)
    return layers


def load_run_config(run_dir: Path, overrides: Sequence[str] = ()) -> LoadedConfig:
    """The config that a run directory was started with, checked against its manifest.

    Args:
        run_dir: Of the run.
        overrides: ``key.path=value`` on top: another config then, for an evaluation of its own.

    Raises:
        ConfigError: not a run directory, or not the config that the manifest's digest names; an
            override that does not fit.
        RecordError: the manifest or a saved form is missing or unreadable.
    """
    run = RunDirectory.open(run_dir)
    path = run_dir / CONFIG_RESOLVED
    layers = _Layers()
    manifest = run.read_json(MANIFEST)
    try:
        layers.add_file(path, run.read_bytes(CONFIG_RESOLVED), chain=())
        resolved = _validated(layers, path, run.read_bytes(CONFIG_SUBMITTED))
    except ConfigError as error:
        made_by = manifest.get("version")
        if made_by in (None, __version__):
            raise
        raise ConfigError(
            f"{error}\nThe run was made by version {made_by}, this is version {__version__}: "
            "continue it with its own version"
        ) from None
    recorded = manifest.get("config_digest")
    if resolved.digest != recorded:
        raise ConfigError(
            f"{path}: found digest {resolved.digest[:12]}, expected {str(recorded)[:12]} as in "
            f"{MANIFEST}: the file was edited, or the run was made by another version"
        )
    if overrides:
        for override in overrides:
            layers.add_override(override)
        return _validated(layers, path, run.read_bytes(CONFIG_SUBMITTED))
    written = parse_yaml(run.read_bytes(CONFIG_VALIDATED), str(run_dir / CONFIG_VALIDATED))
    return LoadedConfig(resolved.config, resolved.digest, written.data, resolved.submitted, run_dir)


class _Layers:
    """Files and overrides merged so far, and where each field was written last."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self._origins: dict[FieldPath, str] = {}

    def add_file(self, path: Path, raw: bytes, chain: tuple[Path, ...]) -> None:
        if path.resolve() in [link.resolve() for link in chain]:
            circle = " -> ".join(str(link) for link in (*chain, path))
            raise ConfigError(f"{path}: `extends` runs in a circle: {circle}")
        text = parse_yaml(raw, str(path))
        if not isinstance(text.data, dict):
            raise ConfigError(f"{path}: found no mapping, expected a recipe (`name: ...`)")
        data = dict(text.data)
        line = text.lines.get(("extends",), 1)
        for base in _bases(data.pop("extends", []), f"{path}:{line}"):
            base_path = Path(os.path.normpath(path.parent / base))
            self.add_file(base_path, _read(base_path, f"{path}:{line}"), (*chain, path))
        self._add(data, {key: f"{path}:{value}" for key, value in text.lines.items()})

    def add_override(self, override: str) -> None:
        name, separator, value = override.partition("=")
        keys = tuple(name.split("."))
        if not separator or not all(keys):
            raise ConfigError(f"override {override!r}: expected KEY=VALUE, as in optim.lr=3e-6")
        label = f"{_OVERRIDE}{override}"
        text = parse_yaml(value, label)
        data = text.data
        for key in reversed(keys):
            data = {key: data}
        written = [keys[: depth + 1] for depth in range(len(keys))]
        self._add(data, dict.fromkeys([*written, *((*keys, *key) for key in text.lines)], label))

    def origin(self, path: FieldPath) -> str | None:
        """Where ``path``, or else the nearest mapping around it, was written."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return None

    def blamed(self, problem: Problem) -> str | None:
        """Where that was written which a problem is about.

        One of a whole section is about the fields that it names, or else about all overrides that
        have set a part of it: the last one alone may have nothing to do with it.
        """
        section = problem.path
        while not _is_mapping_at(self.data, section):
            if _is_field_at(self.data, section):
                return self.origin(problem.path)
            section = section[:-1]  # what is missing is a matter of what stands around it
        depth = len(section)
        inside = {
            path: origin
            for path, origin in self._origins.items()
            if path[:depth] == section and _is_field_at(self.data, path)
        }
        named = [origin for path, origin in inside.items() if _names(problem.text, section, path)]
        overrides = [o for o in named or inside.values() if o.startswith(_OVERRIDE)]
        if overrides and (named or depth):
            return " and ".join(dict.fromkeys(overrides))
        return named[0] if named and depth else self.origin(problem.path)

    def _add(self, data: Mapping[str, Any], origins: Mapping[FieldPath, str]) -> None:
        self.data = merge(self.data, data)
        # What a later layer says about a field also hides where parts of the former value stood.
        leaves = [path for path in origins if path and not _is_mapping_at(data, path)]
        for path in leaves:
            for former in [o for o in self._origins if o[: len(path)] == path]:
                del self._origins[former]
        self._origins.update(origins)


def _names(text: str, section: FieldPath, path: FieldPath) -> bool:
    """Whether a text about a section, or about the whole, says the name of a field of it."""
    if path == ("name",):
        return False  # a word of any sentence
    names = {dotted(path), dotted(path[len(section) :])} if section else {dotted(path)}
    return any(re.search(rf"(?<![\w.]){re.escape(n)}(?!\w|\.\w)", text) for n in names)


def _is_field_at(data: object, path: FieldPath) -> bool:
    """Whether a value stands there that is no mapping; another ``kind`` may have displaced it."""
    for key in path:
        if not isinstance(data, Mapping) or key not in data:
            return False
        data = data[key]
    return not isinstance(data, Mapping)


def _is_mapping_at(data: object, path: FieldPath) -> bool:
    for key in path:
        if not isinstance(data, Mapping):
            return False
        data = data.get(key)
    return isinstance(data, Mapping)


def merge(base: Mapping[str, Any], overlay: Mapping[str, Any]) -> dict[str, Any]:
    """``overlay`` over ``base``: mappings merge unless their ``kind`` differs, others replace."""
    kinds = base.get("kind"), overlay.get("kind")
    if None not in kinds and kinds[0] != kinds[1]:
        return dict(overlay)
    merged = dict(base)
    for key, value in overlay.items():
        former = merged.get(key)
        both = isinstance(former, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(former, value) if both else value  # type: ignore[arg-type]
    return merged


def _bases(value: object, where: str) -> list[str]:
    bases = [value] if isinstance(value, str) else value
    if not isinstance(bases, list) or not all(isinstance(base, str) for base in bases):
        raise ConfigError(f"{where}: extends: found {value!r}, expected a path or a list of paths")
    return bases


def _read(path: Path, named_by: str | None = None) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        place = f"{named_by}: extends: " if named_by else ""
        raise ConfigError(
            f"{place}cannot read recipe {path}: {os.strerror(error.errno or 0)}"
        ) from None


def _checked(layers: _Layers, path: Path, form: type[M]) -> M:
    try:
        return form.model_validate_json(json.dumps(layers.data), strict=True)
    except ValidationError as error:
        lines = [f"{layers.blamed(problem) or path}: {problem}" for problem in explain(error, form)]
        raise ConfigError("\n".join(lines)) from None


def _validated(layers: _Layers, path: Path, submitted: bytes) -> LoadedConfig:
    config = _checked(layers, path, RunConfig)
    return LoadedConfig(config, config_digest(config), layers.data, submitted, path)
