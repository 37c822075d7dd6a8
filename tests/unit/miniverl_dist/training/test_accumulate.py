"""Gradients group by group: the same update, whatever happens in the middle of it."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniverl_dist.errors import DeadlineError, TeacherDropFractionError, UpdateError
from miniverl_dist.observability.run_dir import RecordFile
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.batch import TrainBatch
from miniverl_dist.schemas.teacher import RefusalReason
from miniverl_dist.schemas.trajectory import Termination, Trajectory
from miniverl_dist.training.checkpoint import verify
from tests.fake_world import World
from tests.fakes import FakeRollouts, FakeTeacher, run_config, trajectory
from tests.support.accumulating import AccumulatingStudents, Loss
from tests.support.virtual_time import run_virtually

SIZES = {"num_steps": 5, "num_groups": 3}
RARE_COMMITS = {"every_n_steps": 3, "keep": 9}


def world_of(
    folder: Path, losses: Collection[Loss] = (), *, accumulate: bool = True, **changes: Any
) -> World:
    loop = SIZES | {"accumulate": accumulate} | changes.pop("loop", {})
    options = {"objective": "grpo_opd", "checkpoint": RARE_COMMITS} | changes
    world = World(folder, run_config(loop=loop, **options))
    world.students = AccumulatingStudents(world.log, losses)
    # Engines sample under what was published last, whatever becomes of the student.
    world.rollouts = FakeRollouts(world.log, lambda: world.weights.versions[-1])
    return world


def outcome(world: World) -> dict[str, Any]:
    """What may not depend on how the update was made."""
    hidden = ("seconds", "peak")
    return {
        "weights": world.students.digest,
        "metrics": [
            {name: value for name, value in line.items() if not name.startswith(hidden)}
            for line in world.records(RecordFile.METRICS)
        ],
        "trajectories": world.records(RecordFile.TRAJECTORIES),
        "state": verify(world.checkpoint(5)).state.model_dump(
            exclude={"file_positions", "counters"}
        ),
        "published": world.weights.versions,
        "advances": [line for line in world.log if line.startswith("advance")],
    }


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    world = world_of(tmp_path_factory.mktemp("plain"), accumulate=False)
    asyncio.run(world.trainer().run())
    assert "commit_accumulated" not in world.log
    return outcome(world)


def of(log: list[str], *kinds: str) -> list[str]:
    return [line for line in log if line.split(" ")[0] in kinds]


async def until(log: list[str], line: str) -> None:
    for _ in range(4000):
        if line in log:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"never: {line}")


async def gone() -> None:
    raise UpdateError("the node is gone for good")


class TestTheSameRun:
    async def test_as_with_whole_batches(self, tmp_path: Path, plain: dict[str, Any]) -> None:
        world = world_of(tmp_path)
        await world.trainer().run()
        assert outcome(world) == plain
        assert "update" not in world.log
        assert world.log.count("commit_accumulated") == 5

    async def test_under_a_lag(self, tmp_path: Path) -> None:
        runs = []
        for name, accumulate in (("plain", False), ("accumulating", True)):
            world = world_of(tmp_path / name, accumulate=accumulate, loop={"max_policy_lag": 1})
            await world.trainer().run()
            runs.append(outcome(world)["advances"])
        assert runs[0] == runs[1]

    async def test_the_parts_are_the_batch(self, tmp_path: Path) -> None:
        whole = world_of(tmp_path / "whole", accumulate=False)
        await whole.trainer().run()
        world = world_of(tmp_path / "parts")
        await world.trainer().run()
        for parts, batch in zip(world.students.committed, whole.students.batches, strict=True):
            assert sum(part.num_loss_tokens[0] for part in parts) == batch.num_loss_tokens[0]
            assert sum(part.num_sequences[0] for part in parts) == batch.num_sequences[0]
            for name in ("token_ids", "loss_mask", "advantages", "rollout_logprobs"):
                joined = np.concatenate([getattr(part, name) for part in parts])
                np.testing.assert_array_equal(joined, getattr(batch, name))


class TestOrder:
    async def test_each_group_when_it_arrives(self, tmp_path: Path) -> None:
        world = world_of(tmp_path, loop={"num_steps": 1})
        late = world.rollouts.gates[1, 0] = asyncio.Event()
        running = asyncio.ensure_future(world.trainer().run())
        await until(world.log, "accumulate 2")
        for _ in range(50):
            await asyncio.sleep(0)
        assert of(world.log, "accumulate", "commit_accumulated") == ["accumulate 0", "accumulate 2"]
        assert not (world.run.path / "journal").exists()
        late.set()
        await running
        assert of(world.log, "accumulate", "commit_accumulated", "publish", "advance")[1:] == [
            "accumulate 0",
            "accumulate 2",
            "accumulate 1",
            "commit_accumulated",
            "publish 1",
            "advance 0,1,2",
        ]
        told = [r["trajectory"]["trajectory_id"] for r in world.records(RecordFile.TRAJECTORIES)]
        assert told == [f"00000{ticket}.0.{member}" for ticket in range(3) for member in range(2)]

    async def test_only_groups_of_the_batch(self, tmp_path: Path) -> None:
        """Under a lag the groups behind the batch arrive too; they wait for their own step."""
        world = world_of(tmp_path, loop={"num_steps": 2, "max_policy_lag": 1})
        late = world.rollouts.gates[1, 0] = asyncio.Event()
        running = asyncio.ensure_future(world.trainer().run())
        await until(world.log, "score 000005.0.1")
        for _ in range(50):
            await asyncio.sleep(0)
        assert of(world.log, "accumulate") == ["accumulate 0", "accumulate 2"]
        late.set()
        await running
        assert of(world.log, "accumulate")[3:] == [f"accumulate {ticket}" for ticket in (3, 4, 5)]

    async def test_the_batch_is_journalled_before_the_optimizer_step(self, tmp_path: Path) -> None:
        world = world_of(tmp_path, loop={"num_steps": 1})
        seen: list[bool] = []
        commit = world.students.commit_accumulated

        async def watched() -> Any:
            seen.append((world.run.path / "journal" / "step-000000.json").exists())
            return await commit()

        world.students.commit_accumulated = watched
        await world.trainer().run()
        assert seen == [True]

    def test_computing_does_not_eat_the_patience_for_groups(self, tmp_path: Path) -> None:
        """Each group comes 5 s after the gradients of the one before it, which take 60 s."""
        deadlines = {"take_s": 20.0, "generate_s": 20.0}
        world = world_of(tmp_path, loop={"num_steps": 1}, deadlines=deadlines)
        late = [asyncio.Event(), asyncio.Event()]
        world.rollouts.gates |= {(1, 0): late[0], (2, 0): late[1]}
        accumulate = world.students.accumulate

        async def slowly(batch: TrainBatch, place: int) -> None:
            await asyncio.sleep(60.0)
            await accumulate(batch, place)
            if place < 2:
                asyncio.get_running_loop().call_later(5.0, late[place].set)

        world.students.accumulate = slowly
        assert run_virtually(world.trainer().run()).is_finished

    def test_all_waits_of_a_step_share_one_deadline(self, tmp_path: Path) -> None:
        deadlines = {"take_s": 20.0, "generate_s": 20.0}
        world = world_of(tmp_path, loop={"num_steps": 1}, deadlines=deadlines)
        late = [asyncio.Event(), asyncio.Event()]
        world.rollouts.gates |= {(1, 0): late[0], (2, 0): late[1]}

        async def run() -> None:
            for seconds, gate in zip((12.0, 24.0), late, strict=True):
                asyncio.get_running_loop().call_later(seconds, gate.set)
            await world.trainer().run()

        with pytest.raises(DeadlineError, match=r"only 2 of 3 groups arrived within 20\.0 s"):
            run_virtually(run())

    def test_a_group_that_never_comes_ends_the_run(self, tmp_path: Path) -> None:
        deadlines = {"take_s": 0.05, "generate_s": 0.05}
        world = world_of(tmp_path, deadlines=deadlines)
        world.rollouts.gates[1, 0] = asyncio.Event()
        with pytest.raises(DeadlineError, match="only 2 of 3 groups arrived within"):
            run_virtually(world.trainer().run())

    async def test_the_time_is_recorded(self, tmp_path: Path) -> None:
        world = world_of(tmp_path, loop={"num_steps": 1})

        def take_time() -> None:
            world.clock.time += 2.0

        world.students.on_accumulate = take_time
        await world.trainer().run()
        (line,) = world.records(RecordFile.METRICS)
        assert (line["seconds_accumulate"], line["seconds_take"]) == (6.0, 6.0)


class TestEmptyGroups:
    async def test_a_group_of_faults_has_no_part(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            end = Termination.ENGINE_ERROR if place.ticket == 1 else Termination.FINAL_ANSWER
            return trajectory(place=place, member=member, reward=float(member), termination=end)

        world = world_of(tmp_path, loop={"num_steps": 1})
        world.rollouts._play = play
        await world.trainer().run()
        assert of(world.log, "accumulate") == ["accumulate 0", "accumulate 2"]

    async def test_an_empty_batch_is_replaced(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            end = Termination.ENGINE_ERROR if place.ticket < 3 else Termination.FINAL_ANSWER
            return trajectory(place=place, member=member, reward=float(member), termination=end)

        world = world_of(tmp_path, loop={"num_steps": 1})
        world.rollouts._play = play
        assert (await world.trainer().run()).step == 1
        assert of(world.log, "accumulate") == ["accumulate 3", "accumulate 4", "accumulate 5"]

    @pytest.mark.parametrize(("limit", "is_fatal"), [(0.34, False), (0.3, True)])
    async def test_the_teachers_drop_limit_is_that_of_the_whole_batch(
        self, tmp_path: Path, limit: float, is_fatal: bool
    ) -> None:
        def refuse(told: Trajectory) -> RefusalReason | None:
            return RefusalReason.TOO_LONG if told.group_id.startswith("000001") else None

        teacher = {"url": "http://t", "rendering": "raw", "max_drop_fraction": limit}
        world = world_of(tmp_path, loop={"num_steps": 1}, teacher=teacher)
        world.teacher = FakeTeacher(world.log, refuse=refuse)
        if not is_fatal:
            await world.trainer().run()
            return
        with pytest.raises(TeacherDropFractionError, match="2 of 6 trajectories"):
            await world.trainer().run()
        assert "commit_accumulated" not in world.log


LOSSES = [
    [("accumulate", 1)],
    [("accumulate", 5)],
    [("accumulate", 12)],
    [("commit_accumulated", 1)],
    [("commit_accumulated", 4)],
    [("after the commit", 5)],
    [("accumulate", 5), ("accumulate", 9)],
    [("accumulate", 14), ("commit_accumulated", 4), ("load", 2)],
    [("save", 2)],
]


class TestLost:
    @pytest.mark.parametrize("losses", LOSSES, ids=str)
    async def test_a_student_that_is_lost_comes_back_to_where_it_was(
        self, tmp_path: Path, losses: list[Loss], plain: dict[str, Any]
    ) -> None:
        world = world_of(tmp_path, losses)
        await world.trainer().run()
        assert outcome(world) == plain
        assert len(world.events("student_rebuilt")) == world.log.count("rebuild") - (
            ("load", 2) in losses
        )
        assert world.log.count("rebuild") >= 1
        # Nothing was sampled twice.
        plays = of(world.log, "play")
        assert len(plays) == len(set(plays)) == 5 * 3 * 2

    async def test_all_groups_of_the_step_are_computed_again(self, tmp_path: Path) -> None:
        world = world_of(tmp_path, [("accumulate", 6)])
        await world.trainer().run()
        kinds = ("accumulate", "commit_accumulated", "rebuild")
        replay = ["accumulate 0", "accumulate 1", "accumulate 2", "commit_accumulated"]
        again = ["accumulate 3", "accumulate 4", "accumulate 5"]
        assert of(world.log, *kinds)[4:15] == [*again, "rebuild", *replay, *again]

    async def test_one_that_hangs_is_lost(self, tmp_path: Path) -> None:
        world = world_of(tmp_path, deadlines={"update_s": 0.02})
        accumulate, calls = world.students.accumulate, 0

        async def hangs_once(batch: TrainBatch, place: int) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                await asyncio.Event().wait()
            await accumulate(batch, place)

        world.students.accumulate = hangs_once
        await world.trainer().run()
        (lost,) = world.events("student_lost")
        assert lost["reason"] == "step 0: the update took longer than 0.02 s (deadlines.update_s)"

    async def test_what_merely_fails_ends_the_run(self, tmp_path: Path) -> None:
        world = world_of(tmp_path)

        async def fails(batch: TrainBatch, place: int) -> None:
            raise UpdateError("the loss is not finite")

        world.students.accumulate = fails
        with pytest.raises(UpdateError, match="not finite"):
            await world.trainer().run()
        assert world.events("student_lost") == []


class TestStopped:
    async def stopped(self, world: World) -> None:
        """A stop while the second step waits for its second group."""
        world.rollouts.gates[4, 0] = asyncio.Event()
        trainer = world.trainer()
        running = asyncio.ensure_future(trainer.run())
        await until(world.log, "accumulate 3")
        trainer.request_stop()
        summary = await running
        assert (summary.step, summary.is_finished) == (1, False)

    async def test_the_step_is_abandoned(self, tmp_path: Path) -> None:
        world = world_of(tmp_path)
        await self.stopped(world)
        assert world.log[-2:] == ["discard_accumulated", "save"]
        assert verify(world.checkpoint(1)).state.next_ticket == 3

    async def test_and_made_anew_when_the_run_is_resumed(
        self, tmp_path: Path, plain: dict[str, Any]
    ) -> None:
        world = world_of(tmp_path)
        await self.stopped(world)
        world.run.close()
        again = world_of(tmp_path)
        await again.trainer().run(again.checkpoint(1))
        found = outcome(again)
        for name in ("weights", "metrics", "trajectories", "state"):
            assert found[name] == plain[name]

    async def test_a_student_that_is_lost_at_it_comes_back(self, tmp_path: Path) -> None:
        world = world_of(tmp_path, [("discard_accumulated", 1)])
        await self.stopped(world)
        assert len(world.events("student_rebuilt")) == 1
        assert verify(world.checkpoint(1)).state.policy_version == 1

    async def test_nothing_is_discarded_where_nothing_was_given(self, tmp_path: Path) -> None:
        world = world_of(tmp_path)
        world.rollouts.gates[0, 0] = asyncio.Event()
        trainer = world.trainer()
        running = asyncio.ensure_future(trainer.run())
        await until(world.log, "play 000000.0.0")
        trainer.request_stop()
        await running
        assert "discard_accumulated" not in world.log


class TestReplayed:
    async def test_journalled_batches_are_trained_on_again(
        self, tmp_path: Path, plain: dict[str, Any]
    ) -> None:
        """The run ends at its fifth step; the fourth and fifth are in the journal."""
        world = world_of(tmp_path, [("commit_accumulated", 5)])
        world.students.rebuild = gone
        with pytest.raises(UpdateError, match="gone for good"):
            await world.trainer().run()
        world.run.close()
        again = world_of(tmp_path)
        await again.trainer().run(again.checkpoint(3))
        found = outcome(again)
        for name in ("weights", "metrics", "trajectories", "state"):
            assert found[name] == plain[name]
        assert of(again.log, "play") == []
        assert of(again.log, "accumulate") == [f"accumulate {ticket}" for ticket in range(9, 15)]

    @pytest.mark.parametrize("is_lost", [True, False], ids=["lost", "resumed"])
    async def test_in_the_order_of_the_first_time(self, tmp_path: Path, is_lost: bool) -> None:
        """Rounding depends on the order; the journal keeps it."""
        losses = [("after the commit", 1)]
        world = world_of(tmp_path, losses, loop={"num_steps": 1})
        late = world.rollouts.gates[1, 0] = asyncio.Event()
        if not is_lost:
            world.students.rebuild = gone
        running = asyncio.ensure_future(world.trainer().run())
        await until(world.log, "accumulate 2")
        late.set()
        if is_lost:
            await running
            again = world
        else:
            with pytest.raises(UpdateError, match="gone for good"):
                await running
            world.run.close()
            again = world_of(tmp_path, loop={"num_steps": 1})
            await again.trainer().run(again.checkpoint(0))
        order = ["accumulate 0", "accumulate 2", "accumulate 1"]
        assert of(again.log, "accumulate")[-3:] == order
        fifo = [part.group_ids[0] for part in again.students.committed[-1]]
        assert fifo == ["000000.0", "000001.0", "000002.0"]
        assert [line for line in again.log if line.startswith("advance")] == ["advance 0,1,2"]
