"""Means over the first and the last steps of a run: one rule for every table that shows them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

from miniverl_dist.observability.metrics import METRICS, NOT_A_NUMBER

Records = Sequence[Mapping[str, Any]]
"""Steps of a run, oldest first."""

LARGEST_INT: Final = 1 << 63
"""JSON has larger ones, but no float holds all of them."""
_MAX_STEPS: Final = 5
"""Steps at either end that a mean is taken over; at most half of a shorter run."""


@dataclass(frozen=True)
class Mean:
    """A field over some of the steps; steps that did not measure it do not count."""

    value: float | None
    """None where no step of the window measured it, or the newest that did found no number."""
    num_bad: int
    """Steps of the whole run whose value is not a number."""
    num_steps: int
    """Steps of the whole run."""
    is_bad: bool
    """Whether it was measured in the window, but is not a number."""

    def __str__(self) -> str:
        """The mean, and what must be known of it."""
        if self.value is None and not self.is_bad:
            return "not measured"
        text = NOT_A_NUMBER if self.value is None else f"{self.value:.4g}"
        if not self.num_bad:
            return text
        what = "" if self.value is None else f"{NOT_A_NUMBER} "
        return f"{text} ({what}in {self.num_bad} of {self.num_steps} steps)"


def window_size(num_steps: int) -> int:
    """Steps that a mean at either end is taken over, at least 1."""
    return max(1, min(_MAX_STEPS, num_steps // 2))


def window_text(end: str, num_steps: int) -> str:
    """``mean of the last 5 of 40 steps``; ``end`` is ``first`` or ``last``."""
    if not num_steps:
        return "no steps"
    return f"mean of the {end} {window_size(num_steps)} of {num_steps} steps"


def first_mean(records: Records, name: str) -> Mean:
    """Mean of a field over the first steps."""
    return _mean(records, records[: window_size(len(records))], name)


def last_mean(records: Records, name: str) -> Mean:
    """Mean of a field over the last steps."""
    return _mean(records, records[-window_size(len(records)) :], name)


def is_measured(records: Records, name: str) -> bool:
    """Whether any step has the field, be it a number or not."""
    return any(name in record for record in records)


def shown_fields(names: Sequence[str], *runs: Records) -> list[str]:
    """Those that some run measured; a loss only where it should fall (see `METRICS`)."""
    compares = any(is_measured(records, "num_target_rows") for records in runs)
    return [
        name
        for name in names
        if (name != "loss" or compares) and any(is_measured(records, name) for records in runs)
    ]


def is_number(value: object) -> TypeGuard[float]:
    """Whether a value of a record can be reckoned with."""
    if type(value) is float:  # first: nearly all of a long run's values are
        return math.isfinite(value)
    return type(value) is int and abs(value) <= LARGEST_INT


def label(name: str) -> str:
    """A field with its unit."""
    return f"{name} ({METRICS[name].unit_text})"


def _mean(records: Records, window: Records, name: str) -> Mean:
    measured = [record[name] for record in window if name in record]
    numbers = [value for value in measured if is_number(value)]
    num_bad = sum(name in record and not is_number(record[name]) for record in records)
    is_bad = bool(measured) and not is_number(measured[-1])
    value = sum(numbers) / len(numbers) if numbers and not is_bad else None
    return Mean(value, num_bad, len(records), is_bad)
