"""A stop is honoured wherever a run may be, and nothing that it needs later is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from miniverl_dist.observability.run_dir import RecordFile
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.batch import SftBatch, TrainBatch, UpdateResult
from miniverl_dist.training.checkpoint import list_checkpoints
from tests.fake_world import World
from tests.fakes import FakeStudents, run_config, trajectory


class KilledError(BaseException):
    """As sudden as SIGKILL: nothing in the product may catch it."""


class Dying(FakeStudents):
    """Dies in the update of a policy version."""

    last_version = 0

    async def update(self, batch: TrainBatch) -> UpdateResult:
        if self.policy_version == self.last_version:
            raise KilledError
        return await super().update(batch)


async def killed_at(policy_version: int, world: World) -> None:
    students = Dying(world.log)
    students.last_version = policy_version
    world.students = students
    with pytest.raises(KilledError):
        await world.trainer().run()
    world.run.close()


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110 -- polls what has no event
            await asyncio.sleep(0)


def endless_warmup() -> Iterator[SftBatch]:
    while True:
        yield SftBatch(np.array([1, 2]), np.array([0, 2]), np.array([False, True]))


async def test_in_the_warm_up_it_leaves_no_commit_and_a_resume_begins_anew(tmp_path: Path) -> None:
    config = run_config(student={"warmup": {"num_steps": 9}})
    world = World(tmp_path, config, warmup=endless_warmup())
    trainer = world.trainer()
    running = asyncio.ensure_future(trainer.run())
    await until(lambda: len(world.events("warmup_step")) > 3)
    trainer.request_stop()
    assert (await running).is_finished is False
    assert list_checkpoints(world.run.path / "checkpoints") == []
    assert [e["event"] for e in world.events("stop_requested", "stopped", "warmup_finished")] == [
        "stop_requested",
        "stopped",
    ]


async def test_in_an_evaluation_it_is_abandoned_and_made_by_the_resume(tmp_path: Path) -> None:
    config = run_config(
        loop={"num_steps": 2},
        evaluation={"every_n_steps": 1, "before": False, "after": True, "baselines": []},
    )
    world = World(tmp_path, config)
    hanging = asyncio.Event()
    make = world.evaluator()

    async def slow_student() -> object:
        world.log.append("evaluation waits")
        await hanging.wait()
        raise AssertionError("never let go")

    make.policies = {"student": slow_student}  # type: ignore[dict-item]
    trainer = world.trainer()
    trainer._evaluator = make
    running = asyncio.ensure_future(trainer.run())
    await until(lambda: "evaluation waits" in world.log)
    trainer.request_stop()
    summary = await asyncio.wait_for(running, 60)
    assert (summary.step, summary.is_finished) == (1, False)
    world.run.close()
    again = World(tmp_path, config)
    assert (await again.trainer().run(again.checkpoint(1))).is_finished
    assert [row["tag"] for row in again.run.read_json("eval.json")["rows"]] == [
        "step-000001",
        "step-000002",
        "after",
    ]


async def test_in_a_replay_the_batches_behind_it_stay_in_the_journal(tmp_path: Path) -> None:
    config = run_config(loop={"num_steps": 4}, checkpoint={"every_n_steps": 9})

    await killed_at(3, World(tmp_path, config))
    second = World(tmp_path, config)
    trainer = second.trainer()

    class Stopping(FakeStudents):
        async def update(self, batch: TrainBatch) -> UpdateResult:
            trainer.request_stop()
            return await super().update(batch)

    stopping = Stopping(second.log)
    trainer._ports = trainer._ports.__class__(**{**vars(trainer._ports), "students": stopping})
    assert (await trainer.run(second.checkpoint(0))).step == 1
    second.run.close()
    third = World(tmp_path, config)
    assert (await third.trainer().run(third.checkpoint(1))).is_finished
    assert len(third.events("replayed_step")) == 1 + 3
    assert [name for name in third.log if name.startswith("play ")] == []


async def test_a_mastered_task_grows_although_its_groups_are_dropped(tmp_path: Path) -> None:
    """Groups without variance are replaced; what they say about the task is kept."""

    def play(place: Assignment, member: int) -> object:
        is_flat = place.attempt == 0
        return trajectory(
            place=place, member=member, passed=True, reward=1.0 if is_flat else float(member)
        )

    config = run_config(
        loop={"num_steps": 1, "num_groups": 1}, grpo={"zero_variance": "drop", "max_refills": 2}
    )
    world = World(tmp_path, config, play=play)  # type: ignore[arg-type]
    seen: list[int] = []
    advance = world.curriculum.advance

    def spy(groups: object) -> None:
        seen.extend(len(group.replaced) for group in groups)  # type: ignore[attr-defined]
        advance(groups)

    world.curriculum.advance = spy
    await world.trainer().run()
    assert seen == [1]
    metrics = world.records(RecordFile.METRICS)
    assert metrics[0]["num_refilled_groups"] == 1


async def test_a_replayed_step_reports_the_lag_it_had(tmp_path: Path) -> None:
    config = run_config(loop={"num_steps": 5, "max_policy_lag": 1}, checkpoint={"every_n_steps": 9})

    world = World(tmp_path, config)
    await killed_at(4, world)
    before = [line["policy_lag_max"] for line in world.records(RecordFile.METRICS)]
    again = World(tmp_path, config)
    await again.trainer().run(again.checkpoint(0))
    after = [line["policy_lag_max"] for line in again.records(RecordFile.METRICS)]
    assert before == [0, 1, 1, 1]
    assert after[:4] == before
