"""Rollout workers: each plays one group at a time and scores it as its episodes finish.

    next_assignment -> group_size episodes at once -> each scored when it ends -> put

A slow episode delays only its own group; no barrier stands between rollout and scoring.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from miniverl_dist.advantage import zero_variance_groups
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import TeacherError, first_error
from miniverl_dist.observability.events import Event
from miniverl_dist.ports import (
    Assignment,
    Clock,
    RolloutSource,
    ScoredGroup,
    ScoredTrajectory,
    TeacherScorer,
)
from miniverl_dist.schemas.teacher import TeacherRefusal
from miniverl_dist.schemas.trajectory import HARNESS_TERMINATIONS, Trajectory
from miniverl_dist.training.buffer import GroupBuffer
from miniverl_dist.training.recorder import Recorder


class RolloutWorkers:
    """Fills the buffer; a failure that config calls fatal ends the run through the task group."""

    def __init__(
        self,
        buffer: GroupBuffer,
        rollouts: RolloutSource,
        teacher: TeacherScorer | None,
        config: RunConfig,
        recorder: Recorder,
        clock: Clock,
    ) -> None:
        self._buffer, self._rollouts, self._teacher = buffer, rollouts, teacher
        self._config, self._recorder, self._clock = config, recorder, clock

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Workers run inside this block; leaving it cancels what is still being sampled.

        Raises:
            MiniverlError: what a worker or the block failed with, itself and not in a group.
        """
        try:
            async with asyncio.TaskGroup() as crew:
                workers = [crew.create_task(self._work()) for _ in range(self._num_workers)]
                try:
                    yield
                finally:
                    for worker in workers:
                        worker.cancel()
        except BaseExceptionGroup as errors:
            raise first_error(errors) from None

    @property
    def _num_workers(self) -> int:
        return min(
            self._config.rollout.num_workers,
            (self._config.loop.max_policy_lag + 1) * self._config.loop.num_groups,
        )

    async def _work(self) -> None:
        while True:
            # Waits for the trainer to release slots.
            assignment = await self._buffer.next_assignment()
            group = await self._play(assignment)
            reason = self._drop_reason(group)
            if reason is None or not self._buffer.drop(group, reason):
                self._buffer.put(group)

    async def _play(self, assignment: Assignment) -> ScoredGroup:
        started, num_publishes = self._clock.now(), self._buffer.num_publishes
        self._recorder.event(
            Event.GROUP_STARTED,
            group_id=assignment.group_id,
            task_id=assignment.task_id,
            tail_calls=assignment.tail_calls,
        )
        async with asyncio.TaskGroup() as siblings:
            tasks = [
                siblings.create_task(self._play_and_score(assignment, member))
                for member in range(self._config.loop.group_size)
            ]
        group = ScoredGroup(
            assignment=assignment,
            members=tuple(task.result() for task in tasks),
            num_publishes=num_publishes,
        )
        self._recorder.event(
            Event.GROUP_FINISHED,
            group_id=assignment.group_id,
            task_id=assignment.task_id,
            tail_calls=assignment.tail_calls,
            num_passed=sum(m.trajectory.passed for m in group.members),
            seconds=self._clock.now() - started,
        )
        return group

    async def _play_and_score(self, assignment: Assignment, member: int) -> ScoredTrajectory:
        started = self._clock.now()
        trajectory = await self._rollouts.rollout(assignment, member)
        self._recorder.add_seconds("seconds_rollout", self._clock.now() - started)
        if trajectory.termination in HARNESS_TERMINATIONS:
            self._harness_fault(trajectory)
        if self._teacher is None or not trajectory.is_trainable:
            return ScoredTrajectory(trajectory=trajectory)
        started = self._clock.now()
        result = await self._teacher.score(trajectory)
        self._recorder.add_seconds("seconds_teacher", self._clock.now() - started)
        if isinstance(result, TeacherRefusal):
            self._refused(result)
        return ScoredTrajectory(trajectory=trajectory, teacher=result)

    def _harness_fault(self, trajectory: Trajectory) -> None:
        self._recorder.count(f"harness_fault_{trajectory.termination}")
        self._recorder.event(
            Event.HARNESS_FAULT,
            trajectory_id=trajectory.trajectory_id,
            task_id=trajectory.task_id,
            termination=trajectory.termination.value,
            error=trajectory.notes.get("error"),
        )

    def _refused(self, refusal: TeacherRefusal) -> None:
        self._recorder.count(f"teacher_refused_{refusal.reason}")
        self._recorder.event(
            Event.TEACHER_REFUSED,
            trajectory_id=refusal.trajectory_id,
            reason=refusal.reason.value,
            detail=refusal.detail,
        )
        if self._config.teacher is not None and self._config.teacher.on_failure == "fail":
            raise TeacherError(
                f"teacher refused {refusal.trajectory_id} ({refusal.reason}: {refusal.detail}) and "
                "teacher.on_failure is `fail`"
            )

    def _drop_reason(self, group: ScoredGroup) -> str | None:
        """Why this group is not worth training on; None keeps it."""
        if not self._config.is_online:
            return None  # stored episodes hold no sampled token, and are chosen beforehand
        counted = [m.trajectory for m in group.members if m.trajectory.is_trainable]
        if not counted:
            ends = sorted({m.trajectory.termination.value for m in group.members})
            return f"no episode can be trained on ({', '.join(ends)})"
        if self._config.grpo.zero_variance == "drop":
            rewards = [trajectory.reward for trajectory in counted]
            if zero_variance_groups(rewards, [0] * len(rewards)).all():
                return "zero variance"
        return None
