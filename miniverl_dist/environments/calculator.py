"""Arithmetic through calls: every number is an exact decimal.

A toolbox without state: each call gives its result, and the model carries it into the next one.
Results that JSON numbers could not carry (a quotient that never ends, more digits than a double
keeps) are refused, so that what a model copies is what was computed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from miniverl_dist.config.environments import CalculatorConfig, Difficulty
from miniverl_dist.environments.decimals import json_number, num_places, parse_number, write_number
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

MAX_INTEGER_DIGITS = 30
MAX_DECIMAL_DIGITS = 15
"""A double carries any decimal of 15 digits unchanged."""

_OPERATIONS: dict[str, tuple[str, Callable[[Fraction, Fraction], Fraction]]] = {
    "add": ("+", lambda a, b: a + b),
    "subtract": ("-", lambda a, b: a - b),
    "multiply": ("*", lambda a, b: a * b),
    "divide": ("/", lambda a, b: a / b),
}
_NUMBER = {"type": "number"}


class CalculatorTools:
    """The four operations."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Compute; see `Toolbox.call`."""
        a, b = (_operand(key, arguments[key]) for key in ("a", "b"))
        if name == "divide" and b == 0:
            raise ToolError("divide: division by zero")
        result = _OPERATIONS[name][1](a, b)
        if problem := _problem(result):
            raise ToolError(f"{name}: {problem}")
        return ToolResult(write_number(result), (result,))

    def close(self) -> None:
        """Nothing is held."""


def _operand(name: str, value: object) -> Fraction:
    number = parse_number(value)
    if number is None:
        raise ToolError(f"{name} must be a number in plain digits, found {str(value)[:40]!r}")
    if problem := _problem(number):
        raise ToolError(f"{name}: {problem}")
    return number


def _problem(number: Fraction) -> str | None:
    """Why a number is beyond this calculator, or None."""
    if number.denominator == 1:
        if abs(number) >= 10**MAX_INTEGER_DIGITS:
            return f"the number has more than {MAX_INTEGER_DIGITS} digits"
        return None
    if num_places(number) is None:
        return "the result has no finite decimal form"
    if len(write_number(abs(number)).replace(".", "").lstrip("0")) > MAX_DECIMAL_DIGITS:
        return f"the number has more than {MAX_DECIMAL_DIGITS} digits"
    return None


class _Draft:
    """A calculation in the making: the formula, its calls, its value so far."""

    def __init__(self, start: int) -> None:
        self.formula, self.value = str(start), Fraction(start)
        self.calls: list[ToolCall] = []

    def combine(self, name: str, other: _Draft) -> None:
        """Continue with ``(self) op (other)``; what is one number needs no parentheses."""
        symbol, compute = _OPERATIONS[name]
        left, right = (f"({d.formula})" if d.calls else d.formula for d in (self, other))
        self.formula = f"{left} {symbol} {right}"
        arguments = {"a": json_number(self.value), "b": json_number(other.value)}
        self.calls += [*other.calls, ToolCall(name=name, arguments=arguments)]
        self.value = compute(self.value, other.value)


def draw(difficulty: Difficulty, rng: random.Random) -> Question:
    """A formula; every pair of operands is in parentheses, so that none depends on precedence.

    ``easy``: one operation on numbers below 100; ``medium``: a chain of two or three; ``hard``: two
    chains of numbers up to 9,999, joined: five operations or six.
    """
    if difficulty == "hard":
        draft = _chain(2, 9_999, rng)
        draft.combine(rng.choice(("add", "subtract")), _chain(rng.choice((1, 2)), 9_999, rng))
        _extend(draft, 9_999, rng)
    else:
        draft = _chain(1 if difficulty == "easy" else rng.choice((2, 3)), 99, rng)
    return Question(f"What is {draft.formula}?", tuple(draft.calls), draft.value)


def _chain(num_calls: int, largest: int, rng: random.Random) -> _Draft:
    draft = _Draft(rng.randint(2, largest))
    for _ in range(num_calls):
        _extend(draft, largest, rng)
    return draft


def _extend(draft: _Draft, largest: int, rng: random.Random) -> None:
    """One more operation; quotients end soon and are not divided again, products stay small."""
    names = [n for n in _OPERATIONS if n != "divide" or draft.value.denominator == 1]
    name = rng.choice(names)
    match name:
        case "divide":
            operand = rng.choice((2, 4, 5, 8, 10))
        case "multiply":
            operand = rng.randint(2, 12)
        case _:
            operand = rng.randint(2, largest)
    draft.combine(name, _Draft(operand))


_TOOLS = tuple(
    make_tool(name, f"a {symbol} b, exactly.", a=_NUMBER, b=_NUMBER)
    for name, (symbol, _) in _OPERATIONS.items()
)
FAMILY = Family(
    name="calculator",
    tools=_TOOLS,
    answer_schema=_NUMBER,
    draw=draw,
    open_tools=lambda question: CalculatorTools(),
)


def calculator(
    config: CalculatorConfig, write_calls: CallWriter = write_json_lines
) -> QuestionEnvironment:
    """The calculator's tasks under a config."""
    return QuestionEnvironment(FAMILY, config, write_calls)
