"""A student that is lost comes back to where it was, and the run ends as if nothing had been."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniverl_dist.errors import CheckpointError, StudentLostError, UpdateError
from miniverl_dist.observability.run_dir import RecordFile
from miniverl_dist.ports import PublishReceipt
from miniverl_dist.schemas.batch import SftBatch, TrainBatch, UpdateResult
from miniverl_dist.training.checkpoint import list_checkpoints, verify
from tests.fake_world import World
from tests.fakes import FakeRollouts, FakeStudents, FakeWeightStore, Log, run_config

CONFIG = run_config(
    objective="grpo_opd",
    loop={"num_steps": 7},
    checkpoint={"every_n_steps": 3, "keep": 9},
    evaluation={"every_n_steps": 2, "before": True, "after": True, "baselines": ["null"]},
)
"""Commits before the first step, after the third, the sixth and the seventh."""

Loss = tuple[str, int]
"""(what happens, the how manieth time): every call counts, a repeated one too."""


class LosingStudents(FakeStudents):
    """Lost at given moments; from then on every call but a rebuild says so."""

    def __init__(self, log: Log, losses: Collection[Loss], num_optimizer_steps: int = 1) -> None:
        super().__init__(log, num_optimizer_steps=num_optimizer_steps)
        self._losses, self._times = set(losses), Counter[str]()
        self.is_lost = self.is_fresh = False
        self.rebuild_error: Exception | None = None

    def reach(self, what: str) -> None:
        self._times[what] += 1
        if (what, self._times[what]) in self._losses:
            self.is_lost = True
            self.digest, self.policy_version = "half way", 99
        self.require()

    def require(self) -> None:
        if self.is_lost:
            raise StudentLostError("rank 1 is gone")

    async def update(self, batch: TrainBatch) -> UpdateResult:
        assert not self.is_fresh, "new ranks must load before anything else"
        self.reach("update begins")
        result = await super().update(batch)
        self.reach("update ends")
        return result

    async def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        self.reach("sft")
        return await super().sft_update(batch, learning_rate)

    async def finish_warmup(self) -> None:
        self.reach("finish_warmup")
        await super().finish_warmup()

    async def save(self, directory: Path) -> None:
        self.require()
        (directory / "of-the-first-rank.bin").write_bytes(b"half a commit")
        self.reach("save")
        (directory / "of-the-first-rank.bin").unlink()
        await super().save(directory)

    async def load(self, directory: Path, policy_version: int) -> None:
        self.log.append(f"load {policy_version}")
        self.reach("load")
        await super().load(directory, policy_version)
        self.is_fresh = False

    async def rebuild(self) -> None:
        await super().rebuild()
        if self.rebuild_error is not None:
            raise self.rebuild_error
        self.is_lost, self.is_fresh = False, True


class LosingStore(FakeWeightStore):
    """Sends what the student holds, if that stands."""

    def __init__(self, log: Log, students: LosingStudents) -> None:
        super().__init__(log)
        self._students = students

    async def publish(self, policy_version: int) -> PublishReceipt:
        self._students.reach("publish")
        assert policy_version == self._students.policy_version
        return await super().publish(policy_version)


def losing(
    folder: Path,
    *losses: Loss,
    config: Any = CONFIG,
    num_optimizer_steps: int = 1,
    warmup: Iterator[SftBatch] | None = None,
) -> World:
    """A world whose engines sample under what was published last."""
    world = World(folder, config, warmup=warmup)
    world.students = students = LosingStudents(world.log, losses, num_optimizer_steps)
    world.weights = weights = LosingStore(world.log, students)
    world.rollouts = FakeRollouts(world.log, lambda: weights.versions[-1])
    return world


def comparable(world: World) -> dict[str, Any]:
    """What must not depend on whether the student was lost."""
    last = world.config.loop.num_steps
    return {
        "weights": world.students.digest,
        "metrics": [
            {k: v for k, v in line.items() if not k.startswith(("seconds", "peak"))}
            for line in world.records(RecordFile.METRICS)
        ],
        "trajectories": world.records(RecordFile.TRAJECTORIES),
        "state": verify(world.checkpoint(last)).state.model_dump(
            exclude={"file_positions", "counters"}
        ),
        "rows": world.run.read_json("eval.json")["rows"],
        "published": world.weights.versions,
        "rollouts": [line for line in world.log if line.startswith(("assign", "play", "score"))],
        "advances": [line for line in world.log if line.startswith("advance")],
        "commits": [path.name for path in list_checkpoints(world.run.path / "checkpoints")],
        "steps": [e["step"] for e in world.events("step_finished")],
    }


def trained(world: World) -> list[int]:
    """Step of every batch that the student finished an update on, in order."""
    return [int(batch.group_ids[0].split(".")[0]) // 2 for batch in world.students.batches]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run in which the student stands all the time."""
    world = losing(tmp_path_factory.mktemp("whole"))
    asyncio.run(world.trainer().run())
    assert trained(world) == list(range(7))
    return comparable(world)


MOMENTS: list[tuple[list[Loss], list[int], list[int]]] = [
    # losses; finished updates by step; batches replayed by each recovery that succeeded
    ([("update begins", 1)], [0, 1, 2, 3, 4, 5, 6], [0]),
    ([("update ends", 1)], [0, 0, 1, 2, 3, 4, 5, 6], [0]),
    ([("update begins", 3)], [0, 1, 0, 1, 2, 3, 4, 5, 6], [2]),
    ([("update begins", 4)], [0, 1, 2, 3, 4, 5, 6], [0]),
    ([("update ends", 5)], [0, 1, 2, 3, 4, 3, 4, 5, 6], [1]),
    ([("publish", 3)], [0, 1, 0, 1, 2, 3, 4, 5, 6], [2]),  # of step 1, already trained on
    ([("publish", 5)], [0, 1, 2, 3, 3, 4, 5, 6], [1]),
    ([("save", 2)], [0, 1, 2, 0, 1, 2, 3, 4, 5, 6], [3]),
    ([("save", 4)], [0, 1, 2, 3, 4, 5, 6, 6], [1]),
    # In the replay: of step 3's batch, after the loss in step 4's update.
    ([("update begins", 5), ("update begins", 6)], [0, 1, 2, 3, 3, 4, 5, 6], [1]),
    ([("update begins", 6), ("update ends", 7)], [0, 1, 2, 3, 4, 3, 4, 3, 4, 5, 6], [2]),
    ([("update begins", 5), ("load", 1)], [0, 1, 2, 3, 3, 4, 5, 6], [1]),
    # Again and again in one step, then in another.
    ([("update begins", 5), ("update ends", 6)], [0, 1, 2, 3, 3, 4, 3, 4, 5, 6], [1, 1]),
    ([("publish", 5), ("publish", 6)], [0, 1, 2, 3, 3, 3, 4, 5, 6], [1, 1]),
    ([("update begins", 2), ("save", 3)], [0, 0, 1, 2, 3, 4, 5, 3, 4, 5, 6], [1, 3]),
]


@pytest.mark.parametrize(("losses", "updates", "replayed"), MOMENTS, ids=lambda value: str(value))
async def test_lost_anywhere_the_run_ends_the_same(
    tmp_path: Path,
    whole: dict[str, Any],
    losses: list[Loss],
    updates: list[int],
    replayed: list[int],
) -> None:
    world = losing(tmp_path, *losses)
    summary = await world.trainer().run()
    assert (summary.step, summary.policy_version, summary.is_finished) == (7, 7, True)
    assert comparable(world) == whole
    assert trained(world) == updates
    lost, rebuilt = world.events("student_lost"), world.events("student_rebuilt")
    assert [e["replayed"] for e in rebuilt] == replayed
    assert len(lost) == len(losses)
    assert {e["reason"] for e in lost} == {"rank 1 is gone"}
    assert world.recorder.counters == {"student_rebuilds": len(losses)}
    assert world.log.count("rebuild") == len(losses)


async def test_events_say_when_and_from_where(tmp_path: Path) -> None:
    world = losing(tmp_path, ("update begins", 5))
    await world.trainer().run()
    names = ("step_finished", "student_lost", "student_rebuilt")
    told = [(e["event"], e.get("step"), e.get("checkpoint")) for e in world.events(*names)]
    assert told[3:7] == [
        ("step_finished", 4, None),
        ("student_lost", 4, None),
        ("student_rebuilt", None, "step-000003"),
        ("step_finished", 5, None),
    ]


async def test_engines_are_told_nothing_of_it(tmp_path: Path) -> None:
    """The same version again is no news: nothing is published between loss and return."""
    world = losing(tmp_path, ("update begins", 6))
    await world.trainer().run()
    log = world.log
    back = log[log.index("rebuild") :]
    steps = [line for line in back if not line.startswith(("play", "assign", "score", "evaluate"))]
    assert steps[:6] == ["rebuild", "load 3", "update", "update", "update", "publish 6"]


async def test_several_optimizer_steps_in_a_batch_are_replayed_together(tmp_path: Path) -> None:
    config = run_config(
        loop={"num_steps": 4, "num_minibatches": 2},
        checkpoint={"every_n_steps": 2},
        evaluation={"before": False, "after": True, "baselines": []},
    )
    calm = losing(tmp_path / "calm", config=config, num_optimizer_steps=2)
    await calm.trainer().run()
    world = losing(tmp_path / "lost", ("publish", 5), config=config, num_optimizer_steps=2)
    assert (await world.trainer().run()).policy_version == 8
    assert comparable(world) == comparable(calm)
    assert world.weights.versions == [0, 2, 4, 6, 8]
    assert "load 4" in world.log


async def test_a_stop_asked_during_the_loss_still_finishes_the_step(tmp_path: Path) -> None:
    world = losing(tmp_path, ("update ends", 5))
    trainer = world.trainer()
    rebuild = world.students.rebuild

    async def stopped() -> None:
        trainer.request_stop()
        await rebuild()

    world.students.rebuild = stopped
    summary = await trainer.run()
    assert (summary.step, summary.is_finished) == (5, False)
    state = verify(world.checkpoint(5)).state
    assert (state.step, state.policy_version, state.counters) == (5, 5, {"student_rebuilds": 1})


class TestResumed:
    async def killed(self, folder: Path) -> None:
        """A run that ended at step 5, three steps behind it committed."""
        world = losing(folder, ("update begins", 6))
        world.students.rebuild_error = UpdateError("the node is gone for good")
        with pytest.raises(UpdateError, match="gone for good"):
            await world.trainer().run()
        world.run.close()

    async def test_a_rebuild_that_fails_ends_the_run_which_then_can_be_resumed(
        self, tmp_path: Path, whole: dict[str, Any]
    ) -> None:
        await self.killed(tmp_path)
        world = losing(tmp_path)
        assert len(world.events("student_lost")) == 1
        assert world.events("student_rebuilt") == []
        assert world.log == []
        await world.trainer().run(world.checkpoint(3))
        for what in ("weights", "metrics", "trajectories", "state", "rows"):
            assert comparable(world)[what] == whole[what]
        assert trained(world) == [3, 4, 5, 6]

    @pytest.mark.parametrize(
        ("loss", "updates", "replayed"),
        [
            (("publish", 1), [3, 4, 5, 6], 0),
            (("update begins", 1), [3, 4, 5, 6], 0),
            (("update begins", 2), [3, 3, 4, 5, 6], 1),
            (("publish", 3), [3, 4, 3, 4, 5, 6], 2),
        ],
        ids=str,
    )
    async def test_a_loss_in_the_resume_is_no_other(
        self, tmp_path: Path, whole: dict[str, Any], loss: Loss, updates: list[int], replayed: int
    ) -> None:
        await self.killed(tmp_path)
        world = losing(tmp_path, loss)
        await world.trainer().run(world.checkpoint(3))
        for what in ("weights", "metrics", "trajectories", "state", "rows"):
            assert comparable(world)[what] == whole[what]
        assert trained(world) == updates
        assert [e["step"] for e in world.events("replayed_step")] == [4, 5, 6]
        assert [e["replayed"] for e in world.events("student_rebuilt")] == [replayed]
        assert world.weights.versions == [3, 4, 5, 6, 7]


class TestNoWayBack:
    @pytest.mark.parametrize(
        "loss",
        [("publish", 1), ("sft", 2), ("finish_warmup", 1), ("publish", 2), ("save", 1)],
        ids=str,
    )
    async def test_before_the_first_commit_a_loss_ends_the_run(
        self, tmp_path: Path, loss: Loss
    ) -> None:
        batch = SftBatch(np.arange(3), np.array([0, 3]), np.array([False, True, True]))
        config = run_config(student={"warmup": {"num_steps": 2}})
        world = losing(tmp_path, loss, config=config, warmup=iter([batch, batch]))
        with pytest.raises(StudentLostError, match="rank 1 is gone"):
            await world.trainer().run()
        assert world.log.count("rebuild") == 0
        assert world.events("student_lost", "student_rebuilt") == []
        assert world.recorder.counters == {}
        folder = world.run.path / "checkpoints"
        assert not folder.exists() or list(folder.iterdir()) == []

    async def test_without_its_checkpoints_the_run_ends(self, tmp_path: Path) -> None:
        world = losing(tmp_path, ("update begins", 5))
        rebuild = world.students.rebuild

        async def after_a_clean_up() -> None:
            shutil.rmtree(world.run.path / "checkpoints")
            await rebuild()

        world.students.rebuild = after_a_clean_up
        with pytest.raises(CheckpointError, match="removed while it was running"):
            await world.trainer().run()
        assert [line["step"] for line in world.records(RecordFile.METRICS)] == [1, 2, 3, 4]
        assert world.events("student_rebuilt") == []

    async def test_without_its_journal_the_run_ends(self, tmp_path: Path) -> None:
        world = losing(tmp_path, ("update begins", 6))
        rebuild = world.students.rebuild

        async def after_a_clean_up() -> None:
            (world.run.path / "journal" / "step-000004.json").unlink()
            await rebuild()

        world.students.rebuild = after_a_clean_up
        with pytest.raises(CheckpointError, match="no batch of step 4 to train on again"):
            await world.trainer().run()

    async def test_an_update_that_merely_fails_is_not_repeated(self, tmp_path: Path) -> None:
        class Failing(LosingStudents):
            async def update(self, batch: TrainBatch) -> UpdateResult:
                if self.policy_version == 4:
                    raise UpdateError("the loss is not finite")
                return await super().update(batch)

        world = losing(tmp_path)
        world.students.__class__ = Failing
        with pytest.raises(UpdateError, match="not finite"):
            await world.trainer().run()
        assert world.log.count("rebuild") == 0
        assert world.events("student_lost") == []


async def test_what_a_broken_save_left_behind_is_no_part_of_the_commit(tmp_path: Path) -> None:
    world = losing(tmp_path, ("save", 2))
    await world.trainer().run()
    manifest = verify(world.checkpoint(3))
    assert [file.path for file in manifest.files] == ["student.json"]
    assert [path.name for path in world.run.path.glob("checkpoints/.*")] == []
