"""From one value per token to the loss of a step.

Shapes: N tokens of one call, B sequences of the step.

The denominators are arguments, never counted here: they belong to the whole step, while one call
sees a microbatch of one rank. Calls over any split of the tokens therefore add up to the same loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from miniverl_dist.errors import BatchError

Reduction = Literal["token_mean", "trajectory_mean"]


@dataclass(frozen=True)
class Denominators:
    """What the losses of one optimizer step are divided by, over all ranks and microbatches."""

    num_loss_tokens: float
    num_sequences: float
    sequence_lengths: Tensor | None = None
    """[B] loss tokens of each whole sequence, indexed by ``sequence_ids``; None where no sequence
    is split between calls."""


def reduce_tokens(
    values: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    *,
    reduction: Reduction,
    num_loss_tokens: float,
    num_sequences: float,
    sequence_lengths: Tensor | None = None,
) -> Tensor:
    """This call's share of the step's mean.

    Args:
        values: [N]; what lies off the mask is ignored, NaN too.
        mask: [N] bool.
        sequence_ids: [N] int64 from 0; used by ``trajectory_mean`` only.
        reduction: ``token_mean`` divides by the step's tokens; ``trajectory_mean`` gives every
            sequence the same weight, whatever its length.
        num_loss_tokens: of the whole step.
        num_sequences: of the whole step.
        sequence_lengths: [B] loss tokens of each whole sequence; None where no sequence is split
            between calls, so that its tokens can be counted here.

    Returns:
        Scalar; an empty call gives 0 and still carries a gradient graph.

    Raises:
        BatchError: the denominator in use is not positive.
    """
    kept = torch.where(mask, values, 0.0)
    if reduction == "token_mean":
        return kept.sum() / _positive("num_loss_tokens", num_loss_tokens)
    if sequence_lengths is None:
        sequence_lengths = tokens_per_sequence(mask, sequence_ids)
    shares = kept / sequence_lengths.to(kept.dtype).clamp_min(1).index_select(0, sequence_ids)
    return shares.sum() / _positive("num_sequences", num_sequences)


def tokens_per_sequence(mask: Tensor, sequence_ids: Tensor) -> Tensor:
    """[1 + largest id] tokens on the mask of each sequence of this call."""
    num_sequences = int(sequence_ids.max()) + 1 if sequence_ids.numel() else 0
    counts = torch.zeros(num_sequences, dtype=torch.int64, device=mask.device)
    return counts.index_add(0, sequence_ids, mask.to(torch.int64))


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise BatchError(
            f"{name} is {value}, expected a positive number; skip steps without loss tokens"
        )
    return value
