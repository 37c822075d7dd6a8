"""Divergences where one side has next to nothing, or nothing at all."""

from __future__ import annotations

import math

import pytest
import torch

from miniverl_dist.objective.distribution import LOGPROB_FLOOR, FullTargets, TopKRows, keep_top_k
from tests.reference.divergence import OracleTeacher, slow_divergence, slow_gradient
from tests.support.distillation import (
    SAMPLED,
    WITH_TEACHER,
    distill_config,
    full_targets,
    measure,
)


@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0, 80.0])
def test_the_students_tail_keeps_its_digits(gap: float) -> None:
    """1 - kept mass would be 0, or noise, from a gap of 16 on."""
    logits = torch.tensor([[gap, gap - 1, 0.5, -0.5, 0.0]])
    full = full_targets([1.0, 0.5, 0.0, -1.0, -1.0])
    found = measure(logits, keep_top_k(full, 2), distill_config("forward_kl"))
    expected = measure(logits.double(), keep_top_k(full, 2), distill_config("forward_kl"))
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
    torch.testing.assert_close(found[1].double(), expected[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", WITH_TEACHER)
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_impossible_tokens_are_bounded(name: str, exact: bool, dtype: torch.dtype) -> None:
    """The teacher puts all mass on one token, the student all on another."""
    logits = torch.tensor([[-90.0, 90.0, 0.0, -90.0]], dtype=dtype)
    full = full_targets([0.0, -math.inf, -math.inf, -math.inf])
    targets = full if exact else keep_top_k(full, 2)
    values, slopes = measure(logits, targets, distill_config(name, exact=exact))
    assert slopes.isfinite().all()
    expected = {
        "reverse_kl": -LOGPROB_FLOOR,
        "jsd": math.log(2),
        "forward_kl": 180.0,
        "cross_entropy": 180.0,
    }
    assert float(values) == pytest.approx(expected[name], rel=1e-5)


@pytest.mark.parametrize("name", WITH_TEACHER)
def test_a_tail_that_one_side_lacks(name: str) -> None:
    config = distill_config(name)
    logits = torch.tensor([[1.0, 0.0, -1.0]])
    no_entropy = torch.zeros(1)
    teacher_has_none = TopKRows(
        torch.tensor([[0, 1]]),
        torch.tensor([[0.75, 0.25]]).log(),
        torch.tensor([-math.inf]),
        no_entropy,
    )
    values, slopes = measure(logits, teacher_has_none, config)
    assert values.isfinite().all()
    assert slopes.isfinite().all()
    assert slopes[0, 2] > 0 or name == "jsd", "what the teacher never does loses mass"

    student_has_none = TopKRows(
        torch.tensor([[0, 1, 2]]),
        torch.tensor([[0.5, 0.2, 0.2]]).log(),
        torch.tensor([0.1]).log(),
        no_entropy,
    )
    values, slopes = measure(logits, student_has_none, config)
    oracle = OracleTeacher({0: 0.5, 1: 0.2, 2: 0.2}, 0.1, 0.0)

    def slow(student: list[float]) -> float:
        return slow_divergence(student, oracle, SAMPLED, config)

    assert float(values) == pytest.approx(slow([1.0, 0.0, -1.0]), rel=1e-5)
    assert slopes[0].tolist() == pytest.approx(slow_gradient(slow, [1.0, 0.0, -1.0]), abs=1e-5)


def test_the_floor_is_where_it_is_said_to_be() -> None:
    """Above it nothing changes; below it, reverse KL stops growing."""

    def value(teacher_logprob: float) -> float:
        rest = math.log1p(-math.exp(teacher_logprob))
        targets = FullTargets(torch.tensor([[rest, teacher_logprob]], dtype=torch.float64))
        row = torch.tensor([[0.0, 0.0]], dtype=torch.float64)
        return float(measure(row, targets, distill_config("reverse_kl", exact=True))[0])

    assert value(-49.0) == pytest.approx(math.log(0.5) + 0.5 * 49, abs=1e-12)
    assert value(-60.0) == value(-1e4) == pytest.approx(math.log(0.5) + 25, abs=1e-12)


@pytest.mark.parametrize("top_k", [0, 2, 3])
def test_a_logit_of_minus_infinity_has_no_gradient(top_k: int) -> None:
    """A head whose padding rows are masked; with 3 kept, nothing else is in the tail."""
    logits = torch.tensor([[0.0, 1.0, -math.inf, 0.5]])
    full, short = full_targets([0.0, 1.0, -math.inf, 2.0]), full_targets([0.0, 1.0, 2.0])
    targets = keep_top_k(full, top_k) if top_k else full
    short_targets = keep_top_k(short, top_k) if top_k else short
    for name in WITH_TEACHER:
        config = distill_config(name, exact=top_k == 0)
        values, slopes = measure(logits, targets, config)
        expected, expected_slopes = measure(logits[:, [0, 1, 3]], short_targets, config)
        assert slopes[0, 2] == 0
        torch.testing.assert_close(values, expected)
        torch.testing.assert_close(slopes[:, [0, 1, 3]], expected_slopes)
