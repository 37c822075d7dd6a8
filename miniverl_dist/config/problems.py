"""Validation errors in words: which field, what was found, what was expected."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from miniverl_dist.config.yaml_text import FieldPath

_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "path_type": "a path",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "tuple_type": "a list",
    "list_type": "a list",
    "none_required": "null",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "literal_error": "{expected}",
    "enum": "{expected}",
    "string_pattern_mismatch": "text that matches {pattern}",
    "too_long": "at most {max_length} entries",
    "too_short": "at least {min_length} entries",
    "union_tag_invalid": "{expected_tags}",
}

_FOUND_CHARS = 80
"""A broken line of a record can be megabytes long."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong at one field; ``found`` is empty where the text says it all."""

    path: FieldPath
    text: str
    found: str = ""

    def __str__(self) -> str:
        """``field: found X, expected Y``."""
        words = f"found {self.found}, expected {self.text}" if self.found else self.text
        name = dotted(self.path)
        says_so = words.startswith((f"{name}: ", f"{name}.", f"{name} "))
        return f"{name}: {words}" if name and not says_so else words


def dotted(path: FieldPath) -> str:
    """``("tasks", "train", 2)`` as ``tasks.train[2]``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def explain(error: ValidationError, model: type[BaseModel]) -> list[Problem]:
    """Problems in the order of the fields; branches of one union become one problem."""
    problems: dict[FieldPath, Problem] = {}
    for details in error.errors(include_url=False):
        problem = _problem(details, model)
        former = problems.get(problem.path)
        if former is not None and former.found and problem.found:
            problem = Problem(problem.path, f"{former.text} or {problem.text}", problem.found)
        problems[problem.path] = problem
    return list(problems.values())


def explain_in_line(error: ValidationError, model: type[BaseModel], *, limit: int = 3) -> str:
    """The first problems on one line, for records that are rarely wrong in more than one place."""
    problems = explain(error, model)
    text = "; ".join(str(problem) for problem in problems[:limit])
    return text + (f"; {len(problems) - limit} more" if len(problems) > limit else "")


def _problem(details: ErrorDetails, model: type[BaseModel]) -> Problem:
    kind = details["type"]
    path, owners = _locate(model, details["loc"], is_extra=kind == "extra_forbidden")
    context: Mapping[str, Any] = details.get("ctx", {})
    if kind == "extra_forbidden":
        return Problem(path, f"unknown key{_suggestion(path, owners, model)}")
    if kind == "missing":
        return Problem(path, "missing, but required")
    if kind == "value_error":
        return Problem(path, str(context["error"]))
    if kind == "union_tag_not_found":
        kinds = " or ".join(repr(label) for owner in owners for label in _kinds(owner))
        return Problem((*path, "kind"), f"missing, expected {kinds}")
    if kind == "union_tag_invalid":
        expected = str(context["expected_tags"]).replace(", ", " or ")
        return Problem((*path, "kind"), expected, _describe(context["tag"]))
    template = _EXPECTED.get(kind)
    expected = template.format(**context) if template else f"otherwise ({details['msg']})"
    return Problem(path, expected, _describe(details["input"]))


def _describe(value: object) -> str:
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= _FOUND_CHARS else f"{text[:_FOUND_CHARS]}…"


def _locate(
    model: type[BaseModel], loc: tuple[str | int, ...], *, is_extra: bool
) -> tuple[FieldPath, list[type[BaseModel]]]:
    """Field path of a pydantic location (which also names union branches), and the models there."""
    path: list[str | int] = []
    models: list[type[BaseModel]] = [model]
    is_mapping = False
    for index, part in enumerate(loc):
        branch = [m for m in models if len(models) > 1 and part in (*_kinds(m), m.__name__)]
        owner = next((m for m in models if part in m.model_fields), None)
        if branch:
            models = branch
        elif owner is not None and isinstance(part, str):
            path.append(part)
            annotation = owner.model_fields[part].annotation
            models = list(_models(annotation))
            is_mapping = get_origin(annotation) in (dict, Mapping)
        elif isinstance(part, int) or is_mapping or (is_extra and index == len(loc) - 1):
            path.append(part)
            is_mapping = False
    return tuple(path), models


def _models(annotation: object) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models(argument)


def _kinds(model: type[BaseModel]) -> tuple[str, ...]:
    """Values of the ``kind`` that tells a union's member from the others."""
    field = model.model_fields.get("kind")
    return get_args(field.annotation) if field is not None else ()


def _suggestion(place: FieldPath, owners: list[type[BaseModel]], root: type[BaseModel]) -> str:
    key = str(place[-1])
    names = [name for owner in owners for name in owner.model_fields]
    close = difflib.get_close_matches(key, names, n=1, cutoff=0.6)
    if close:
        return f"; did you mean `{close[0]}`?"
    elsewhere = [dotted(path) for path in _all_fields(root) if path[-1] == key and path != place]
    if elsewhere:
        return f"; did you mean `{elsewhere[0]}`?"
    return f"; known here: {', '.join(names)}" if names else ""


def _all_fields(model: type[BaseModel], prefix: FieldPath = ()) -> Iterator[FieldPath]:
    for name, field in model.model_fields.items():
        yield (*prefix, name)
        for child in _models(field.annotation):
            yield from _all_fields(child, (*prefix, name))
