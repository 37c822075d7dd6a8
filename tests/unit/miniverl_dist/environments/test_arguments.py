from __future__ import annotations

import pytest

from miniverl_dist.environments import arguments
from miniverl_dist.environments.arguments import size_problem


def nested(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("x" * (arguments.MAX_ARGUMENT_CHARS - 1), None),  # the name "a" counts too
        ("x" * arguments.MAX_ARGUMENT_CHARS, "characters"),
        ({"x" * arguments.MAX_ARGUMENT_CHARS: 1}, "characters"),
        (2**arguments.MAX_INTEGER_BITS - 1, None),
        (2**arguments.MAX_INTEGER_BITS, "bits"),
        ([-(2**arguments.MAX_INTEGER_BITS)], "bits"),
        ([1] * (arguments.MAX_ARGUMENT_ITEMS - 2), None),
        ([1] * arguments.MAX_ARGUMENT_ITEMS, "values"),
        (nested(arguments.MAX_ARGUMENT_DEPTH - 1), None),
        (nested(arguments.MAX_ARGUMENT_DEPTH), "nested"),
        (nested(100_000), "nested"),
        (1e308, None),
        (True, None),
    ],
)
def test_sizes(value: object, problem: str | None) -> None:
    found = size_problem({"a": value})
    assert (problem in found) if problem and found else found is problem
