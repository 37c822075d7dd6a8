"""The policy loss of one microbatch, for backends that hold the whole student in one process.

Shapes: N packed tokens, M predictions of a microbatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.objective.policy_loss import Metrics, policy_loss
from miniverl_dist.objective.reduction import Denominators
from miniverl_dist.schemas.batch import FloatArray, IntArray, TrainBatch


class Scored(NamedTuple):
    """Predictions of one microbatch."""

    packed: IntArray
    """[M] place of each predicted token in the packed batch."""
    sequences: Tensor
    """[M] row of the microbatch that it belongs to."""
    logprobs: Tensor
    """[M] nats."""
    entropy: Tensor
    """[M] nats, detached."""

    def take(self, array: FloatArray) -> Tensor:
        """[M] what a packed array holds for these tokens."""
        return torch.from_numpy(array[self.packed]).to(self.logprobs.device)


@dataclass(frozen=True)
class StepArrays:
    """Packed arrays of one update; what is off the loss mask is NaN or 0 and never read."""

    rows: IntArray
    """[N] vocabulary rows."""
    proximal: FloatArray
    """[N] nats; NaN throughout in a batch that nobody sampled."""
    reference: FloatArray | None
    """[N] nats."""
    advantages: FloatArray
    """[N]."""


def policy_term(
    scored: Scored,
    arrays: StepArrays,
    batch: TrainBatch,
    config: LossConfig,
    denominators: Denominators,
) -> tuple[Tensor, Metrics]:
    """This microbatch's share of the step's policy loss, and its metrics."""
    loss, metrics = policy_loss(
        scored.logprobs,
        proximal_logprobs=scored.take(arrays.proximal),
        rollout_logprobs=scored.take(batch.rollout_logprobs),
        advantages=scored.take(arrays.advantages),
        mask=torch.ones_like(scored.logprobs, dtype=torch.bool),
        sequence_ids=scored.sequences,
        config=config,
        denominators=denominators,
        reference_logprobs=None if arrays.reference is None else scored.take(arrays.reference),
    )
    return loss, metrics | {"entropy_sum": scored.entropy.sum()}
