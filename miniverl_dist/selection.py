"""Which written tokens become rows: a position's fate hangs on nothing but seed, episode and place.

Draws are SHA-256 of (seed, trajectory, position) against the ratio: every process and system picks
the same rows, in any order, and asking for other candidates changes nobody else's fate.

Shapes: c candidates of one trajectory.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.config.lab import SelectionConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import SpanKind, Trajectory

BoolArray = NDArray[np.bool_]
Positions = NDArray[np.int64]

_DECISIVE = (SpanKind.ASSISTANT_TOOL_CALL, SpanKind.ASSISTANT_FINAL)
_SEED_RANGE = 2.0**63
"""`derive_seed` gives 0 .. 2^63 - 1."""


def select(
    trajectory: Trajectory, candidates: Positions, config: SelectionConfig, seed: int
) -> BoolArray:
    """Choose rows among the candidates.

    Args:
        trajectory: Whose tokens they are.
        candidates: [c] rising places in its ``token_ids``.
        config: The rule.
        seed: Of the run.

    Returns:
        [c] True for the chosen ones.

    Raises:
        BatchError: candidates that do not rise, or lie outside of the trajectory.
    """
    _check(trajectory, candidates)
    if config.kind == "all_model_tokens":
        return np.ones(len(candidates), dtype=np.bool_)
    if config.kind == "tool_and_final":
        return _is_decisive(trajectory, candidates)
    drawn = _is_drawn(trajectory.trajectory_id, candidates, config.ratio, seed)
    if config.kind == "uniform_ratio":
        return drawn
    return _is_decisive(trajectory, candidates) | drawn


def _check(trajectory: Trajectory, candidates: Positions) -> None:
    num_tokens = len(trajectory.token_ids)
    if len(candidates) and not (
        candidates[0] >= 0 and candidates[-1] < num_tokens and (np.diff(candidates) > 0).all()
    ):
        raise BatchError(
            f"trajectory {trajectory.trajectory_id}: candidates from {candidates[0]} to "
            f"{candidates[-1]} of {num_tokens} tokens; expected rising places in its token_ids"
        )


def _is_decisive(trajectory: Trajectory, candidates: Positions) -> BoolArray:
    """[c] True within calls and final answers."""
    chosen = np.zeros(len(trajectory.token_ids), dtype=np.bool_)
    for span in trajectory.spans:
        if span.kind in _DECISIVE:
            chosen[span.start : span.end] = True
    return chosen[candidates]


def _is_drawn(trajectory_id: str, candidates: Positions, ratio: float, seed: int) -> BoolArray:
    """[c] True with probability ``ratio``, each on its own."""
    limit = ratio * _SEED_RANGE  # exact: a power of two only moves the exponent
    draws = (derive_seed(seed, "row", trajectory_id, place) for place in candidates.tolist())
    return np.fromiter((draw < limit for draw in draws), np.bool_, count=len(candidates))
