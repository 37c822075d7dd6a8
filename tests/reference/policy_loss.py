"""Slow policy-loss oracle: one token at a time, plain floats, gradients written out by hand.

Every formula is the paper's, not the product's: PPO takes minima and maxima, GSPO multiplies
probabilities, KL gradients are derived on paper. No array, no helper of the product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from miniverl_dist.config.recipe import LossConfig


@dataclass(frozen=True)
class OracleToken:
    """One token on the mask."""

    sequence: int
    policy: float
    proximal: float
    rollout: float
    advantage: float
    reference: float = 0.0


@dataclass
class OracleLoss:
    """Loss, its gradient by each token's policy log-probability, and sums for the metrics."""

    loss: float = 0.0
    gradients: list[float] = field(default_factory=list)
    clip_low: int = 0
    clip_high: int = 0
    dual_clip: int = 0
    capped: int = 0
    mismatch_abs: float = 0.0
    mismatch_kl: float = 0.0
    mismatch_ratio: float = 0.0
    reference_kl: float = 0.0
    ratio_max: float = 0.0


def slow_policy_loss(
    tokens: Sequence[OracleToken],
    config: LossConfig,
    num_loss_tokens: float,
    num_sequences: float,
) -> OracleLoss:
    """The loss of whole sequences; k3 is added when ``config.kl_coef`` says so."""
    result = OracleLoss()
    for token in tokens:
        siblings = [other for other in tokens if other.sequence == token.sequence]
        share = 1 / num_loss_tokens
        if config.reduction == "trajectory_mean":
            share = 1 / len(siblings) / num_sequences
        value, slope = _objective(token, siblings, config, result)
        mismatch = _mismatch(token, config, result)
        kl_value, kl_slope = _weighted_k3(token)
        result.reference_kl += kl_value / math.exp(token.policy - token.proximal)
        if config.kl_coef > 0 and config.kl_estimator == "k3":
            value += config.kl_coef * kl_value
            slope += config.kl_coef * kl_slope
        result.loss += share * mismatch * value
        result.gradients.append(share * mismatch * slope)
    return result


def _objective(
    token: OracleToken, siblings: Sequence[OracleToken], config: LossConfig, result: OracleLoss
) -> tuple[float, float]:
    if config.kind == "ppo":
        return _ppo(token, config, result)
    if config.kind == "gspo_token":
        return _gspo_token(token, siblings, config, result)
    return _cispo(token, config, result)


def _ppo(token: OracleToken, config: LossConfig, result: OracleLoss) -> tuple[float, float]:
    ratio = math.exp(token.policy) / math.exp(token.proximal)
    result.ratio_max = max(result.ratio_max, ratio)
    gain = _clipped_gain(ratio, token.advantage, config, result)
    if token.advantage < 0 and config.dual_clip is not None:
        floor = config.dual_clip * token.advantage
        if gain < floor:
            result.dual_clip += 1
            gain = floor
    moves = gain == ratio * token.advantage
    return -gain, -gain if moves else 0.0


def _gspo_token(
    token: OracleToken, siblings: Sequence[OracleToken], config: LossConfig, result: OracleLoss
) -> tuple[float, float]:
    product = math.prod(math.exp(other.policy) / math.exp(other.proximal) for other in siblings)
    ratio = product ** (1 / len(siblings))
    result.ratio_max = max(result.ratio_max, ratio)
    gain = _clipped_gain(ratio, token.advantage, config, result)
    return -gain, -gain if gain == ratio * token.advantage else 0.0


def _cispo(token: OracleToken, config: LossConfig, result: OracleLoss) -> tuple[float, float]:
    ratio = math.exp(token.policy) / math.exp(token.proximal)
    result.ratio_max = max(result.ratio_max, ratio)
    result.clip_low += ratio < 1 - config.clip_low
    result.clip_high += ratio > 1 + config.clip_high
    weight = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    return -weight * token.advantage * token.policy, -weight * token.advantage


def _clipped_gain(ratio: float, advantage: float, config: LossConfig, result: OracleLoss) -> float:
    clipped = min(max(ratio, 1 - config.clip_low), 1 + config.clip_high)
    gain = min(ratio * advantage, clipped * advantage)
    if gain != ratio * advantage:
        result.clip_low += clipped > ratio
        result.clip_high += clipped < ratio
    return gain


def _mismatch(token: OracleToken, config: LossConfig, result: OracleLoss) -> float:
    result.mismatch_abs += abs(token.proximal - token.rollout)
    weight = math.exp(token.proximal) / math.exp(token.rollout)
    result.mismatch_kl += weight - 1 - math.log(weight)
    result.mismatch_ratio = max(result.mismatch_ratio, weight, 1 / weight)
    if config.mismatch_cap is None:
        return 1.0
    result.capped += weight > config.mismatch_cap
    return min(weight, config.mismatch_cap)


def _weighted_k3(token: OracleToken) -> tuple[float, float]:
    weight = math.exp(token.policy) / math.exp(token.proximal)
    ratio = math.exp(token.reference) / math.exp(token.policy)
    return weight * (ratio - 1 - math.log(ratio)), -weight * math.log(ratio)
