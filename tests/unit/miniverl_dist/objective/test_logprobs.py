"""The chunked projection against the plain one, what it costs, and the shift by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from miniverl_dist.errors import BatchError
from miniverl_dist.objective import logprobs
from miniverl_dist.objective.logprobs import (
    predictions,
    selected_logprobs,
    selected_logprobs_with_entropy,
)

Inputs = tuple[Tensor, Tensor, Tensor]


def _inputs(
    num_rows: int, vocab: int, width: int, *, dtype: torch.dtype = torch.float64, seed: int = 0
) -> Inputs:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_rows, width, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, width, generator=generator, dtype=torch.float64)
    targets = torch.randint(vocab, (num_rows,), generator=generator)
    return hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_(), targets


def _naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> Tensor:
    logits = hidden @ weight.T / temperature
    return logits.log_softmax(-1).gather(1, targets[:, None]).squeeze(1)


def _with_gradients(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs, slopes: Tensor
) -> list[Tensor]:
    values = function(*inputs)
    gradients = torch.autograd.grad(values, inputs[:2], slopes.to(values.dtype))
    return [values.detach(), *gradients]


def _relative_error(found: Tensor, expected: Tensor) -> float:
    difference = (found.double() - expected.double()).norm()
    return float(difference / expected.double().norm().clamp_min(1e-300))


@settings(deadline=None, max_examples=100)
@given(
    sizes=st.tuples(st.integers(1, 12), st.integers(1, 9), st.integers(1, 5)),
    chunk_size=st.integers(1, 14),
    temperature=st.sampled_from((1.0, 0.7, 2.5)),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_values_and_gradients_equal_the_plain_projection(
    sizes: tuple[int, int, int], chunk_size: int, temperature: float, seed: int, data: st.DataObject
) -> None:
    inputs = _inputs(*sizes, seed=seed)
    slopes = torch.tensor(
        data.draw(
            st.lists(st.sampled_from((0.0, -1.0, 0.5, 2.0)), min_size=sizes[0], max_size=sizes[0])
        )
    )
    found = _with_gradients(
        lambda *args: selected_logprobs(*args, chunk_size, temperature=temperature), inputs, slopes
    )
    expected = _with_gradients(lambda *args: _naive(*args, temperature), inputs, slopes)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 200, 1000])
def test_float32_differs_from_the_plain_way_by_rounding_only(chunk_size: int) -> None:
    inputs = _inputs(200, 1000, 24, dtype=torch.float32)
    slopes = torch.randn(200, generator=torch.Generator().manual_seed(1))
    found = _with_gradients(lambda *args: selected_logprobs(*args, chunk_size), inputs, slopes)
    plain = _with_gradients(_naive, inputs, slopes)
    whole = _with_gradients(lambda *args: selected_logprobs(*args, 200), inputs, slopes)
    for one, other, unchunked in zip(found, plain, whole, strict=True):
        assert _relative_error(one, other) < 1e-6
        assert _relative_error(one, unchunked) < 1e-6


def test_bfloat16_sums_the_weight_gradient_over_chunks_in_float32() -> None:
    inputs = _inputs(512, 50, 8, dtype=torch.bfloat16)
    slopes = torch.ones(512)
    hidden, weight = (array.detach().double().requires_grad_() for array in inputs[:2])
    exact = _with_gradients(_naive, (hidden, weight, inputs[2]), slopes)
    found = _with_gradients(lambda *args: selected_logprobs(*args, 4), inputs, slopes)

    assert found[0].dtype == torch.float32
    assert found[1].dtype == found[2].dtype == torch.bfloat16
    assert _relative_error(found[0], exact[0]) < 2**-8
    # A running sum in bfloat16 over 128 chunks would be off by several per cent.
    assert _relative_error(found[2], exact[2]) < 2**-7


def test_gradients_are_the_derivatives() -> None:
    hidden, weight, targets = _inputs(5, 7, 3)
    assert torch.autograd.gradcheck(
        lambda h, w: selected_logprobs(h, w, targets, 2, temperature=0.8), (hidden, weight)
    )


@pytest.mark.parametrize("block_elements", [1, 20, 1 << 20])
def test_entropy_is_that_of_each_row_and_carries_no_gradient(
    block_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "_BLOCK_ELEMENTS", block_elements)
    hidden, weight, targets = _inputs(11, 9, 4)
    values, entropy = selected_logprobs_with_entropy(hidden, weight, targets, 4, temperature=0.5)
    log_probabilities = (hidden @ weight.T / 0.5).log_softmax(-1)

    torch.testing.assert_close(entropy, -(log_probabilities.exp() * log_probabilities).sum(-1))
    torch.testing.assert_close(values, _naive(hidden, weight, targets, 0.5))
    assert values.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(values.sum(), weight)[0],
        torch.autograd.grad(_naive(hidden, weight, targets, 0.5).sum(), weight)[0],
    )


def test_huge_logits_stay_finite_and_exact() -> None:
    weight = torch.tensor([[1e4], [-1e4], [1e4 - 1]], requires_grad=True)
    hidden = torch.ones(2, 1, requires_grad=True)
    values, entropy = selected_logprobs_with_entropy(hidden, weight, torch.tensor([0, 1]), 8)
    share = 1 / (1 + math.exp(-1))
    torch.testing.assert_close(values, torch.tensor([math.log(share), -2e4 + math.log(share)]))
    rest = 1 - share
    expected = -share * math.log(share) - rest * math.log(rest)
    torch.testing.assert_close(entropy, torch.tensor([expected] * 2))
    (gradient,) = torch.autograd.grad(values[0], weight)
    torch.testing.assert_close(gradient[:, 0], torch.tensor([1 - share, 0.0, -rest]))


class _Costs(TorchDispatchMode):
    """What the operations inside cost: multiplications of matrix products, largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_multiplications = 0
        self.largest = 0

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        if "mm" in str(func):  # mm, addmm, addmm_: the factors come last
            left, right = args[-2:]
            self.num_multiplications += left.shape[0] * left.shape[1] * right.shape[1]
        return result


def test_no_tensor_has_more_rows_of_logits_than_a_chunk() -> None:
    inputs = _inputs(64, 500, 3)
    with _Costs() as costs:
        _with_gradients(lambda *args: selected_logprobs(*args, 4), inputs, torch.ones(64))
    assert costs.largest == 4 * 500

    with _Costs() as costs:
        _with_gradients(_naive, inputs, torch.ones(64))
    assert costs.largest == 64 * 500


@pytest.mark.parametrize(
    ("frozen", "slopes", "num_products"),
    [
        ((), [1.0] * 8, 4),  # forward; again; for hidden; for weight
        ((0,), [1.0] * 8, 3),
        ((1,), [1.0] * 8, 3),
        ((), [0.0, 1.0, 0.0, 0.0, 2.0, 0.0, 0.0, 0.0], 1 + 3 * 2 / 8),
        ((), [0.0] * 8, 1),
    ],
)
def test_backward_multiplies_only_what_is_needed(
    frozen: tuple[int, ...], slopes: list[float], num_products: float
) -> None:
    inputs = _inputs(8, 50, 6)
    for index in frozen:
        inputs[index].requires_grad_(requires_grad=False)
    with _Costs() as costs:
        selected_logprobs(*inputs, 3).backward(torch.tensor(slopes, dtype=torch.float64))
    assert costs.num_multiplications == num_products * 8 * 50 * 6
    for index in frozen:
        assert inputs[index].grad is None


def test_rows_without_an_incoming_gradient_cannot_spoil_one() -> None:
    hidden, weight, targets = _inputs(4, 6, 3)
    with torch.no_grad():
        hidden[2] = float("nan")
    values = selected_logprobs(hidden, weight, targets, 2)
    values[torch.tensor([0, 1, 3])].sum().backward()
    assert values.isnan().tolist() == [False, False, True, False]
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.isfinite().all()
    assert weight.grad.isfinite().all()
    assert not hidden.grad[2].any()


def test_a_not_finite_incoming_gradient_is_passed_on() -> None:
    hidden, weight, targets = _inputs(3, 6, 3)
    selected_logprobs(hidden, weight, targets, 2).backward(
        torch.tensor([0.0, float("nan"), 1.0], dtype=torch.float64)
    )
    assert hidden.grad is not None
    assert hidden.grad.isnan().any(1).tolist() == [False, True, False]


def test_no_rows_give_no_values_and_zero_gradients() -> None:
    hidden, weight, targets = _inputs(0, 6, 3)
    values = selected_logprobs(hidden, weight, targets, 2)
    values.sum().backward()
    assert values.shape == (0,)
    assert hidden.grad is not None
    assert hidden.grad.shape == (0, 3)
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden": torch.ones(4, 2)}, "expected hidden"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, "targets"),
        ({"chunk_size": 0}, "chunk_size"),
        ({"temperature": 0.0}, "temperature"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    hidden, weight, targets = _inputs(4, 6, 3)
    arguments: dict[str, Any] = {"hidden": hidden, "weight": weight, "targets": targets}
    with pytest.raises(BatchError, match=message):
        selected_logprobs(**(arguments | {"chunk_size": 2} | change))


def test_peer_3_every_token_is_scored_by_the_logits_before_it() -> None:
    """Three tokens with hand-made logits: the state at position t is row t of the table."""
    logits_after = torch.tensor([[1.0, 2.0, 4.0], [0.0, 3.0, 1.0], [9.0, 9.0, 9.0]])
    hidden, token_ids = torch.eye(3)[None], torch.tensor([[0, 2, 1]])
    found = predictions(hidden, token_ids, torch.tensor([3]))
    values = selected_logprobs(found.hidden, logits_after.T.contiguous(), found.targets, 256)

    assert found.targets.tolist() == [2, 1]
    assert found.positions.tolist() == [1, 2]
    expected = [
        4 - math.log(math.exp(1) + math.exp(2) + math.exp(4)),
        3 - math.log(math.exp(0) + math.exp(3) + math.exp(1)),
    ]
    torch.testing.assert_close(values, torch.tensor(expected))


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=5), st.integers(0, 2), st.integers(0, 99))
def test_predictions_pair_each_position_with_the_state_before_it(
    lengths: list[int], padding: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    padded = max(lengths) + padding
    token_ids = torch.randint(1000, (len(lengths), padded), generator=generator)
    hidden = torch.full((len(lengths), padded, 2), float("nan"))
    for row, length in enumerate(lengths):
        hidden[row, :length, 0] = row
        hidden[row, :length, 1] = torch.arange(length, dtype=torch.float32)
    wanted = [(row, t) for row, length in enumerate(lengths) for t in range(1, length)]
    kept = [pair for pair in wanted if torch.rand(1, generator=generator) < 0.6]
    mask = torch.zeros_like(token_ids, dtype=torch.bool)
    for row, t in kept:
        mask[row, t] = True

    for loss_mask, pairs in ((None, wanted), (mask, kept)):
        found = predictions(hidden, token_ids, torch.tensor(lengths), loss_mask)
        assert found.hidden.tolist() == [[row, t - 1] for row, t in pairs]
        assert found.targets.tolist() == [int(token_ids[row, t]) for row, t in pairs]
        assert found.positions.tolist() == [row * padded + t for row, t in pairs]


def test_gradient_goes_to_the_states_that_predict_and_nowhere_else() -> None:
    hidden = torch.zeros(2, 3, 1, requires_grad=True)
    token_ids = torch.zeros(2, 3, dtype=torch.int64)
    predictions(hidden, token_ids, torch.tensor([3, 2])).hidden.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad[..., 0].tolist() == [[1, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize(("row", "position"), [(0, 0), (1, 2)])
def test_a_mask_on_what_nothing_predicts_is_refused(row: int, position: int) -> None:
    mask = torch.zeros(2, 3, dtype=torch.bool)
    mask[row, position] = True
    with pytest.raises(BatchError, match="position 0 or behind"):
        predictions(
            torch.zeros(2, 3, 1), torch.zeros(2, 3, dtype=torch.int64), torch.tensor([3, 2]), mask
        )


def test_a_length_beyond_the_padding_is_refused() -> None:
    with pytest.raises(BatchError, match="4 tokens in a row of 3"):
        predictions(torch.zeros(1, 3, 1), torch.zeros(1, 3, dtype=torch.int64), torch.tensor([4]))
