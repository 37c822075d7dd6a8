from __future__ import annotations

import math
from typing import Any

import pytest

from miniverl_dist.reporting.windows import first_mean, label, last_mean, shown_fields, window_text


def steps(*values: Any) -> list[dict[str, Any]]:
    return [{"step": step, "loss": value} for step, value in enumerate(values, start=1)]


@pytest.mark.parametrize(
    ("values", "first", "last"),
    [
        ((4.0,), "4", "4"),
        ((4.0, 1.0, 2.0), "4", "2"),
        ((1.0, 3.0, 9.0, 5.0, 7.0), "2", "6"),
        ((1.0, None, 2.0), "1 (not a number in 1 of 3 steps)", "2 (not a number in 1 of 3 steps)"),
        ((1.0, 2.0, None), "1 (not a number in 1 of 3 steps)", "not a number (in 1 of 3 steps)"),
        ((None, 2.0), "not a number (in 1 of 2 steps)", "2 (not a number in 1 of 2 steps)"),
        (
            (1.0, 1.0, 3.0, math.nan),
            *(["1 (not a number in 1 of 4 steps)"]),
            "not a number (in 1 of 4 steps)",
        ),
        ((True, "high"), "not a number (in 2 of 2 steps)", "not a number (in 2 of 2 steps)"),
    ],
)
def test_means_of_either_end(values: tuple[Any, ...], first: str, last: str) -> None:
    assert (str(first_mean(steps(*values), "loss")), str(last_mean(steps(*values), "loss"))) == (
        first,
        last,
    )


def test_steps_that_did_not_measure_it_do_not_count() -> None:
    records: list[dict[str, Any]] = [*steps(1.0, 2.0, 3.0), {"step": 4}]
    assert str(last_mean(records, "loss")) == "3"
    assert str(last_mean([*records, {"step": 5}], "loss")) == "not measured"
    assert str(last_mean([], "loss")) == "not measured"


def test_a_heading_names_the_steps() -> None:
    assert window_text("last", 3) == "mean of the last 1 of 3 steps"
    assert window_text("first", 40) == "mean of the first 5 of 40 steps"
    assert window_text("last", 0) == "no steps"


def test_fields_that_nobody_measured_are_not_shown() -> None:
    names = ("loss", "entropy_mean", "divergence_mean")
    policy = [{"step": 1, "loss": 1.0, "entropy_mean": None}]
    assert shown_fields(names, policy) == ["entropy_mean"]
    distilled = [{"step": 1, "loss": 1.0, "num_target_rows": 0}]
    assert shown_fields(names, policy, distilled) == ["loss", "entropy_mean"]


def test_sums_over_episodes_are_labelled() -> None:
    assert label("seconds_step") == "seconds_step (seconds)"
    assert label("seconds_rollout") == "seconds_rollout (seconds, summed over episodes)"
