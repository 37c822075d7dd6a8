from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from miniverl_dist.observability.step_names import named_step, step_name


@pytest.mark.parametrize(
    ("step", "name"), [(0, "step-000000"), (10, "step-000010"), (1_234_567, "step-1234567")]
)
def test_a_name_has_at_least_six_digits(step: int, name: str) -> None:
    assert step_name(step) == name


@given(st.integers(0, 10**9))
def test_a_name_says_its_step(step: int) -> None:
    assert named_step(step_name(step)) == step


@pytest.mark.parametrize(
    "name",
    [
        "step-10",
        "step-0000010",
        "step-000010-copy",
        "step-000010\n",
        " step-000010",
        "step--00001",
        "step-٠٠٠٠١٠",
        "before",
        "",
    ],
)
def test_another_name_says_none(name: str) -> None:
    assert named_step(name) is None
