"""The teacher's credit of a trajectory's tokens, and the record of what was made of it.

Shapes: T tokens of a trajectory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miniverl_dist.schemas.batch import BoolArray, FloatArray, IntArray, TrainBatch
from miniverl_dist.schemas.token_analysis import TokenAnalysis
from miniverl_dist.schemas.trajectory import Trajectory


@dataclass(frozen=True)
class TokenCredit:
    """OPD credit of one trajectory's tokens, and what was measured on the way."""

    weights: FloatArray
    """[T] nats; NaN where no unit covers the token."""
    mask: BoolArray
    """[T] True on tokens that a unit covers."""
    is_stopped: BoolArray
    """[T] True behind a stop."""
    reverse_kl: FloatArray
    """One entry per unit: student minus teacher, nats, unclipped."""
    units: IntArray
    """[T] unit of each token, counted through the trajectory; -1 where there is none."""

    @classmethod
    def none(cls, num_tokens: int) -> TokenCredit:
        """Of a trajectory that the teacher has not scored."""
        nothing = np.zeros(num_tokens, dtype=bool)
        return cls(
            np.full(num_tokens, np.nan),
            nothing,
            nothing,
            np.zeros(0),
            np.full(num_tokens, -1, dtype=np.int64),
        )


def analyse(
    trajectory: Trajectory, credit: TokenCredit, batch: TrainBatch, index: int
) -> TokenAnalysis:
    """What a batch made of the tokens that its sequence ``index`` emitted; of no others."""
    here = slice(*batch.sequence_starts[index : index + 2])
    places = np.flatnonzero(batch.loss_mask[here])
    kinds = {
        place: span.kind
        for span in trajectory.sampled_spans
        for place in range(span.start, span.end)
    }
    units, weights = credit.units[places], credit.weights[places]
    return TokenAnalysis(
        trajectory_id=trajectory.trajectory_id,
        group_id=trajectory.group_id,
        positions=tuple(places.tolist()),
        token_ids=tuple(batch.token_ids[here][places].tolist()),
        kinds=tuple(kinds[place] for place in places.tolist()),
        rollout_logprobs=tuple(trajectory.rollout_logprobs[places].tolist()),
        advantages=tuple(batch.advantages[here][places].tolist()),
        units=tuple(None if unit < 0 else unit for unit in units.tolist()),
        unit_reverse_kl=tuple(credit.reverse_kl.tolist()),
        opd_weights=tuple(None if np.isnan(w) else w for w in weights.tolist()),
        is_stopped=tuple(credit.is_stopped[places].tolist()),
    )
