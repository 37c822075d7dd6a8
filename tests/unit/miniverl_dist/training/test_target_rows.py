"""How the rows of trajectories become those of a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from miniverl_dist.errors import RecordError, StaleScoreError, TeacherDropFractionError
from miniverl_dist.lab.demonstrations import as_demonstration
from miniverl_dist.observability.metrics import METRICS
from miniverl_dist.ports import Assignment, ScoredGroup, ScoredTrajectory, TargetAnswer
from miniverl_dist.schemas.targets import TeacherContext, TopKTargets, TrajectoryTargets
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.training.batch_builder import BuiltBatch, build_batch
from miniverl_dist.training.target_rows import trained_mask
from tests.fake_world import byte_ends
from tests.fakes import run_config, trajectory

TEACHER = {
    "url": None,
    "rendering": "raw",
    "model": {"kind": "hf", "path": "m"},
    "max_drop_fraction": 0.5,
}
DISTILL = {"objective": "opd", "opd": None, "distill": {}, "teacher": TEACHER}
KD = {"objective": "offline_kd", "distill": {}, "teacher": TEACHER, "demonstrations": {}}


def rows_of(
    told: Trajectory, *places: int, first_id: int = 0, version: int = 0
) -> TrajectoryTargets:
    """Targets that name their row in a token id."""
    written = np.flatnonzero(trained_mask(told, is_online=any(told.loss_mask)))
    count = len(places)
    return TrajectoryTargets(
        told.trajectory_id,
        version,
        written[list(places)].astype(np.int64),
        len(written),
        top_k=TopKTargets(
            np.arange(first_id, first_id + count)[:, None],
            np.full((count, 1), np.log(0.5)),
            np.full(count, np.log(0.5)),
            np.zeros(count),
        ),
    )


def build(told: list[Trajectory], targets: Sequence[TargetAnswer], **changes: Any) -> BuiltBatch:
    group = ScoredGroup(
        assignment=Assignment(ticket=0, task_id="a", prefix_calls=0, tail_calls=1),
        members=tuple(ScoredTrajectory(trajectory=one) for one in told),
        num_publishes=0,
    )
    config = run_config(**DISTILL | changes)
    return build_batch([group], config, byte_ends, {t.trajectory_id: t for t in targets})


def two() -> list[Trajectory]:
    return [
        trajectory("abc", group_id="g", member=0, context_after="x"),
        trajectory("defg", group_id="g", member=1),
    ]


def test_rows_lie_where_their_tokens_are_packed() -> None:
    told = two()
    built = build(told, [rows_of(told[0], 0, 2), rows_of(told[1], 1, first_id=7)])
    batch = built.batch
    assert batch is not None
    assert batch.distillation is not None
    packed = batch.token_ids[batch.distillation.positions].tolist()
    written = [np.array(one.token_ids)[np.array(one.loss_mask)] for one in told]
    assert packed == [written[0][0], written[0][2], written[1][1]]
    assert batch.distillation.top_k is not None
    assert batch.distillation.top_k.token_ids[:, 0].tolist() == [0, 1, 7]
    assert batch.rows_per_sequence.tolist() == [2, 1]
    assert batch.distillation.kinds == ("assistant_text",) * 3
    assert built.metrics["num_target_rows"] == 3
    assert built.metrics["teacher_queried_position_ratio"] == pytest.approx(3 / 9)  # turn ends too
    assert set(built.metrics) <= set(METRICS)


def test_each_optimizer_step_counts_its_own_rows() -> None:
    told = two()
    targets = [rows_of(told[0], 0, 1, 2), rows_of(told[1], 0)]
    batch = build(told, targets, loop={"num_minibatches": 2}).batch
    assert batch is not None
    assert batch.distillation is not None
    assert batch.distillation.num_rows == (3, 1)


def test_a_refused_trajectory_has_no_row_and_counts() -> None:
    told = two()
    built = build(told, [rows_of(told[1], 0)])
    assert built.batch is not None
    assert built.batch.rows_per_sequence.tolist() == [0, 1]
    assert built.metrics["teacher_dropped"] == 1
    refusal = TeacherRefusal(
        trajectory_id=told[0].trajectory_id,
        reason=RefusalReason.TOO_LONG,
        detail="40 teacher tokens, the limit is 10 (teacher.max_prefill_tokens)",
    )
    refused = build(told, [refusal, rows_of(told[1], 0)])
    assert refused.batch is not None
    assert refused.batch.rows_per_sequence.tolist() == [0, 1]
    assert refused.metrics == built.metrics
    with pytest.raises(
        TeacherDropFractionError,
        match=r"2 of 2 trajectories have no teacher targets.* teacher said: too_long: 40 teacher "
        r"tokens, the limit is 10 \(teacher\.max_prefill_tokens\)\. To go on: start a new run in",
    ):
        build(told, [refusal])
    with pytest.raises(TeacherDropFractionError, match=r"said: nothing\. To go on: mend the"):
        build(told, [])


def test_contexts_keep_a_place_for_every_sequence() -> None:
    told = two()
    text = replace(
        rows_of(told[1], 0, 2), top_k=None, context=TeacherContext(np.arange(9), np.array([3, 5]))
    )
    batch = build(told, [text]).batch
    assert batch is not None
    assert batch.distillation is not None
    assert [len(one.positions) for one in batch.distillation.contexts] == [0, 2]
    mixed = [rows_of(told[0], 0), text]
    with pytest.raises(RecordError, match="one source"):
        build(told, mixed)


def test_targets_of_another_version_are_stale() -> None:
    told = [trajectory(group_id="g", member=i, version=4) for i in (0, 1)]
    with pytest.raises(StaleScoreError, match="policy version 3, the trajectory is of version 4"):
        build(told, [rows_of(one, 0, version=3) for one in told])
    build(told, [rows_of(one, 0, version=4) for one in told])


def test_stored_episodes_are_trained_on_as_they_are_written() -> None:
    told = [as_demonstration(one) for one in two()]
    assert not any(told[0].loss_mask)
    built = build(told, [rows_of(one, 0) for one in told], **KD)
    batch = built.batch
    assert batch is not None
    assert not batch.is_sampled
    assert np.isnan(batch.rollout_logprobs).all()
    assert (batch.advantages == 0).all()
    assert batch.num_loss_tokens == (4 + 5,)  # turn ends are written too
    assert "reward_mean" not in built.metrics


SAMPLED = {
    *("reward_mean", "reward_std", "pass_rate", "calls_per_trajectory", "response_tokens_mean"),
    *("rollout_tokens", "num_zero_variance_groups"),
    *("tail_calls_mean", "tail_calls_max"),
}


def test_of_stored_episodes_nothing_is_measured_that_only_sampling_has() -> None:
    told = two()
    written = [as_demonstration(one) for one in told]
    stored = build(written, [rows_of(written[0], 0), rows_of(written[1], 1)], **KD).metrics
    advantages = {"advantage_abs_mean", "group_advantage_abs_mean"}
    assert not {*SAMPLED, *advantages} & stored.keys()
    assert stored["num_loss_tokens"] > 0
    sampled = build(told, [rows_of(told[0], 0), rows_of(told[1], 1)]).metrics
    assert sampled.keys() >= SAMPLED
    assert not advantages & sampled.keys()  # rewards do not enter
