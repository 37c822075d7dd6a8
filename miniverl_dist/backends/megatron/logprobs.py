"""Log-probabilities of chosen tokens where the vocabulary is split over tensor-parallel ranks.

The same walk in chunks as ``objective.logprobs``: no rank ever holds more than one chunk of logits
over its own slice of the vocabulary. Two all-reduces a chunk (peaks; sums) make the slices one
softmax. The backward pass projects each chunk once more and needs no further normaliser.

Who sums the gradient of the hidden states: whoever handed them out. A slice of the vocabulary
yields only its part of that gradient, and the parts are returned as they are. The states must come
out of an operation whose backward pass adds them up over the tensor-parallel group: with sequence
parallelism ``gather_from_sequence_parallel_region(..., tensor_parallel_output_grad=True)`` (a
reduce-scatter, half of what an all-reduce here would move), without it
``copy_to_tensor_model_parallel_region``. ``setup.forward_hidden`` does so.

Shapes: N rows of one call, n rows of a chunk, H hidden, v rows of this rank's vocabulary slice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from miniverl_dist.errors import BatchError
from miniverl_dist.objective.logprobs import (
    LogitChunk,
    check_chunking,
    projection_gradients,
    selected_logprobs_with_entropy,
)


def vocab_parallel_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk_size: int,
    *,
    first_row: int,
    group: dist.ProcessGroup,
    temperature: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Log-probability of one token per row, and the entropy of every row (detached).

    Args:
        hidden: [N, H]; equal on all ranks of the group. Its gradient is this slice's part only.
        weight: [v, H] the vocabulary rows of this rank without padding; may be empty.
        targets: [N] int64 rows of the whole vocabulary; equal on all ranks of the group.
        chunk_size: rows whose logits exist at a time.
        first_row: row of the whole vocabulary that ``weight`` begins with.
        group: tensor-parallel group; with one rank this is ``objective.selected_logprobs``.
        temperature: that of the sampling engine, > 0.

    Returns:
        ``([N], [N])`` nats, equal on all ranks of the group; float32 where ``hidden`` has less
        precision.

    Raises:
        BatchError: shapes that do not fit each other, or a chunk size or temperature <= 0.
    """
    if group.size() == 1:
        return selected_logprobs_with_entropy(
            hidden, weight, targets, chunk_size, temperature=temperature
        )
    rows, width = hidden.shape[:1], hidden.shape[1:]
    if hidden.dim() != 2 or targets.shape != rows or weight.shape[1:] != width:
        raise BatchError(
            f"expected hidden [N, H], weight [v, H] and targets [N], found {list(hidden.shape)}, "
            f"{list(weight.shape)} and {list(targets.shape)}"
        )
    check_chunking(chunk_size, temperature)
    logprobs, entropy = _VocabParallelLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden, weight, targets - first_row, chunk_size, temperature, group
    )
    return logprobs, entropy


class _VocabParallelLogprobs(torch.autograd.Function):
    """``objective.logprobs._SelectedLogprobs`` over a split vocabulary."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401 -- torch types its context so
        hidden: Tensor,
        weight: Tensor,
        local_targets: Tensor,
        chunk_size: int,
        temperature: float,
        group: dist.ProcessGroup,
    ) -> tuple[Tensor, Tensor]:
        chunk = LogitChunk(weight, min(chunk_size, len(hidden)), temperature)
        results = chunk.logits.new_empty(4, len(hidden))
        for start in range(0, len(hidden), chunk_size):
            rows = slice(start, start + chunk_size)
            results[:, rows] = _normalise(chunk.project(hidden[rows]), local_targets[rows], group)
        chosen, peak, log_total, entropy = results
        ctx.save_for_backward(hidden, weight, local_targets, peak, log_total)
        ctx.settings = chunk_size, temperature
        ctx.mark_non_differentiable(entropy)
        # As two differences: peak and log of the total, added up first, would round away digits.
        return chosen - peak - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any,  # noqa: ANN401 -- see forward
        grad_logprobs: Tensor,
        _grad_entropy: Tensor,
    ) -> tuple[Tensor | None, Tensor | None, None, None, None, None]:
        hidden, weight, local_targets, peak, log_total = ctx.saved_tensors
        chunk_size, temperature = ctx.settings

        def to_slopes(logits: Tensor, part: Tensor) -> None:
            logits.sub_(peak[part, None]).sub_(log_total[part, None]).exp_()
            inside, columns = _own_targets(logits, local_targets[part])
            logits[inside, columns] -= 1

        # No collective below, so ranks may differ here; they do not, since the loss is the same.
        grad_hidden, grad_weight = projection_gradients(
            hidden,
            weight,
            grad_logprobs,
            to_slopes,
            chunk_size=chunk_size,
            temperature=temperature,
            needs=ctx.needs_input_grad[:2],
        )
        return grad_hidden, grad_weight, None, None, None, None


def _normalise(logits: Tensor, local_targets: Tensor, group: dist.ProcessGroup) -> Tensor:
    """[4, n] target logit, peak, log of the total of ``exp(logit - peak)``, entropy.

    Each over all slices; destroys the logits. The logit of a target outside this slice counts as 0.
    """
    inside, columns = _own_targets(logits, local_targets)
    chosen = logits.new_zeros(len(logits))
    chosen[inside] = logits[inside, columns]
    # A rank whose slice is all padding has no peak of its own.
    peak = logits.amax(-1) if logits.shape[1] else logits.new_full((len(logits),), -torch.inf)
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(peak[:, None])
    exponentials = logits.exp()
    sums = torch.stack([chosen, exponentials.sum(-1), exponentials.mul_(logits).sum(-1)])
    dist.all_reduce(sums, group=group)
    chosen, total, weighted = sums
    return torch.stack([chosen, peak, total.log(), total.log() - weighted / total])


def _own_targets(logits: Tensor, local_targets: Tensor) -> tuple[Tensor, Tensor]:
    """Rows whose target lies in this rank's slice, and its column there."""
    inside = ((local_targets >= 0) & (local_targets < logits.shape[1])).nonzero().squeeze(-1)
    return inside, local_targets[inside]
