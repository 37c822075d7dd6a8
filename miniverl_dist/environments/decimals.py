"""Exact decimal numbers: read from what a model may write, and written back without a float."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from fractions import Fraction

_DECIMAL = re.compile(r"[+-]?[0-9]{1,60}(?:\.[0-9]{1,60})?")


def parse_number(value: object) -> Fraction | None:
    """The number that ``value`` is or spells in plain digits, or None.

    A float stands for the shortest decimal that gives it: 0.1 is one tenth. Booleans, ``nan`` and
    texts with an exponent are no numbers.
    """
    if isinstance(value, bool):
        return None
    if isinstance(value, int | Fraction):
        return Fraction(value)
    if isinstance(value, float):
        return Fraction(Decimal(repr(value))) if math.isfinite(value) else None
    if isinstance(value, str) and _DECIMAL.fullmatch(value.strip()):
        return Fraction(value.strip())
    return None


def num_places(number: Fraction) -> int | None:
    """Digits behind the point, or None where they never end."""
    rest, twos, fives = number.denominator, 0, 0
    while rest % 2 == 0:
        rest, twos = rest // 2, twos + 1
    while rest % 5 == 0:
        rest, fives = rest // 5, fives + 1
    return max(twos, fives) if rest == 1 else None


def write_number(number: Fraction) -> str:
    """Plain digits, without zeros at the end: ``-12.5``, ``85``.

    Raises:
        ValueError: the decimal form never ends.
    """
    places = num_places(number)
    if places is None:
        raise ValueError(f"{number} has no finite decimal form")
    digits = str(abs(number.numerator) * 10**places // number.denominator).rjust(places + 1, "0")
    whole, behind = digits[: len(digits) - places], digits[len(digits) - places :]
    return ("-" if number < 0 else "") + whole + (f".{behind}" if behind else "")


def json_number(number: Fraction) -> int | float:
    """The number as JSON knows it; exact for integers, and for decimals of up to 15 digits."""
    return number.numerator if number.denominator == 1 else float(write_number(number))
