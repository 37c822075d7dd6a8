"""The policy loss of one microbatch, for backends that hold the whole student in one process.

Shapes: N packed tokens, M predictions of a microbatch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import NamedTuple

import torch
from torch import Tensor

from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.errors import UpdateError
from miniverl_dist.objective.policy_loss import Metrics, policy_loss, reference_kl_penalty
from miniverl_dist.objective.reduction import Denominators
from miniverl_dist.schemas.batch import FloatArray, IntArray, TrainBatch

_OF_ADVANTAGES = ("policy_loss", "clip_low_tokens", "clip_high_tokens", "dual_clip_tokens")
_OF_WEIGHTS = "mismatch_capped_tokens"
"""The KL to the reference has the mismatch weight too."""


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


def step_arrays(
    batch: TrainBatch,
    rows: IntArray,
    loss: LossConfig,
    score: Callable[[], FloatArray],
    score_reference: Callable[[], FloatArray] | None,
) -> StepArrays:
    """What stays the same over all optimizer steps of a batch.

    Args:
        batch: The whole batch.
        rows: [N] vocabulary rows of its tokens.
        loss: How the KL to the reference is paid.
        score: [N] nats of the student now, NaN off the mask.
        score_reference: [N] nats of the frozen reference; None without one.
    """
    if not batch.is_sampled:
        return StepArrays(rows, batch.rollout_logprobs, None, batch.advantages)
    proximal = score()
    if score_reference is None:
        return StepArrays(rows, proximal, None, batch.advantages)
    reference = score_reference()
    if loss.kl_estimator == "k3":
        return StepArrays(rows, proximal, reference, batch.advantages)
    lowered = reference_kl_penalty(
        torch.tensor(batch.advantages),
        proximal_logprobs=torch.tensor(proximal),
        reference_logprobs=torch.tensor(reference),
        mask=torch.tensor(batch.loss_mask),
        kl_coef=loss.kl_coef,
    )
    return StepArrays(rows, proximal, reference, lowered.numpy())


def denominators_of(batch: TrainBatch, minibatch: int) -> Denominators:
    """What the policy losses of one optimizer step are divided by."""
    return Denominators(batch.num_loss_tokens[minibatch], batch.num_sequences[minibatch])


def require_finite(loss: float) -> None:
    """Raise ``UpdateError`` for a loss that no step may be taken on."""
    if not isfinite(loss):
        raise UpdateError(f"loss is {loss}: the optimizer step was not taken")


def policy_term(
    scored: Scored,
    arrays: StepArrays,
    batch: TrainBatch,
    config: LossConfig,
    denominators: Denominators,
) -> tuple[Tensor, Metrics]:
    """This microbatch's share of the step's policy loss, and its metrics.

    A batch without advantages gets a graph whose gradient is that of the KL alone. How far trainer,
    engine and proximal policy are apart is measured all the same; what bounds nothing is absent.
    """
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
    metrics |= {"entropy_sum": scored.entropy.sum()}
    unmeasured: tuple[str, ...] = ()
    if not batch.has_policy_term:
        unmeasured = _OF_ADVANTAGES if config.kl_coef > 0 else (*_OF_ADVANTAGES, _OF_WEIGHTS)
    return loss, {name: value for name, value in metrics.items() if name not in unmeasured}
