"""Advantages: the reward against its group, less the teacher's term.

Shapes: B sequences, N tokens of all sequences laid end to end. float64 throughout: in float32 the
mean of eight equal rewards leaves a residue, which a division by the standard deviation blows up.

The sign, once for all: maximising the advantage must *lower* what the student likes more than the
teacher does, so ``advantage_t = group_advantage - opd_coef * weight_t`` (docs/math.md section 1).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import BatchError

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.integer]
Scalar = TypeVar("Scalar", bound=np.generic)


def group_advantages(
    rewards: Sequence[float] | FloatArray,
    group_ids: Sequence[Hashable],
    *,
    normalize_std: bool = False,
    std_floor: float = 1e-3,
) -> FloatArray:
    """[B] Reward minus the mean of its group; groups may be of any size and in any order.

    Args:
        rewards: [B] finite.
        group_ids: [B] siblings carry equal ids.
        normalize_std: divide by the group's standard deviation (population, over the group).
        std_floor: least divisor, > 0.

    Returns:
        Exactly 0 in a group of one, and in a group whose rewards are all equal.

    Raises:
        BatchError: lengths differ, a reward is not finite, or the floor is not positive.
    """
    values, group = _grouped(rewards, group_ids)
    if not std_floor > 0:
        raise BatchError(f"std_floor is {std_floor}; expected a number > 0")
    size = np.bincount(group)
    centered = values - (np.bincount(group, weights=values) / size)[group]
    centered[_is_constant(values, group)] = 0.0
    if not normalize_std:
        return centered
    deviation = np.sqrt(np.bincount(group, weights=centered**2) / size)
    return centered / np.maximum(deviation, std_floor)[group]


def zero_variance_groups(
    rewards: Sequence[float] | FloatArray, group_ids: Sequence[Hashable]
) -> BoolArray:
    """[B] True for every member of a group whose rewards are all equal (a group of one too).

    Compares rewards with each other, never with a mean: the mean of equal numbers need not be that
    number. A group is flagged as a whole or not at all.

    Raises:
        BatchError: as for ``group_advantages``.
    """
    return _is_constant(*_grouped(rewards, group_ids))


def leave_one_out(
    weights: FloatArray, mask: BoolArray, sequence_ids: Sequence[int] | IntArray
) -> FloatArray:
    """[N] Mean weight of all *other* sequences' masked tokens: a baseline for the OPD term.

    It does not depend on the sequence it is subtracted from, so the expected gradient stays.

    Args:
        weights: [N] nats; read on the mask only (NaN elsewhere is fine).
        mask: [N] tokens that take part: scored, and not behind a stop (``credit.stopped``).
        sequence_ids: [N] integers >= 0.

    Returns:
        0 off the mask, so that no token is credited for a weight it does not have, and 0 where no
        other sequence has a masked token.

    Raises:
        BatchError: lengths differ, an id is negative, or a masked weight is not finite.
    """
    values, scored = _scored(weights, mask)
    sequence = _sequences(sequence_ids, values.size)
    chosen = sequence[scored]
    own_sum = np.bincount(chosen, weights=values[scored])[chosen]
    own_count = np.bincount(chosen)[chosen]
    other_count = chosen.size - own_count
    baseline = np.zeros(values.size)
    baseline[scored] = np.where(
        other_count > 0, (values[scored].sum() - own_sum) / np.maximum(other_count, 1), 0.0
    )
    return baseline


def token_advantages(
    group_advantage: FloatArray,
    weights: FloatArray,
    mask: BoolArray,
    sequence_ids: Sequence[int] | IntArray,
    *,
    opd_coef: float,
    baseline: FloatArray | None = None,
    loss_mask: BoolArray | None = None,
) -> FloatArray:
    """[N] ``group_advantage - opd_coef * (weight - baseline)`` on scored tokens.

    The OPD term is added after the group's normalisation and never normalised itself. A sampled
    token without a weight (no unit, or no teacher) keeps its group advantage alone.

    Args:
        group_advantage: [B] from ``group_advantages``.
        weights: [N] nats from ``credit.opd_weights``; read on the mask only.
        mask: [N] True on scored tokens.
        sequence_ids: [N] index into ``group_advantage`` of each token's sequence.
        opd_coef: >= 0; a negative one would push away from the teacher.
        baseline: [N] from ``leave_one_out``; None: 0.
        loss_mask: [N] sampled tokens; the others get 0. None: all are sampled.

    Raises:
        BatchError: lengths differ, an id is out of range, ``opd_coef`` is negative, a scored token
            is not sampled, or a number that would be used is not finite.
    """
    if not 0 <= opd_coef < np.inf:
        raise BatchError(f"opd_coef is {opd_coef}; expected a finite number >= 0")
    values, scored = _scored(weights, mask)
    sequence = _sequences(sequence_ids, values.size, below=len(group_advantage))
    advantages = np.asarray(group_advantage, dtype=np.float64)[sequence]
    opd = values[scored]
    if baseline is not None:
        opd = opd - _sized(baseline, values.size, "baseline")[scored]
    advantages[scored] -= opd_coef * opd
    if loss_mask is not None:
        sampled = _sized(loss_mask, values.size, "loss_mask").astype(np.bool_)
        if (scored & ~sampled).any():
            where = int(np.flatnonzero(scored & ~sampled)[0])
            raise BatchError(f"token {where} is scored but not sampled; only sampled tokens can be")
        advantages[~sampled] = 0.0
    if not np.isfinite(advantages).all():
        where = int(np.flatnonzero(~np.isfinite(advantages))[0])
        raise BatchError(f"advantage of token {where} is {advantages[where]}; expected a number")
    return advantages


def _grouped(
    rewards: Sequence[float] | FloatArray, group_ids: Sequence[Hashable]
) -> tuple[FloatArray, NDArray[np.int64]]:
    """Rewards as float64, and each one's group as an index in order of first appearance."""
    values = np.asarray(rewards, dtype=np.float64)
    if values.shape != (len(group_ids),):
        raise BatchError(f"rewards have shape {values.shape} for {len(group_ids)} group ids")
    if not np.isfinite(values).all():
        where = int(np.flatnonzero(~np.isfinite(values))[0])
        raise BatchError(f"reward {where} is {values[where]}; a failed episode has no reward")
    index: dict[Hashable, int] = {}
    group = [index.setdefault(group_id, len(index)) for group_id in group_ids]
    return values, np.asarray(group, dtype=np.int64)


def _is_constant(values: FloatArray, group: NDArray[np.int64]) -> BoolArray:
    num_groups = int(group.max(initial=-1)) + 1
    first = np.empty(num_groups)
    first[group[::-1]] = values[::-1]
    differs = np.bincount(group, weights=values != first[group], minlength=num_groups)
    constant: BoolArray = differs[group] == 0
    return constant


def _scored(weights: FloatArray, mask: BoolArray) -> tuple[FloatArray, BoolArray]:
    values = np.asarray(weights, dtype=np.float64)
    scored = _sized(mask, values.size, "mask").astype(np.bool_)
    broken = np.flatnonzero(scored & ~np.isfinite(values))
    if broken.size:
        where = int(broken[0])
        raise BatchError(
            f"weight of token {where} is {values[where]} but its mask is True; pass the mask that "
            "opd_weights returned with these weights"
        )
    return values, scored


def _sized(array: NDArray[Scalar], num_tokens: int, name: str) -> NDArray[Scalar]:
    found = np.asarray(array)
    if found.shape != (num_tokens,):
        raise BatchError(f"{name} has shape {found.shape} for {num_tokens} weights")
    return found


def _sequences(
    sequence_ids: Sequence[int] | IntArray, num_tokens: int, below: int | None = None
) -> NDArray[np.int64]:
    ids = np.asarray(sequence_ids)
    if ids.shape != (num_tokens,) or (ids.size and ids.dtype.kind not in "iu"):
        raise BatchError(
            f"sequence_ids have shape {ids.shape} and dtype {ids.dtype} for {num_tokens} weights; "
            "expected one integer per token"
        )
    ids = ids.astype(np.int64, copy=False)
    if ids.size and (ids.min() < 0 or (below is not None and ids.max() >= below)):
        raise BatchError(
            f"sequence_ids span {ids.min()} to {ids.max()}; expected 0 to "
            f"{'any' if below is None else below - 1}"
        )
    return ids
