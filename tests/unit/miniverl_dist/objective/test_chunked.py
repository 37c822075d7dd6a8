"""Stage one of the backward pass: any cut into chunks, calls and orders gives the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from miniverl_dist.errors import BatchError
from miniverl_dist.objective.chunked import distillation_gradients
from miniverl_dist.objective.distribution import TopKRows, divergence
from tests.support.distillation import (
    DIVERGENCES,
    Costs,
    Inputs,
    Stored,
    distill_config,
    parts,
)


def _assert_close(
    found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float = 1e-12
) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=80)
@given(
    name=st.sampled_from(DIVERGENCES),
    exact=st.booleans(),
    sizes=st.tuples(st.integers(1, 12), st.integers(3, 9), st.integers(1, 4)),
    chunk_size=st.integers(1, 14),
    temperature=st.sampled_from((1.0, 0.7, 2.5)),
    seed=st.integers(0, 99),
)
def test_any_chunk_size_gives_what_all_logits_at_once_give(
    name: str,
    exact: bool,
    sizes: tuple[int, int, int],
    chunk_size: int,
    temperature: float,
    seed: int,
) -> None:
    inputs = Inputs(
        *sizes, distill_config(name, exact=exact, temperature=temperature, coef=0.3), seed=seed
    )
    result = inputs.run(chunk_size)
    _assert_close(parts(result), inputs.naive())
    assert (result.chunk_size, result.num_retries) == (chunk_size, 0)
    if inputs.targets is None:
        assert result.metrics == {}
    elif isinstance(inputs.targets, TopKRows):
        total = float(inputs.targets.entropies.sum())
        tails = float(inputs.targets.tail_logprobs.exp().sum())
        assert result.metrics == {
            "teacher_entropy_sum": pytest.approx(total),
            "teacher_tail_mass_sum": pytest.approx(tails, rel=1e-6, abs=1e-12),
        }
    else:
        terms = inputs.targets.logprobs * inputs.targets.logprobs.exp()
        assert result.metrics == {"teacher_entropy_sum": pytest.approx(-float(terms.sum()))}


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_order_of_rows_and_split_into_calls_change_nothing(name: str, exact: bool) -> None:
    """Which is what padding, microbatches and packing come down to here."""
    inputs = Inputs(11, 8, 4, distill_config(name, exact=exact))
    expected = parts(inputs.run(4))
    order = torch.tensor([3, 10, 0, 7, 5, 1, 9, 2, 8, 6, 4])
    losses, grad_hidden, grad_weight = parts(inputs.run(3, rows=order))
    back = order.argsort()
    _assert_close((losses[back], grad_hidden[back], grad_weight), expected)

    first, second = (parts(inputs.run(4, rows=rows)) for rows in (slice(0, 5), slice(5, 11)))
    joined = (torch.cat((first[0], second[0])), torch.cat((first[1], second[1])))
    _assert_close((*joined, first[2] + second[2]), expected)


def test_the_second_stage_completes_the_gradient() -> None:
    inputs = Inputs(9, 8, 4, distill_config("jsd"))
    layer = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)

    def decoder() -> Tensor:
        return (inputs.hidden @ layer).tanh()

    losses = divergence(decoder() @ inputs.weight.T, inputs.targets, inputs.sampled, inputs.config)
    (expected,) = torch.autograd.grad(losses.sum() / 7, layer)

    hidden = decoder()
    result = distillation_gradients(
        hidden,
        inputs.weight.requires_grad_(),
        inputs.sampled,
        Stored(inputs.targets),
        inputs.config,
        denominator=7.0,
        chunk_size=2,
        on_retry=None,
    )
    assert not any(part.requires_grad for part in parts(result))
    hidden.backward(result.grad_hidden)  # type: ignore[no-untyped-call]
    assert layer.grad is not None
    torch.testing.assert_close(layer.grad, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_bfloat16_sums_over_chunks_in_float32(name: str, exact: bool) -> None:
    inputs = Inputs(512, 30, 8, distill_config(name, exact=exact), dtype=torch.bfloat16)
    losses, grad_hidden, grad_weight = parts(inputs.run(1))
    assert losses.dtype == torch.float32
    assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
    inputs.hidden, inputs.weight = inputs.hidden.double(), inputs.weight.double()
    exact = inputs.naive()
    for found, expected in zip((losses, grad_hidden, grad_weight), exact, strict=True):
        error = float((found.double() - expected).norm() / expected.norm())
        # bfloat16 logits cost up to 0.005; a running sum in bfloat16 over 512 chunks, above 0.015.
        assert error < 0.01


def test_a_frozen_head_gets_no_gradient() -> None:
    inputs = Inputs(5, 8, 4, distill_config())
    result = inputs.run(2, needs_weight=False)
    assert result.grad_weight is None
    _assert_close((result.losses, result.grad_hidden), inputs.naive()[:2])


def test_no_rows_are_no_work() -> None:
    inputs = Inputs(5, 8, 4, distill_config())
    result = inputs.run(2, rows=slice(0, 0))
    assert result.losses.shape == (0,)
    assert result.grad_hidden.shape == (0, 4)
    assert not parts(result)[2].any()
    assert result.metrics == {"teacher_entropy_sum": 0.0}


@pytest.mark.parametrize("needs_teacher", [True, False])
def test_no_tensor_has_more_rows_of_logits_than_a_chunk(needs_teacher: bool) -> None:
    inputs = Inputs(64, 500, 3, distill_config("reverse_kl" if needs_teacher else "sampled_nll"))
    with Costs() as costs:
        inputs.run(8)
    assert costs.largest == 8 * 500


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.zeros(5, 3)}, r"\[5, 3\] and \[8, 4\]"),
        ({"hidden": torch.zeros(5, 4).half()}, "float16, the head is torch.float32"),
        ({"sampled": torch.zeros(4, dtype=torch.int64)}, r"\[4\] sampled rows for 5"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(change: dict[str, Tensor], message: str) -> None:
    inputs = Inputs(5, 8, 4, distill_config(), dtype=torch.float32)
    for name, tensor in change.items():
        setattr(inputs, name, tensor)
    with pytest.raises(BatchError, match=message):
        inputs.run(2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"chunk_size": 0}, "chunk_size must be at least 1"),
        ({"chunk_size": 1, "denominator": 0.0}, "denominator .* found 0.0"),
        ({"chunk_size": 1, "denominator": float("nan")}, "denominator .* found nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(BatchError, match=message):
        Inputs(5, 8, 4, distill_config()).run(**arguments)
