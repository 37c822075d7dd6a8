"""Slow advantage oracle: plain loops, exact rationals for the group means."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from fractions import Fraction


def slow_group_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[Hashable],
    *,
    normalize_std: bool = False,
    std_floor: float = 1e-3,
) -> list[float]:
    """Reward minus the exact mean of its group, over the exact population deviation if asked."""
    advantages = []
    for reward, group_id in zip(rewards, group_ids, strict=True):
        group = [
            Fraction(other)
            for other, its_id in zip(rewards, group_ids, strict=True)
            if its_id == group_id
        ]
        mean = sum(group, Fraction(0)) / len(group)
        centered = float(Fraction(reward) - mean)
        if normalize_std:
            variance = sum(((other - mean) ** 2 for other in group), Fraction(0)) / len(group)
            centered /= max(math.sqrt(variance), std_floor)
        advantages.append(centered)
    return advantages


def slow_leave_one_out(
    weights: Sequence[float], mask: Sequence[bool], sequence_ids: Sequence[int]
) -> list[float]:
    """Mean of the other sequences' masked weights; 0 off the mask or where there are none."""
    baseline = []
    for token, own_id in enumerate(sequence_ids):
        others = [
            weights[other]
            for other, its_id in enumerate(sequence_ids)
            if mask[other] and its_id != own_id
        ]
        baseline.append(math.fsum(others) / len(others) if others and mask[token] else 0.0)
    return baseline


def slow_token_advantages(
    group_advantage: Sequence[float],
    weights: Sequence[float],
    mask: Sequence[bool],
    sequence_ids: Sequence[int],
    opd_coef: float,
) -> list[float]:
    """Group advantage, less the OPD term on scored tokens."""
    return [
        group_advantage[sequence] - (opd_coef * weight if scored else 0.0)
        for weight, scored, sequence in zip(weights, mask, sequence_ids, strict=True)
    ]
