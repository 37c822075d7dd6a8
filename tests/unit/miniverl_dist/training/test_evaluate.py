from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import ConfigError, DeadlineError, TokenizerError
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.training.evaluate import (
    EvaluationJob,
    assignments,
    evaluate,
)
from tests.fakes import trajectory


def info(num_calls: int) -> TaskInfo:
    return TaskInfo(task_id="t", num_calls=num_calls, num_turns=1, classes=())


class TestAssignments:
    def test_the_horizon_is_at_most_n(self) -> None:
        tasks = {"a": info(5), "b": info(1), "none": info(0)}
        places = assignments(tasks, ["b", "none", "a"], 3)
        assert [(p.ticket, p.task_id, p.prefix_calls, p.tail_calls) for p in places] == [
            (0, "b", 0, 1),
            (1, "a", 2, 3),
        ]

    def test_every_horizon_of_every_task(self) -> None:
        tasks = {"a": info(3), "b": info(1), "none": info(0)}
        places = assignments(tasks, ["b", "none", "a"], "all")
        assert [(p.ticket, p.task_id, p.prefix_calls, p.tail_calls) for p in places] == [
            (0, "b", 0, 1),
            (1, "a", 2, 1),
            (2, "a", 1, 2),
            (3, "a", 0, 3),
        ]

    @pytest.mark.parametrize("ids", [[], ["none"]])
    def test_an_empty_split_is_an_error(self, ids: list[str]) -> None:
        with pytest.raises(ConfigError, match="no task to evaluate"):
            assignments({"none": info(0)}, ids, 1)


PLACES = [Assignment(ticket=i, task_id=f"t{i}", prefix_calls=0, tail_calls=2) for i in range(3)]


class Source:
    """`ports.RolloutSource` that watches how many episodes run at once."""

    def __init__(self, play: Callable[[Assignment, int], Trajectory] | None = None) -> None:
        self.running = self.most = 0
        self.gate: asyncio.Event | None = None
        self._play = play or (lambda place, member: trajectory(place=place, member=member))

    async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            # The later ones finish first.
            for _ in range(10 - 3 * assignment.ticket - member):
                await asyncio.sleep(0)
            if self.gate is not None:
                await self.gate.wait()
            return self._play(assignment, member)
        finally:
            self.running -= 1


def job(source: Source, episodes_per_task: int = 2) -> EvaluationJob:
    return EvaluationJob("student", "after", 7, source, 2, episodes_per_task)


class TestEvaluate:
    @pytest.mark.parametrize("bound", [1, 2, 6, 50])
    async def test_no_more_at_once_than_the_bound(self, bound: int) -> None:
        source = Source()
        config = EvaluationConfig(max_concurrency=bound)
        [row] = await evaluate(job(source), PLACES, config, deadline_s=5.0)
        assert source.most == min(bound, 6)
        assert (row.num_tasks, row.num_episodes) == (3, 6)

    async def test_an_episode_is_told_as_soon_as_it_has_ended(self) -> None:
        seen: list[str] = []
        source = Source()
        await evaluate(
            job(source),
            PLACES,
            EvaluationConfig(),
            deadline_s=5.0,
            on_trajectory=lambda told: seen.append(f"{told.trajectory_id} {source.running}"),
        )
        # The later ones finish first; one at a time has ended when it is told.
        ends = [f"after.student.00000{i}.0.{m}" for i in (2, 1, 0) for m in (1, 0)]
        assert seen == [f"{name} {5 - index}" for index, name in enumerate(ends)]

    @pytest.mark.parametrize("num_done", [0, 1, 4, 6])
    async def test_what_has_ended_before_is_not_played_again(self, num_done: int) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            return trajectory(
                "a" * (1 + place.ticket), place=place, member=member, reward=0.1 * member
            )

        told: list[Trajectory] = []
        all_rows = await evaluate(
            job(Source(play)),
            PLACES,
            EvaluationConfig(),
            deadline_s=5.0,
            on_trajectory=told.append,
        )
        done = {t.trajectory_id: t for t in told[:num_done]}
        again: list[Trajectory] = []
        rows = await evaluate(
            job(Source(play)),
            PLACES,
            EvaluationConfig(),
            deadline_s=5.0,
            on_trajectory=again.append,
            done=done,
        )
        assert rows == all_rows
        assert {t.trajectory_id for t in again} == {t.trajectory_id for t in told[num_done:]}

    async def test_it_has_a_deadline_and_leaves_nothing_running(self) -> None:
        source = Source()
        source.gate = asyncio.Event()
        with pytest.raises(DeadlineError, match=r"student \(after\) took longer than 0\.02 s"):
            await evaluate(job(source), PLACES, EvaluationConfig(), deadline_s=0.02)
        assert source.running == 0

    async def test_an_error_of_one_episode_arrives_as_itself(self) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            raise TokenizerError(f"id of {place.task_id}")

        source = Source(play)
        with pytest.raises(TokenizerError, match="id of t"):
            await evaluate(job(source), PLACES, EvaluationConfig(), deadline_s=5.0)
        assert source.running == 0
