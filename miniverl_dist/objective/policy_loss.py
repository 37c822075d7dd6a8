"""The policy loss: what an advantage does to the log-probability of a sampled token.

Shapes: N tokens of one call, B sequences of the step. Everything is per token; masks, not
compaction, say what counts, and what lies off the mask may be NaN.

A token's loss is the product of three things:

* the objective of ``LossConfig.kind``, built on ``policy / proximal``: how far this step has moved
  from the policy that the batch was taken up with;
* the engine mismatch ``min(proximal / rollout, cap)``, detached: trainer and engine give the same
  token slightly different probabilities, and the token was drawn by the engine's;
* a share of the step's global denominator (``reduction``).

The KL to the frozen reference is added with the same shares.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.objective.divergence import MAX_LOG_RATIO, k1, k3
from miniverl_dist.objective.reduction import Denominators, reduce_tokens, tokens_per_sequence

Metrics = dict[str, Tensor | float]
"""``*_tokens`` are counts, ``*_sum`` sums over tokens and ``*_loss`` shares of the step's losses:
they add up over calls. Of ``*_max`` the largest counts."""

_PER_TOKEN = {
    "clip_low_tokens": "clip_low_fraction",
    "clip_high_tokens": "clip_high_fraction",
    "dual_clip_tokens": "dual_clip_fraction",
    "mismatch_capped_tokens": "mismatch_capped_fraction",
    "mismatch_abs_sum": "mismatch_mean_abs",
    "mismatch_kl_sum": "mismatch_kl",
    "reference_kl_sum": "reference_kl_mean",
    "entropy_sum": "entropy_mean",  # added by the backend, which has the logits
}
_LARGEST = {"mismatch_ratio_max": "mismatch_max_ratio"}


def policy_loss(  # noqa: PLR0913 -- eight arrays that mean different things, named at the call
    policy_logprobs: Tensor,
    *,
    proximal_logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    sequence_ids: Tensor,
    config: LossConfig,
    denominators: Denominators,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, Metrics]:
    """This call's share of the step's loss.

    Losses, counts and sums of a step's calls add up to those of one call over all tokens; only
    ``gspo_token`` needs each sequence in one call as a whole.

    Args:
        policy_logprobs: [N] nats by the trainer now; carries the gradient.
        proximal_logprobs: [N] nats by the trainer before the first optimizer step of the batch.
        rollout_logprobs: [N] nats by the engine when sampling.
        advantages: [N]; under ``k1_in_reward``, those that ``reference_kl_penalty`` returned.
        mask: [N] bool.
        sequence_ids: [N] int64 from 0.
        config: kind, clip ranges, mismatch cap, reduction, KL.
        denominators: of the whole step.
        reference_logprobs: [N] nats by the frozen reference; None without one.

    Returns:
        ``(loss, metrics)``; the metrics are detached.

    Raises:
        BatchError: lengths differ, the KL loss lacks its reference, or a denominator is not
            positive.
    """
    tokens = _Tokens(
        policy=policy_logprobs,
        proximal=proximal_logprobs.detach(),
        rollout=rollout_logprobs.detach(),
        advantages=advantages.detach(),
        reference=None if reference_logprobs is None else reference_logprobs.detach(),
        mask=mask,
        sequence_ids=sequence_ids,
    ).cleaned()
    objective, metrics = _OBJECTIVES[config.kind](tokens, config)
    mismatch, mismatch_metrics = _engine_mismatch(tokens, config.mismatch_cap)
    loss = _reduce(mismatch * objective, tokens, config, denominators)
    metrics |= mismatch_metrics | {"num_tokens": mask.sum(), "policy_loss": loss.detach()}
    if tokens.reference is not None:
        metrics["reference_kl_sum"] = k3(tokens.policy, tokens.reference).detach().sum()
    if config.kl_coef > 0 and config.kl_estimator == "k3":
        kl = config.kl_coef * mismatch * _weighted_k3(tokens)
        kl_loss = _reduce(kl, tokens, config, denominators)
        metrics["kl_loss"] = kl_loss.detach()
        loss = loss + kl_loss
    return loss, metrics


def reference_kl_penalty(
    advantages: Tensor,
    *,
    proximal_logprobs: Tensor,
    reference_logprobs: Tensor,
    mask: Tensor,
    kl_coef: float,
) -> Tensor:
    """Advantages lowered by the KL to the reference (``kl_estimator: k1_in_reward``).

    Each token pays for its own log-ratio only, once per batch: the penalty is a constant of the
    optimizer steps that follow.

    Args:
        advantages: [N]; returned as they are off the mask.
        proximal_logprobs: [N] nats.
        reference_logprobs: [N] nats.
        mask: [N] bool.
        kl_coef: weight, >= 0.
    """
    penalty = kl_coef * k1(proximal_logprobs, reference_logprobs).detach()
    return torch.where(mask, advantages - penalty.to(advantages.dtype), advantages)


def merge_metrics(*parts: Mapping[str, Tensor | float]) -> Metrics:
    """Metrics of several calls (microbatches, ranks) as those of one; a missing key is no value."""
    merged: Metrics = {}
    for part in parts:
        for name, value in part.items():
            if name not in merged:
                merged[name] = value
            elif name.endswith("_max"):
                merged[name] = max(merged[name], value)
            else:
                merged[name] = merged[name] + value
    return merged


def summarize(metrics: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Merged metrics under the names of metrics.jsonl: counts and sums per token on the mask."""
    num_tokens = max(float(metrics["num_tokens"]), 1.0)
    report: dict[str, float] = {}
    for name, value in metrics.items():
        if name in _PER_TOKEN:
            report[_PER_TOKEN[name]] = float(value) / num_tokens
        elif name != "num_tokens":
            report[_LARGEST.get(name, name)] = float(value)
    return report


@dataclass(frozen=True)
class _Tokens:
    """The arrays of one call, all [N]."""

    policy: Tensor
    proximal: Tensor
    rollout: Tensor
    advantages: Tensor
    reference: Tensor | None
    mask: Tensor
    sequence_ids: Tensor

    def __post_init__(self) -> None:
        """Check the lengths, before anything is broadcast."""
        for field in fields(self):
            array = getattr(self, field.name)
            if array is not None and array.shape != self.mask.shape:
                raise BatchError(
                    f"{field.name} has shape {list(array.shape)}, expected that of the mask, "
                    f"{list(self.mask.shape)}"
                )

    def cleaned(self) -> _Tokens:
        """The same in the policy's dtype, with 0 everywhere off the mask.

        This must come before any ``exp``: a NaN that only a later ``where`` hides comes back in the
        gradient as 0 * NaN.
        """

        def clean(array: Tensor) -> Tensor:
            return torch.where(self.mask, array.to(self.policy.dtype), 0.0)

        return replace(
            self,
            policy=clean(self.policy),
            proximal=clean(self.proximal),
            rollout=clean(self.rollout),
            advantages=clean(self.advantages),
            reference=None if self.reference is None else clean(self.reference),
        )


def _ratio(numerator: Tensor, denominator: Tensor) -> Tensor:
    return (numerator - denominator).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _ppo(tokens: _Tokens, config: LossConfig) -> tuple[Tensor, Metrics]:
    """Clipped surrogate with asymmetric bounds and dual clip.

    Source:
        PPO, arXiv:1707.06347; dual clip, arXiv:1912.09729; asymmetric bounds (DAPO),
        arXiv:2503.14476.
    """
    ratio = _ratio(tokens.policy, tokens.proximal)
    return _clipped_surrogate(ratio, tokens, config, dual_clip=config.dual_clip)


def _gspo_token(tokens: _Tokens, config: LossConfig) -> tuple[Tensor, Metrics]:
    """The ratio of a sequence is the geometric mean of its tokens' ratios; all its tokens share it.

    The second factor is 1 and routes the gradient: every token keeps its own advantage.

    Source:
        GSPO (section on GSPO-token), arXiv:2507.18071.
    """
    log_ratio = tokens.policy.detach() - tokens.proximal
    lengths = tokens_per_sequence(tokens.mask, tokens.sequence_ids)
    sums = log_ratio.new_zeros(len(lengths)).index_add(0, tokens.sequence_ids, log_ratio)
    mean = (sums / lengths.clamp_min(1)).index_select(0, tokens.sequence_ids)
    ratio = _ratio(mean, torch.zeros_like(mean)) * (tokens.policy - tokens.policy.detach()).exp()
    return _clipped_surrogate(ratio, tokens, config, dual_clip=None)


def _cispo(tokens: _Tokens, config: LossConfig) -> tuple[Tensor, Metrics]:
    """REINFORCE under a clipped, detached importance weight: no token loses its gradient.

    Source:
        CISPO (MiniMax-M1), arXiv:2506.13585.
    """
    ratio = _ratio(tokens.policy.detach(), tokens.proximal)
    low, high = 1 - config.clip_low, 1 + config.clip_high
    objective = -ratio.clamp(low, high) * tokens.advantages * tokens.policy
    return objective, {
        "clip_low_tokens": (ratio < low).sum(),
        "clip_high_tokens": (ratio > high).sum(),
        "ratio_max": _largest(ratio, tokens.mask),
    }


_OBJECTIVES = {"ppo": _ppo, "gspo_token": _gspo_token, "cispo": _cispo}


def _clipped_surrogate(
    ratio: Tensor, tokens: _Tokens, config: LossConfig, *, dual_clip: float | None
) -> tuple[Tensor, Metrics]:
    """``-min(ratio A, clip(ratio) A)``, with the loss of negative advantages bounded above.

    Written by cases: the minimum takes the bound exactly where the ratio has moved too far in the
    direction that the advantage asks for. There the gradient is zero; elsewhere its sign is
    the advantage's, so no bound can ever turn it around.
    """
    low, high = 1 - config.clip_low, 1 + config.clip_high
    gains, loses = tokens.advantages > 0, tokens.advantages < 0
    too_low, too_high = loses & (ratio < low), gains & (ratio > high)
    bounded = ratio.masked_fill(too_low, low).masked_fill(too_high, high)
    metrics: Metrics = {
        "clip_low_tokens": too_low.sum(),
        "clip_high_tokens": too_high.sum(),
        "ratio_max": _largest(ratio, tokens.mask),
    }
    if dual_clip is not None:
        too_bad = loses & (ratio > dual_clip)
        bounded = bounded.masked_fill(too_bad, dual_clip)
        metrics["dual_clip_tokens"] = too_bad.sum()
    return -bounded * tokens.advantages, metrics


def _engine_mismatch(tokens: _Tokens, cap: float | None) -> tuple[Tensor, Metrics]:
    """Truncated importance weight between trainer and engine, and how far the two are apart.

    The KL is that of engine and trainer, estimated on the engine's own samples. A teacher with the
    very weights of the student would measure no less: below it, a reverse KL means nothing.
    """
    gap = (tokens.proximal - tokens.rollout).abs()
    metrics: Metrics = {
        "mismatch_abs_sum": gap.sum(),
        "mismatch_ratio_max": _largest(_ratio(gap, torch.zeros_like(gap)), tokens.mask),
        "mismatch_kl_sum": k3(tokens.rollout, tokens.proximal).sum(),
    }
    if cap is None:
        return torch.ones_like(tokens.proximal), metrics
    ratio = _ratio(tokens.proximal, tokens.rollout)
    metrics["mismatch_capped_tokens"] = (tokens.mask & (ratio > cap)).sum()
    return ratio.clamp_max(cap), metrics


def _weighted_k3(tokens: _Tokens) -> Tensor:
    """Loss whose gradient estimates that of KL(policy || reference) at the visited prefixes.

    The tokens were drawn by the proximal policy (by the engine, which the mismatch weight settles),
    while the KL is an expectation under the policy that is differentiated. So the weight
    policy / proximal stands in front and carries a gradient too. With r = reference / policy, its
    part is k3 = r - 1 - log r and that of k3 itself 1 - r, both times the gradient of the
    log-probability: together log(policy / reference), which is the true gradient's sample. Without
    the weight, k3 would follow KL(reference || policy).
    """
    if tokens.reference is None:
        raise BatchError("kl_coef is above 0 with kl_estimator k3, but reference_logprobs is None")
    return _ratio(tokens.policy, tokens.proximal) * k3(tokens.policy, tokens.reference)


def _largest(ratio: Tensor, mask: Tensor) -> Tensor | float:
    return ratio.detach().masked_fill(~mask, 0.0).amax() if len(mask) else 0.0


def _reduce(
    values: Tensor, tokens: _Tokens, config: LossConfig, denominators: Denominators
) -> Tensor:
    return reduce_tokens(
        values,
        tokens.mask,
        tokens.sequence_ids,
        reduction=config.reduction,
        num_loss_tokens=denominators.num_loss_tokens,
        num_sequences=denominators.num_sequences,
        sequence_lengths=denominators.sequence_lengths,
    )
