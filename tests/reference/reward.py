"""Slow oracle of the reward: exact fractions, no regular expressions, no jsonschema.

Written from the definition in the reward's docstring, with other means than the implementation.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

HEX = "0123456789abcdef"
DIGITS = "0123456789"
RawCall = Mapping[str, Any] | None


def reference_reward(
    student_calls: Sequence[RawCall],
    exec_successes: Sequence[bool],
    expert_calls: Sequence[RawCall],
    schemas: Mapping[str, Mapping[str, Any]],
    task_passed: bool | None,
) -> dict[str, Fraction]:
    """The parts of the reward; T is ``len(expert_calls)``."""
    num_due = len(expert_calls)
    earned = []
    for index in range(num_due):
        student = student_calls[index] if index < len(student_calls) else None
        earned.append(reference_credit(student, expert_calls[index], schemas))
    nothing = Fraction(0) if num_due else Fraction(1)
    parts = {
        "mean_partial": sum(earned, Fraction(0)) / num_due if num_due else nothing,
        "first_call": earned[0] if earned else nothing,
        "exec_score": Fraction(list(exec_successes).count(True), len(exec_successes))
        if exec_successes
        else nothing,
        "terminal_pass": Fraction(int(task_passed is True)),
    }
    if task_passed is None:
        parts["total"] = parts["mean_partial"]
    else:
        parts["total"] = (
            parts["mean_partial"] / 4
            + parts["first_call"] / 5
            + parts["exec_score"] / 10
            + parts["terminal_pass"] * Fraction(9, 20)
        )
    return parts


def reference_credit(
    student: RawCall, expert: RawCall, schemas: Mapping[str, Mapping[str, Any]]
) -> Fraction:
    """Partial credit of one pair."""
    found, wanted = readable(student), readable(expert)
    if found is None or wanted is None:
        return Fraction(0)
    same_name = found[0] == wanted[0]
    credit = Fraction(1, 5) * same_name
    if found[0] in schemas:
        credit += Fraction(3, 20)
        credit += Fraction(3, 20) * fits(found[1], schemas[found[0]])
    names, wanted_names = sorted(found[1]), sorted(wanted[1])
    both = [name for name in names if name in wanted_names]
    structure = Fraction(2, 5) * same_name
    if names == wanted_names:
        structure += Fraction(3, 10)
    elif both:
        structure += Fraction(3, 20)
    if both:
        agreeing = [name for name in both if same(found[1][name], wanted[1][name])]
        structure += Fraction(3, 10) * Fraction(len(agreeing), len(both))
    elif not names and not wanted_names:
        structure += Fraction(3, 10)
    return credit + structure / 2


def readable(call: RawCall) -> tuple[str, dict[str, Any]] | None:
    if call is None or not isinstance(call.get("name"), str):
        return None
    arguments = call.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except json.JSONDecodeError:
            return None
    return (call["name"], arguments) if isinstance(arguments, dict) else None


def fits(value: object, schema: Mapping[str, Any]) -> bool:
    """JSON Schema with type, properties, required and items."""
    kind = schema.get("type")
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    checks = {
        None: True,
        "object": isinstance(value, dict),
        "array": isinstance(value, list),
        "string": isinstance(value, str),
        "boolean": isinstance(value, bool),
        "number": is_number,
        "integer": is_number and value == int(value),
    }
    if not checks[kind]:
        return False
    if isinstance(value, dict):
        if any(name not in value for name in schema.get("required", [])):
            return False
        known = schema.get("properties", {})
        return all(fits(child, known[name]) for name, child in value.items() if name in known)
    if isinstance(value, list) and "items" in schema:
        return all(fits(child, schema["items"]) for child in value)
    return True


def same(left: object, right: object) -> bool:
    """Equality of two argument values."""
    if isinstance(left, bool) or isinstance(right, bool):
        return isinstance(left, bool) and isinstance(right, bool) and left == right
    if isinstance(left, str) and isinstance(right, str):
        return plain(left) == plain(right)
    if isinstance(left, list) and isinstance(right, list):
        if len(left) != len(right):
            return False
        return all(same(left[index], right[index]) for index in range(len(left)))
    if isinstance(left, dict) and isinstance(right, dict):
        return sorted(left) == sorted(right) and all(same(left[key], right[key]) for key in left)
    if left is None or right is None:
        return left is right
    return type(left) in (int, float) and type(right) in (int, float) and left == right


def plain(text: str) -> str:
    """Text without case, surplus blanks, and what differs from run to run."""
    text = " ".join(text.casefold().split())
    for find_end, name in (
        (uuid_end, "<uuid>"),
        (timestamp_end, "<timestamp>"),
        (tmp_path_end, "<tmp>"),
    ):
        out, index = "", 0
        while index < len(text):
            end = find_end(text, index)
            if end is None:
                out, index = out + text[index], index + 1
            else:
                out, index = out + name, end
        text = out
    return text


def is_word(text: str, index: int) -> bool:
    return 0 <= index < len(text) and (text[index].isalnum() or text[index] == "_")


def shape_end(text: str, index: int, shape: str) -> int | None:
    """End of a literal shape: x is a hex digit, 9 a digit, t is T or blank, the rest itself."""
    for offset, sign in enumerate(shape):
        char = text[index + offset : index + offset + 1]
        allowed = {"x": HEX, "9": DIGITS, "t": "t "}.get(sign, sign)
        if not char or char not in allowed:
            return None
    return index + len(shape)


def uuid_end(text: str, index: int) -> int | None:
    if is_word(text, index - 1):
        return None
    end = shape_end(text, index, "xxxxxxxx-xxxx-xxxx-xxxx-xxxxxxxxxxxx")
    return None if end is None or is_word(text, end) else end


def timestamp_end(text: str, index: int) -> int | None:
    if is_word(text, index - 1):
        return None
    minutes = shape_end(text, index, "9999-99-99t99:99")
    if minutes is None:
        return None
    clock_ends = [minutes]
    seconds = shape_end(text, minutes, ":99")
    if seconds is not None:
        clock_ends.append(seconds)
        fraction = seconds + 1
        while text[seconds : seconds + 1] == "." and text[fraction : fraction + 1] in DIGITS:
            if fraction >= len(text):
                break
            fraction += 1
            clock_ends.append(fraction)
    for end in reversed(clock_ends):
        for zone in ("z", "+99:99", "+9999", "-99:99", "-9999", ""):
            stop = shape_end(text, end, zone)
            if stop is not None and is_word(text, stop - 1) and not is_word(text, stop):
                return stop
    return None


def tmp_path_end(text: str, index: int) -> int | None:
    before = text[index - 1] if index else " "
    if before.isalnum() or before in "_.~/-":
        return None
    end = shape_end(text, index, "/tmp/")
    if end is None:
        return None
    stop = end
    while stop < len(text) and text[stop] not in " \"'":
        stop += 1
    return stop if stop > end else None
