"""Log-probabilities over a vocabulary that is split between tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.support.requirements import require_megatron

require_megatron()

import torch.distributed as dist  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.tensor_parallel import (  # noqa: E402
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from miniverl_dist.backends.megatron.logprobs import vocab_parallel_logprobs  # noqa: E402
from miniverl_dist.config.cluster import ParallelConfig  # noqa: E402
from miniverl_dist.errors import BatchError  # noqa: E402
from miniverl_dist.objective.logprobs import selected_logprobs_with_entropy  # noqa: E402
from tests.support.ranks import Rank, run_ranks  # noqa: E402

N, H = 24, 16


def problem(vocab_size: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(vocab_size)
    hidden = torch.randn(N, H, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab_size, H, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, vocab_size, (N,), generator=generator)
    upstream = torch.randn(N, generator=generator, dtype=torch.float64)
    upstream[::3] = 0
    return hidden.to(dtype), weight.to(dtype), targets, upstream


def full_logits(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    upstream: torch.Tensor,
    temperature: float,
) -> dict[str, np.ndarray[Any, Any]]:
    """The plain way in float64: all logits at once, torch's softmax and autograd."""
    hidden, weight = (t.double().requires_grad_() for t in (hidden, weight))
    rows = torch.log_softmax(hidden @ weight.T / temperature, -1)
    chosen = rows[torch.arange(N), targets]
    chosen.backward(upstream)
    assert hidden.grad is not None
    assert weight.grad is not None
    entropy = -(rows.exp() * rows).sum(-1)
    found = {"logprobs": chosen, "entropy": entropy, "hidden": hidden.grad, "weight": weight.grad}
    return {name: tensor.detach().numpy() for name, tensor in found.items()}


def on_rank(
    vocab_size: int, chunk_size: int, dtype: torch.dtype, *, sequence_parallel: bool
) -> dict[str, np.ndarray[Any, Any]]:
    hidden, weight, targets, upstream = problem(vocab_size, dtype)
    group = parallel_state.get_tensor_model_parallel_group()
    per_rank = -(-vocab_size // group.size())
    first = group.rank() * per_rank
    slice_ = weight[first : first + per_rank].clone().requires_grad_()
    if sequence_parallel:
        own = hidden.chunk(group.size())[group.rank()].clone().requires_grad_()
        given = gather_from_sequence_parallel_region(own, tensor_parallel_output_grad=True)
    else:
        own = hidden.clone().requires_grad_()
        given = copy_to_tensor_model_parallel_region(own)
    logprobs, entropy = vocab_parallel_logprobs(
        given, slice_, targets, chunk_size, first_row=first, group=group, temperature=0.7
    )
    logprobs.backward(upstream.to(logprobs.dtype))
    assert own.grad is not None
    assert slice_.grad is not None
    found = {"logprobs": logprobs, "entropy": entropy, "hidden": own.grad, "weight": slice_.grad}
    return {name: tensor.detach().double().numpy() for name, tensor in found.items()}


CASES = [
    # vocabulary, chunk, dtype, sequence parallel, tolerance
    (37, 5, torch.float64, False, 1e-12),
    (37, 5, torch.float64, True, 1e-12),
    (38, 100, torch.float32, False, 2e-5),
    # 4 ranks hold two rows each of 5: the third has one, the last has padding only.
    (5, 7, torch.float64, False, 1e-12),
    (37, 5, torch.bfloat16, True, 0.3),
]


def all_cases(rank: Rank, world: int) -> list[dict[str, np.ndarray[Any, Any]]]:
    with rank.layout(ParallelConfig(tensor=world)):
        return [
            on_rank(vocab, chunk, dtype, sequence_parallel=sequence)
            for vocab, chunk, dtype, sequence, _ in CASES
        ]


@pytest.mark.parametrize("world", [2, 4])
def test_equals_full_logits_in_double_precision(world: int) -> None:
    results = run_ranks(world, all_cases, world)
    for index, (vocab, _, dtype, sequence, tolerance) in enumerate(CASES):
        oracle = full_logits(*problem(vocab, dtype), temperature=0.7)
        ranks = [result[index] for result in results]
        for name in ("logprobs", "entropy"):
            for found in ranks:
                np.testing.assert_allclose(found[name], oracle[name], rtol=0, atol=tolerance)
        weight = np.concatenate([found["weight"] for found in ranks])
        np.testing.assert_allclose(weight, oracle["weight"], rtol=0, atol=tolerance)
        wholes = [np.concatenate([found["hidden"] for found in ranks])]
        if not sequence:
            wholes = [found["hidden"] for found in ranks]
        for whole in wholes:
            np.testing.assert_allclose(whole, oracle["hidden"], rtol=0, atol=tolerance)


def no_rows(rank: Rank) -> list[float]:
    """A rank without a token to train on still takes part, with a gradient of zeros."""
    with rank.layout(ParallelConfig(tensor=2)):
        group = parallel_state.get_tensor_model_parallel_group()
        hidden = torch.ones(3, H, requires_grad=True)
        weight = torch.ones(4, H, requires_grad=True)
        logprobs, _ = vocab_parallel_logprobs(
            copy_to_tensor_model_parallel_region(hidden)[:0],
            weight,
            torch.zeros(0, dtype=torch.int64),
            8,
            first_row=4 * group.rank(),
            group=group,
        )
        logprobs.sum().backward()
        assert hidden.grad is not None
        assert weight.grad is not None
        return [float(hidden.grad.abs().sum()), float(weight.grad.abs().sum())]


def test_no_predictions_give_zero_gradients() -> None:
    assert run_ranks(2, no_rows) == [[0.0, 0.0], [0.0, 0.0]]


def refused(rank: Rank) -> list[str]:
    with rank.layout(ParallelConfig(tensor=2)):
        group = parallel_state.get_tensor_model_parallel_group()
        messages = []
        for hidden, targets, chunk in [((3, H), 2, 8), ((3, H + 1), 3, 8), ((3, H), 3, 0)]:
            with pytest.raises(BatchError) as error:
                vocab_parallel_logprobs(
                    torch.zeros(hidden),
                    torch.zeros(4, H),
                    torch.zeros(targets, dtype=torch.int64),
                    chunk,
                    first_row=0,
                    group=group,
                )
            messages.append(str(error.value))
        return messages


def test_shapes_that_do_not_fit_are_refused() -> None:
    first, second, third = run_ranks(2, refused)[0]
    assert "targets [N], found [3, 16], [4, 16] and [2]" in first
    assert "found [3, 17], [4, 16] and [3]" in second
    assert "chunk_size must be at least 1" in third


def alone(rank: Rank) -> bool:
    with rank.layout(ParallelConfig()):
        group = dist.group.WORLD
        assert group is not None
        hidden, weight, targets, _ = problem(37, torch.float32)
        found = vocab_parallel_logprobs(
            hidden, weight, targets, 5, first_row=0, group=group, temperature=0.7
        )
        wanted = selected_logprobs_with_entropy(hidden, weight, targets, 5, temperature=0.7)
        return all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_one_rank_is_the_objectives_own_function_to_the_last_bit() -> None:
    assert run_ranks(1, alone) == [True]
