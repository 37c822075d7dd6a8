"""Questions on a JSON document that only tools can see.

A document is a company: departments with a head, a floor, a budget and a staff list of records.
Places are JSON Pointers (RFC 6901). ``get`` gives single values only, so that the document has to
be walked and cannot be poured into the context.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Mapping
from typing import Any

from miniverl_dist.config.environments import Difficulty, JsonNavigationConfig
from miniverl_dist.environments.question import QuestionEnvironment
from miniverl_dist.environments.question_tasks import (
    Family,
    Question,
    ToolError,
    ToolResult,
    make_tool,
)
from miniverl_dist.environments.texts import CallWriter, write_json_lines
from miniverl_dist.schemas.messages import ToolCall

_DEPARTMENTS = ("design", "legal", "sales", "support", "research", "finance", "press", "events")
_PEOPLE = """
Ada Ben Cleo Dan Eva Finn Gus Hana Ivo Jana Kai Lea Max Nora Otto Pia Rolf Sara Tom Uma Vera Will
Yara Zoe
"""
_NAMES = _PEOPLE.split()
_CITIES = ("Bern", "Cork", "Graz", "Kiel", "Lyon", "Oslo", "Riga", "Turin", "Vigo", "Ghent")
_MAX_SHOWN = 80
"""Characters of a model's own text that an error repeats."""
_INDEX = re.compile("0|[1-9][0-9]{0,8}")
"""RFC 6901: ASCII digits without leading zeros; no list is longer than nine of them say."""


class JsonTools:
    """Reads one document.

    Args:
        document: Never changed.
    """

    def __init__(self, document: Mapping[str, Any]) -> None:
        self._document = document

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Read; see `Toolbox.call`."""
        path = arguments["path"]
        if not isinstance(path, str):
            raise ToolError(f"{name}: path must be a text, found {type(path).__name__}")
        value = self._at(path)
        match name:
            case "keys":
                return _keys(path, value)
            case "length":
                return _length(path, value)
            case _:
                return _get(path, value)

    def close(self) -> None:
        """Nothing is held."""

    def _at(self, path: str) -> Any:  # noqa: ANN401 - any JSON
        value: Any = self._document
        if path in ("", "/"):
            return value
        if not path.startswith("/"):
            raise ToolError(f"path {path[:_MAX_SHOWN]!r} must begin with /, for instance /a/0/b")
        walked = ""
        for step in path[1:].split("/"):
            value = _child(value, step.replace("~1", "/").replace("~0", "~"), walked or "/")
            walked += f"/{step}"
        return value


def _child(value: object, step: str, where: str) -> object:
    shown = step[:_MAX_SHOWN]
    if isinstance(value, dict):
        if step not in value:
            raise ToolError(f"there is no key {shown!r} at {where[:_MAX_SHOWN]}")
        return value[step]
    if isinstance(value, list):
        if not (_INDEX.fullmatch(step) and int(step) < len(value)):
            raise ToolError(
                f"there is no index {shown!r} at {where[:_MAX_SHOWN]}: the list has {len(value)} "
                "entries, counted from 0"
            )
        return value[int(step)]
    raise ToolError(f"{where[:_MAX_SHOWN]} is a single value and has no {shown!r}")


def _keys(path: str, value: object) -> ToolResult:
    if not isinstance(value, dict):
        raise ToolError(f"keys: {path[:_MAX_SHOWN]} is {_described(value)}")
    return ToolResult(json.dumps(list(value), ensure_ascii=False), tuple(value))


def _length(path: str, value: object) -> ToolResult:
    if not isinstance(value, dict | list):
        raise ToolError(f"length: {path[:_MAX_SHOWN]} is {_described(value)}")
    return ToolResult(str(len(value)), (len(value),))


def _get(path: str, value: Any) -> ToolResult:  # noqa: ANN401 - any JSON
    if isinstance(value, dict | list):
        raise ToolError(f"get: {path[:_MAX_SHOWN] or '/'} is {_described(value)}")
    text = value if isinstance(value, str) else json.dumps(value)  # as it is to be submitted
    return ToolResult(text, (value,))


def _described(value: object) -> str:
    if isinstance(value, dict):
        return "an object: use keys or length"
    if isinstance(value, list):
        return f"a list of {len(value)}: use length, or an index"
    return "a single value: use get"


def _document(rng: random.Random) -> dict[str, Any]:
    names = iter(rng.sample(_NAMES, len(_NAMES)))
    document = {}
    for department in rng.sample(_DEPARTMENTS, rng.randint(3, 4)):
        staff = [
            {"name": next(names), "age": rng.randint(20, 64), "city": rng.choice(_CITIES)}
            for _ in range(rng.randint(2, 5))
        ]
        head = rng.choice(staff)["name"]
        floor, budget = rng.randint(1, 9), rng.randrange(100, 999)
        document[department] = {"head": head, "floor": floor, "budget": budget, "staff": staff}
    return document


def draw(difficulty: Difficulty, rng: random.Random) -> Question:
    """One value at a given place; a count, or the last of a list; a record found by its name."""
    document = _document(rng)
    department = rng.choice(list(document))
    staff = document[department]["staff"]
    match difficulty:
        case "easy":
            field = rng.choice(("head", "floor", "budget"))
            text = f"What is the {field} of {department}? It is at /{department}/{field}."
            calls = [_call("get", f"/{department}/{field}")]
            answer = document[department][field]
        case "medium":
            text, calls, answer = _last_of(department, staff, rng)
        case "hard":
            text, calls, answer = _found_by_name(department, staff, rng)
    return Question(text, tuple(calls), str(answer), document)


def _last_of(
    department: str, staff: list[dict[str, Any]], rng: random.Random
) -> tuple[str, list[ToolCall], object]:
    place = f"/{department}/staff"
    calls = [_call("keys", f"/{department}"), _call("length", place)]
    if rng.random() < 0.5:
        return f"How many people are on the staff of {department}?", calls, len(staff)
    field = rng.choice(("name", "age", "city"))
    calls.append(_call("get", f"{place}/{len(staff) - 1}/{field}"))
    return f"What is the {field} of the last person on {place}?", calls, staff[-1][field]


def _found_by_name(
    department: str, staff: list[dict[str, Any]], rng: random.Random
) -> tuple[str, list[ToolCall], object]:
    """The name has to be looked for: the record's index is in no question."""
    place, index = f"/{department}/staff", rng.randrange(len(staff))
    field = rng.choice(("age", "city"))
    calls = [_call("keys", f"/{department}"), _call("length", place)]
    calls += [_call("get", f"{place}/{i}/name") for i in range(index + 1)]
    calls.append(_call("get", f"{place}/{index}/{field}"))
    return (
        f"What is the {field} of {staff[index]['name']} in {department}?",
        calls,
        (staff[index][field]),
    )


def _call(name: str, path: str) -> ToolCall:
    return ToolCall(name=name, arguments={"path": path})


_PATH = {"type": "string", "description": "JSON Pointer, for instance /a/0/b; / is the whole"}
FAMILY = Family(
    name="json_navigation",
    tools=(
        make_tool("keys", "The keys of the object at a place.", path=_PATH),
        make_tool("get", "The single value at a place.", path=_PATH),
        make_tool("length", "The size of the list or object at a place.", path=_PATH),
    ),
    answer_schema={"type": "string"},
    draw=draw,
    open_tools=lambda question: JsonTools(question.hidden),
)


def json_navigation(
    config: JsonNavigationConfig, write_calls: CallWriter = write_json_lines
) -> QuestionEnvironment:
    """The documents' questions under a config."""
    return QuestionEnvironment(FAMILY, config, write_calls)
