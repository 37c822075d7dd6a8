from __future__ import annotations

import asyncio
import math
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import ConfigError, DeadlineError, TokenizerError
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.trajectory import HARNESS_TERMINATIONS, Termination, Trajectory
from miniverl_dist.training.evaluate import (
    EvaluationJob,
    assignments,
    evaluate,
    summarize,
    wilson_interval,
)
from tests.fakes import ok_call, trajectory


def score_roots(num_passed: int, num_episodes: int) -> tuple[float, float]:
    """Both rates p at which the score test is exactly at its 5 % bound, by bisection."""
    rate, z = num_passed / num_episodes, 1.959963984540054

    def distance(p: float) -> float:
        return abs(rate - p) - z * math.sqrt(p * (1 - p) / num_episodes)

    def root(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if distance(middle) < 0 else (inside, middle)
        return (inside + outside) / 2

    return root(rate, 0.0), root(rate, 1.0)


class TestWilson:
    @settings(deadline=None, max_examples=200)
    @given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
    def test_it_solves_the_score_equation(self, counts: tuple[int, int]) -> None:
        num_passed, num_episodes = counts
        low, high = wilson_interval(num_passed, num_episodes)
        assert 0 <= low <= num_passed / num_episodes <= high <= 1
        if 0 < num_passed < num_episodes:
            assert (low, high) == pytest.approx(score_roots(num_passed, num_episodes), abs=1e-9)

    def test_it_does_not_collapse_at_the_ends(self) -> None:
        assert wilson_interval(0, 10) == pytest.approx((0.0, 0.277532), abs=1e-6)
        assert wilson_interval(10, 10) == pytest.approx((1 - 0.277532, 1.0), abs=1e-6)

    def test_without_episodes_nothing_is_known(self) -> None:
        assert wilson_interval(0, 0) == (0.0, 1.0)


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
        row = await evaluate(job(source), PLACES, config, deadline_s=5.0)
        assert source.most == min(bound, 6)
        assert (row.num_tasks, row.num_episodes) == (3, 6)

    async def test_trajectories_come_in_the_order_of_places_and_members(self) -> None:
        seen: list[str] = []
        await evaluate(
            job(Source()),
            PLACES,
            EvaluationConfig(),
            deadline_s=5.0,
            on_trajectory=lambda told: seen.append(told.trajectory_id),
        )
        assert seen == [f"after.student.00000{i}.0.{m}" for i in range(3) for m in range(2)]

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


class TestSummarize:
    def test_means_over_what_counts(self) -> None:
        told = [
            trajectory("ab", reward=1.0, passed=True, calls=[ok_call("f"), ok_call("g")]),
            trajectory("abcd", reward=0.5, termination=Termination.MAX_TURNS),
        ]
        row = summarize(job(Source()), told, num_tasks=2)
        assert (row.policy, row.tag, row.policy_version, row.tail_calls) == (
            "student",
            "after",
            7,
            2,
        )
        assert (row.pass_rate, row.reward_mean, row.calls_per_episode) == (0.5, 0.75, 1.0)
        assert (row.pass_low, row.pass_high) == wilson_interval(1, 2)
        assert row.tokens_per_episode == 4.0
        assert (row.official_per_turn_rate, row.state_only_rate) == (0.5, 0.5)
        assert row.reward_parts == {"mean_partial": 0.75}
        assert row.terminations == {"final_answer": 1, "max_turns": 1}

    def test_checks_that_an_environment_lacks_have_no_rate(self) -> None:
        told = [t.model_copy(update={"verdict": {"reason": None}}) for t in (trajectory("ab"),)]
        row = summarize(job(Source()), told, num_tasks=1)
        assert (row.official_per_turn_rate, row.state_only_rate) == (None, None)

    @pytest.mark.parametrize("termination", sorted(HARNESS_TERMINATIONS))
    def test_defect_harness_faults_are_not_failures(self, termination: Termination) -> None:
        told = [
            trajectory(reward=1.0, passed=True),
            trajectory(reward=0.0, termination=termination),
        ]
        row = summarize(job(Source()), told, num_tasks=2)
        assert (row.pass_rate, row.reward_mean) == (1.0, 1.0)
        assert (row.num_episodes, row.num_faults) == (1, 1)
        assert row.terminations == {termination.value: 1, "final_answer": 1}

    def test_nothing_but_faults_says_that_nothing_is_known(self) -> None:
        row = summarize(
            job(Source()), [trajectory(termination=Termination.ENGINE_ERROR)], num_tasks=1
        )
        assert (row.num_episodes, row.pass_low, row.pass_high) == (0, 0.0, 1.0)
