from __future__ import annotations

from decimal import Decimal
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl_dist.environments.decimals import json_number, num_places, parse_number, write_number
from miniverl_dist.environments.question_tasks import canonical


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (7, Fraction(7)),
        (0.1, Fraction(1, 10)),
        (-2.50, Fraction(-5, 2)),
        ("0.1", Fraction(1, 10)),
        (" +007.50 ", Fraction(15, 2)),
        (Fraction(1, 3), Fraction(1, 3)),
        (True, None),
        (None, None),
        ("", None),
        (".5", None),
        ("5.", None),
        ("1e3", None),
        ("1_000", None),
        ("1/3", None),
        ("nan", None),
        ("٣", None),
        (float("nan"), None),
        (float("-inf"), None),
        ([1], None),
    ],
)
def test_what_is_a_number(value: object, number: Fraction | None) -> None:
    assert parse_number(value) == number


@given(
    st.decimals(
        allow_nan=False, allow_infinity=False, places=6, min_value=-(10**9), max_value=10**9
    )
)
def test_decimals_come_back(value: Decimal) -> None:
    number = Fraction(value)
    text = write_number(number)
    assert Fraction(text) == number
    assert parse_number(text) == number
    assert text == f"{value.normalize():f}".removeprefix("-" if value == 0 else "")
    assert (num_places(number) or 0) <= 6


@given(st.integers(-(10**15) + 1, 10**15 - 1), st.integers(0, 15))
def test_fifteen_digits_survive_a_double(digits: int, places: int) -> None:
    number = Fraction(digits, 10**places)
    assert parse_number(json_number(number)) == number


def test_what_has_no_end_is_not_written() -> None:
    assert num_places(Fraction(1, 3)) is None
    with pytest.raises(ValueError, match="1/3 has no finite decimal form"):
        write_number(Fraction(1, 3))


@pytest.mark.parametrize(
    ("left", "right", "is_same"),
    [
        (85, "85.0", True),
        (85.0, " 85", True),
        (Fraction(17, 2), "8.5", True),
        ("Oslo", " Oslo ", True),
        ("Oslo", "oslo", False),
        (True, "true", True),
        (True, 1, False),
        (None, "null", True),
        ("-0", 0, True),
        ("1e2", 100, False),
        (float("inf"), "Infinity", False),
    ],
)
def test_answers_compare_by_value(left: object, right: object, *, is_same: bool) -> None:
    assert (canonical(left) == canonical(right)) == is_same  # type: ignore[arg-type]
