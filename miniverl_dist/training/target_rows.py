"""The rows of a batch that are compared with a teacher's distribution; pure.

Shapes: m rows of a trajectory, M rows of the batch, N packed tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from miniverl_dist.errors import RecordError, StaleScoreError
from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.targets import (
    Distillation,
    TeacherContext,
    TrajectoryTargets,
    join_top_k,
)
from miniverl_dist.schemas.trajectory import ASSISTANT_KINDS, Trajectory

Targets = Mapping[str, TrajectoryTargets]
"""By trajectory; one that is missing was refused by the teacher."""


def written_mask(trajectory: Trajectory) -> list[bool]:
    """[T] True on all that an assistant wrote, whoever it was; position 0 never.

    What a stored episode teaches: its calls were written by the oracle or by another policy, so
    they carry no log-probability of this student.
    """
    mask = [False] * len(trajectory.token_ids)
    for span in trajectory.spans:
        if span.kind in ASSISTANT_KINDS:
            mask[span.start : span.end] = [True] * (span.end - span.start)
    if mask:
        mask[0] = False
    return mask


def trained_mask(trajectory: Trajectory, *, is_online: bool) -> list[bool]:
    """[T] tokens that an objective may train on."""
    return list(trajectory.loss_mask) if is_online else written_mask(trajectory)


def pack_targets(
    trajectories: Sequence[Trajectory],
    targets: Targets,
    starts: IntArray,
    minibatch_ids: IntArray,
) -> Distillation:
    """Lay the rows of all sequences end to end.

    Args:
        trajectories: [B] in the order of the batch.
        targets: Of each of them that has any.
        starts: [B + 1] offsets of the packed sequences.
        minibatch_ids: [B] optimizer step of each.

    Raises:
        StaleScoreError: targets that were made for another policy version.
        RecordError: some targets are stored and some are texts.
    """
    none = np.zeros(0, dtype=np.int64)
    found = [targets.get(trajectory.trajectory_id) for trajectory in trajectories]
    for trajectory, rows in zip(trajectories, found, strict=True):
        if rows is not None and rows.policy_version != trajectory.oldest_version:
            raise StaleScoreError(
                f"targets of {trajectory.trajectory_id} were made for policy version "
                f"{rows.policy_version}, the trajectory is of version {trajectory.oldest_version}"
            )
    num_rows = np.array([0 if rows is None else len(rows.positions) for rows in found])
    stored = [rows.top_k for rows in found if rows is not None and rows.top_k is not None]
    texts = [rows for rows in found if rows is not None and rows.context is not None]
    if stored and texts:
        raise RecordError("a batch holds stored targets and teacher's texts: one source gives one")
    return Distillation(
        positions=np.concatenate(
            [none]
            + [
                rows.positions + start
                for rows, start in zip(found, starts[:-1], strict=True)
                if rows is not None
            ]
        ),
        num_rows=tuple(
            int(num_rows[minibatch_ids == step].sum())
            for step in range(int(minibatch_ids.max()) + 1)
        ),
        top_k=join_top_k(stored) if stored else None,
        contexts=_contexts(found) if texts else (),
        num_candidates=sum(rows.num_candidates for rows in found if rows is not None),
        kinds=tuple(
            kind
            for trajectory, rows in zip(trajectories, found, strict=True)
            if rows is not None
            for kind in _kinds(trajectory, rows.positions)
        ),
    )


def _kinds(trajectory: Trajectory, positions: IntArray) -> list[str]:
    ends = [span.end for span in trajectory.spans]
    places = np.searchsorted(ends, positions, side="right")
    return [trajectory.spans[place].kind.value for place in places.tolist()]


def _contexts(found: Sequence[TrajectoryTargets | None]) -> tuple[TeacherContext, ...]:
    """One per sequence; empty where the teacher refused."""
    none = np.zeros(0, dtype=np.int64)
    return tuple(
        TeacherContext(none, none) if rows is None or rows.context is None else rows.context
        for rows in found
    )
