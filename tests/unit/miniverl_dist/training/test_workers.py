from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from miniverl_dist.errors import DeadlineError, TeacherError, TokenizerError
from miniverl_dist.ports import Assignment, ScoredGroup
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal, TeacherScore
from miniverl_dist.schemas.trajectory import Termination, Trajectory
from miniverl_dist.training.buffer import GroupBuffer
from tests.fake_world import World
from tests.fakes import FakeTeacher, run_config, trajectory

TEACHER = {"url": "http://t", "rendering": "raw"}


@asynccontextmanager
async def working(world: World) -> AsyncIterator[GroupBuffer]:
    buffer = world.buffer()
    async with world.workers(buffer).running():
        yield buffer


async def settle() -> None:
    """Let everything happen that waits for nothing."""
    for _ in range(50):
        await asyncio.sleep(0)


def names(groups: list[ScoredGroup]) -> list[list[str]]:
    return [[m.trajectory.trajectory_id for m in group.members] for group in groups]


async def test_groups_hold_all_siblings_in_order(tmp_path: Path) -> None:
    world = World(tmp_path, run_config(loop={"group_size": 3}))
    world.rollouts.gates[0, 0] = asyncio.Event()
    async with working(world) as buffer:
        await settle()
        world.rollouts.gates[0, 0].set()
        groups = await buffer.take(2)
    assert names(groups) == [[f"00000{g}.0.{m}" for m in range(3)] for g in range(2)]
    assert [group.num_publishes for group in groups] == [0, 0]
    assert [m.teacher for group in groups for m in group.members] == [None] * 6
    finished = world.events("group_finished")
    assert sorted(event["group_id"] for event in finished) == ["000000.0", "000001.0"]
    assert {event["num_passed"] for event in finished} == {2}


async def test_scoring_does_not_wait_for_the_siblings(tmp_path: Path) -> None:
    world = World(tmp_path, run_config(objective="grpo_opd"))
    world.rollouts.gates[0, 1] = asyncio.Event()
    async with working(world) as buffer:
        await settle()
        assert "score 000000.0.0" in world.log
        assert "score 000000.0.1" not in world.log
        world.rollouts.gates[0, 1].set()
        [first, _] = await buffer.take(2)
    assert [type(member.teacher) for member in first.members] == [TeacherScore] * 2


async def test_peer_37_a_slow_episode_holds_up_its_own_group_only(tmp_path: Path) -> None:
    world = World(tmp_path, run_config(loop={"num_groups": 3}))
    world.rollouts.gates[0, 0] = asyncio.Event()
    async with working(world) as buffer:
        taking = asyncio.ensure_future(buffer.take(3))
        await settle()
        assert {e["group_id"] for e in world.events("group_finished")} == {"000001.0", "000002.0"}
        assert not taking.done()
        world.rollouts.gates[0, 0].set()
        assert [group.assignment.ticket for group in await taking] == [0, 1, 2]


async def test_no_more_groups_at_once_than_workers(tmp_path: Path) -> None:
    world = World(tmp_path, run_config(rollout={"num_workers": 2}, loop={"num_groups": 5}))
    for ticket in range(5):
        world.rollouts.gates[ticket, 0] = asyncio.Event()
    async with working(world):
        await settle()
        assert {line for line in world.log if line.startswith("play")} == {
            f"play 00000{ticket}.0.{member}" for ticket in (0, 1) for member in (0, 1)
        }
        world.rollouts.gates[1, 0].set()
        await settle()
        assert "play 000002.0.0" in world.log
        assert "play 000003.0.0" not in world.log


class TestTeacher:
    async def test_a_refusal_is_kept_counted_and_told(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(objective="grpo_opd"))
        world.teacher = FakeTeacher(
            world.log,
            refuse=lambda t: RefusalReason.TOO_LONG if t.trajectory_id.endswith("0.1") else None,
        )
        async with working(world) as buffer:
            groups = await buffer.take(2)
        for group in groups:
            assert isinstance(group.members[0].teacher, TeacherScore)
            assert isinstance(group.members[1].teacher, TeacherRefusal)
        assert world.recorder.counters["teacher_refused_too_long"] == 2
        refused = world.events("teacher_refused")
        assert [(e["trajectory_id"], e["reason"]) for e in refused] == [
            ("000000.0.1", "too_long"),
            ("000001.0.1", "too_long"),
        ]

    async def test_on_failure_fail_ends_the_run_as_itself(self, tmp_path: Path) -> None:
        config = run_config(objective="grpo_opd", teacher=TEACHER | {"on_failure": "fail"})
        world = World(tmp_path, config)
        world.teacher = FakeTeacher(world.log, refuse=lambda t: RefusalReason.UNAVAILABLE)
        with pytest.raises(TeacherError, match=r"unavailable: as the test asked.*on_failure"):
            async with working(world) as buffer:
                await buffer.take(2)

    async def test_what_cannot_be_trained_on_is_not_scored(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            end = Termination.DEADLINE if member else Termination.FINAL_ANSWER
            return trajectory(place=place, member=member, termination=end)

        world = World(tmp_path, run_config(objective="grpo_opd"), play=play)
        async with working(world) as buffer:
            await buffer.take(2)
        assert {line for line in world.log if line.startswith("score")} == {
            "score 000000.0.0",
            "score 000001.0.0",
        }


class TestFaults:
    async def test_a_harness_fault_is_told_and_counted(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            end = Termination.ENGINE_ERROR if member else Termination.FINAL_ANSWER
            return trajectory(place=place, member=member, termination=end)

        world = World(tmp_path, run_config(), play=play)
        async with working(world) as buffer:
            await buffer.take(2)
        assert world.recorder.counters["harness_fault_engine_error"] == 2
        fault = world.events("harness_fault")[0]
        assert (fault["trajectory_id"], fault["termination"], fault["error"]) == (
            "000000.0.1",
            "engine_error",
            "broken",
        )

    async def test_an_error_of_a_worker_reaches_the_block_and_ends_it(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            raise TokenizerError("id 9 is outside of the vocabulary")

        world = World(tmp_path, run_config(), play=play)
        with pytest.raises(TokenizerError, match="id 9"):
            async with working(world) as buffer:
                await buffer.take(2)

    async def test_an_error_of_the_block_arrives_as_itself(self, tmp_path: Path) -> None:
        world = World(tmp_path)
        error = DeadlineError("too late")
        with pytest.raises(DeadlineError) as caught:
            async with working(world):
                raise error
        assert caught.value is error

    async def test_peer_36_leaving_cancels_a_slow_teacher(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(objective="grpo_opd"))
        world.teacher = FakeTeacher(world.log, gate=asyncio.Event())
        async with working(world):
            await settle()
            assert "score 000000.0.0" in world.log
        assert "score cancelled 000000.0.0" in world.log


class TestDrops:
    @staticmethod
    def flat_until(attempt: int) -> Callable[[Assignment, int], Trajectory]:
        def play(place: Assignment, member: int) -> Trajectory:
            reward = float(member) if place.attempt >= attempt else 0.25
            return trajectory(place=place, member=member, reward=reward)

        return play

    async def test_zero_variance_drop_refills_in_place(self, tmp_path: Path) -> None:
        config = run_config(grpo={"zero_variance": "drop", "max_refills": 3})
        world = World(tmp_path, config, play=self.flat_until(2))
        async with working(world) as buffer:
            groups = await buffer.take(2)
        assert [group.assignment.group_id for group in groups] == ["000000.2", "000001.2"]
        assert [group.assignment.task_id for group in groups] == ["task2", "task3"]
        assert buffer.counters.refilled == 4

    async def test_peer_38_but_not_for_ever(self, tmp_path: Path) -> None:
        config = run_config(grpo={"zero_variance": "drop", "max_refills": 3})
        world = World(tmp_path, config, play=self.flat_until(99))
        async with working(world) as buffer:
            groups = await buffer.take(2)
        assert [group.assignment.group_id for group in groups] == ["000000.3", "000001.3"]

    async def test_zero_variance_keep_keeps(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(), play=self.flat_until(99))
        async with working(world) as buffer:
            groups = await buffer.take(2)
        assert [group.assignment.attempt for group in groups] == [0, 0]

    async def test_a_group_of_faults_is_replaced_whatever_config_says(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            end = Termination.FINAL_ANSWER if place.attempt else Termination.ENGINE_ERROR
            return trajectory(place=place, member=member, termination=end)

        dropped: list[str] = []
        world = World(tmp_path, run_config(), play=play)
        buffer = world.buffer(on_drop=lambda place, reason: dropped.append(reason))
        async with world.workers(buffer).running():
            groups = await buffer.take(2)
        assert [group.assignment.attempt for group in groups] == [1, 1]
        assert dropped == ["no episode can be trained on (engine_error)"] * 2

    async def test_a_fault_among_equal_rewards_is_no_variance(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            broken = member == 2 and place.attempt == 0
            return trajectory(
                place=place,
                member=member,
                reward=0.0 if broken else 0.5 + place.attempt * member,
                termination=Termination.DEADLINE if broken else Termination.FINAL_ANSWER,
            )

        config = run_config(grpo={"zero_variance": "drop"}, loop={"group_size": 3})
        world = World(tmp_path, config, play=play)
        async with working(world) as buffer:
            groups = await buffer.take(2)
        assert [group.assignment.attempt for group in groups] == [1, 1]
