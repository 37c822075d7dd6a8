"""KL estimators: values against enumeration; their gradients are judged with the policy loss."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.objective.divergence import k1, k3

LOGITS = st.lists(st.floats(-5, 5), min_size=5, max_size=5)


@settings(deadline=None, max_examples=100)
@given(LOGITS, LOGITS)
def test_both_estimators_average_to_the_kl(policy: list[float], reference: list[float]) -> None:
    policy_logprobs = torch.tensor(policy, dtype=torch.float64).log_softmax(0)
    reference_logprobs = torch.tensor(reference, dtype=torch.float64).log_softmax(0)
    expected = sum(
        math.exp(p) * (p - r)
        for p, r in zip(policy_logprobs.tolist(), reference_logprobs.tolist(), strict=True)
    )
    for estimator in (k1, k3):
        mean = (policy_logprobs.exp() * estimator(policy_logprobs, reference_logprobs)).sum()
        assert float(mean) == pytest.approx(expected, abs=1e-9)


@settings(deadline=None, max_examples=100)
@given(st.floats(-1e4, 0), st.floats(-1e4, 0))
def test_k3_is_finite_and_never_negative(policy: float, reference: float) -> None:
    value = k3(torch.tensor([policy]), torch.tensor([reference]))
    assert value.isfinite().all()
    assert value >= 0


def test_k3_keeps_its_digits_for_equal_policies() -> None:
    """exp(x) - 1 - x would lose them all in float32."""
    value = k3(torch.tensor([-1.0]), torch.tensor([-1.0 + 2**-10]))
    assert float(value) == pytest.approx(2**-21, rel=1e-3)
