"""The policy loss of one microbatch on one rank.

Shapes: N packed tokens, B sequences, M predictions of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from miniverl_dist.backends.megatron.data import RankMicrobatch
from miniverl_dist.backends.megatron.device import current_device
from miniverl_dist.backends.megatron.step import LossFunction, Scored
from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.objective.policy_loss import Metrics, policy_loss
from miniverl_dist.objective.reduction import Denominators
from miniverl_dist.schemas.batch import FloatArray, IntArray, TrainBatch


@dataclass(frozen=True)
class PolicyArrays:
    """Packed arrays of one update; what is off the loss mask is NaN or 0 and never read."""

    batch: TrainBatch
    advantages: FloatArray
    """[N]; lowered by the KL to the reference under ``k1_in_reward``."""
    proximal: FloatArray
    """[N] nats."""
    reference: FloatArray | None
    """[N] nats."""
    sequence_lengths: IntArray
    """[B] loss tokens of each whole sequence, which context parallelism splits over ranks."""


def policy_loss_function(
    arrays: PolicyArrays,
    config: LossConfig,
    denominators: Denominators,
    scored_by: Callable[[RankMicrobatch, Tensor], Scored],
) -> LossFunction:
    """The loss of a microbatch's predictions, given its hidden states.

    Args:
        arrays: Of the batch that the microbatches are cut from.
        config: The loss.
        denominators: Of the optimizer step.
        scored_by: Log-probabilities out of hidden states, at the batch's temperature.
    """
    batch, where = arrays.batch, current_device()
    lengths = torch.from_numpy(arrays.sequence_lengths).to(where)
    denominators = replace(denominators, sequence_lengths=lengths)

    def loss_function(part: RankMicrobatch, hidden: Tensor) -> tuple[Tensor, Metrics]:
        def take(array: FloatArray) -> Tensor:
            return torch.from_numpy(array[part.packed]).to(where)

        scored = scored_by(part, hidden)
        reference = arrays.reference
        loss, metrics = policy_loss(
            scored.logprobs,
            proximal_logprobs=take(arrays.proximal),
            rollout_logprobs=take(batch.rollout_logprobs),
            advantages=take(arrays.advantages),
            mask=torch.ones_like(scored.logprobs, dtype=torch.bool),
            sequence_ids=torch.from_numpy(part.sequences).to(where),
            config=config,
            denominators=denominators,
            reference_logprobs=None if reference is None else take(reference),
        )
        return loss, metrics | {"entropy_sum": scored.entropy.sum()}

    return loss_function
