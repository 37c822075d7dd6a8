"""A run that is killed somewhere and goes on ends as one that was never killed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ChecksumError, ResumeError
from miniverl_dist.observability.run_dir import RecordFile
from miniverl_dist.ports import PublishReceipt
from miniverl_dist.schemas.batch import TrainBatch, UpdateResult
from miniverl_dist.training.checkpoint import list_checkpoints, verify
from miniverl_dist.training.journal import Journal
from tests.fake_world import DIGEST, World
from tests.fakes import FakeCurriculum, FakeStudents, FakeWeightStore, run_config

CONFIG = run_config(
    objective="grpo_opd",
    loop={"num_steps": 7},
    checkpoint={"every_n_steps": 3},
    evaluation={"every_n_steps": 2, "before": True, "after": True, "baselines": ["null"]},
)


class KilledError(BaseException):
    """As sudden as SIGKILL: nothing in the product may catch it."""


class Fuse:
    """Blows at the n-th time that a certain thing happens."""

    def __init__(self, what: str, after: int) -> None:
        self.what, self._left = what, after

    def reach(self, what: str) -> None:
        if what == self.what:
            self._left -= 1
            if self._left == 0:
                raise KilledError


class FragileStudents(FakeStudents):
    fuse: Fuse

    async def update(self, batch: TrainBatch) -> UpdateResult:
        self.fuse.reach("update begins")
        result = await super().update(batch)
        self.fuse.reach("update ends")
        return result

    async def save(self, directory: Path) -> None:
        await super().save(directory)
        self.fuse.reach("save ends")


class FragileStore(FakeWeightStore):
    fuse: Fuse

    async def publish(self, policy_version: int) -> PublishReceipt:
        self.fuse.reach("publish begins")
        return await super().publish(policy_version)


class FragileCurriculum(FakeCurriculum):
    fuse: Fuse

    def summary(self) -> dict[str, float]:
        self.fuse.reach("record begins")
        return super().summary()


def fragile(folder: Path, fuse: Fuse, config: RunConfig = CONFIG) -> World:
    world = World(folder, config)
    world.students, world.weights = FragileStudents(world.log), FragileStore(world.log)
    world.curriculum = FragileCurriculum(world.log)
    for part in (world.students, world.weights, world.curriculum):
        part.fuse = fuse
    return world


async def resumed(folder: Path, config: RunConfig = CONFIG) -> World:
    """Continue from the newest commit, to the end."""
    world = World(folder, config)
    await world.trainer().run(list_checkpoints(world.run.path / "checkpoints")[-1])
    return world


def comparable(world: World) -> dict[str, Any]:
    """What must not depend on whether the run was killed."""
    metrics = [
        {k: v for k, v in line.items() if not k.startswith(("seconds", "peak"))}
        for line in world.records(RecordFile.METRICS)
    ]
    return {
        "weights": world.students.digest,
        "metrics": metrics,
        "trajectories": world.records(RecordFile.TRAJECTORIES),
        "state": verify(world.checkpoint(7)).state.model_dump(exclude={"file_positions"}),
        "rows": world.run.read_json("eval.json")["rows"],
    }


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run that nothing interrupts."""
    world = World(tmp_path_factory.mktemp("whole"), CONFIG)
    asyncio.run(world.trainer().run())
    return comparable(world)


MOMENTS = [
    ("update begins", 1),
    ("update begins", 5),
    ("update ends", 2),
    ("update ends", 6),
    ("publish begins", 4),
    ("record begins", 3),
    ("record begins", 5),
    ("save ends", 2),
    ("save ends", 3),
    ("save ends", 4),
]


@pytest.mark.parametrize(("what", "after"), MOMENTS, ids=lambda value: str(value))
async def test_killed_anywhere_it_ends_the_same(
    tmp_path: Path, whole: dict[str, Any], what: str, after: int
) -> None:
    killed = fragile(tmp_path, Fuse(what, after))
    with pytest.raises(KilledError):
        await killed.trainer().run()
    killed.run.close()
    world = await resumed(tmp_path)
    assert comparable(world) == whole


async def test_nothing_that_was_journalled_is_sampled_again(tmp_path: Path) -> None:
    killed = fragile(tmp_path, Fuse("update begins", 6))  # step 5; the commit was at step 3
    with pytest.raises(KilledError):
        await killed.trainer().run()
    killed.run.close()
    world = await resumed(tmp_path)
    played = [line for line in world.log if line.startswith("play")]
    assert {line.split(".")[0] for line in played} == {"play 000012", "play 000013"}
    assert [e["step"] for e in world.events("replayed_step")] == [4, 5, 6]
    assert world.log.count("update") == 4


async def test_peer_35_a_resumed_run_goes_on_counting(tmp_path: Path) -> None:
    killed = fragile(tmp_path, Fuse("update begins", 5))
    with pytest.raises(KilledError):
        await killed.trainer().run()
    killed.run.close()
    world = await resumed(tmp_path)
    [event] = world.events("resumed")
    assert (event["checkpoint"], event["step"]) == ("step-000003", 3)
    lines = world.records(RecordFile.METRICS)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert [line["policy_version"] for line in lines] == [1, 2, 3, 4, 5, 6, 7]
    assert {line["policy_lag_max"] for line in lines} == {0}
    # What is sampled after the resume is sampled under the version that was resumed.
    assert world.log.index("publish 3") < world.log.index("update")


async def test_defect_curriculum_state_is_not_lost_on_restart(tmp_path: Path) -> None:
    killed = fragile(tmp_path, Fuse("update begins", 4))
    with pytest.raises(KilledError):
        await killed.trainer().run()
    killed.run.close()
    world = await resumed(tmp_path)
    horizons = {
        r["trajectory"]["group_id"]: r["trajectory"]["tail_calls"]
        for r in world.records(RecordFile.TRAJECTORIES)
    }
    assert horizons["000006.0"] == 4  # three steps were committed before it
    assert horizons["000012.0"] == 7


async def test_evaluations_are_not_made_twice(tmp_path: Path) -> None:
    killed = fragile(tmp_path, Fuse("update begins", 6))
    with pytest.raises(KilledError):
        await killed.trainer().run()
    rows = killed.run.read_json("eval.json")["rows"]
    assert [row["tag"] for row in rows] == ["before", "before", "step-000002", "step-000004"]
    killed.run.close()
    world = await resumed(tmp_path)
    assert world.log.count("evaluate") == 2
    assert world.run.read_json("eval.json")["rows"][:4] == rows


async def test_a_stop_and_a_resume_end_the_same(tmp_path: Path, whole: dict[str, Any]) -> None:
    world = World(tmp_path, CONFIG)
    world.rollouts.gates[8, 1] = asyncio.Event()
    trainer = world.trainer()
    running = asyncio.ensure_future(trainer.run())
    while "play 000008.0.1" not in world.log:  # noqa: ASYNC110 - the run is what we wait for
        await asyncio.sleep(0)
    trainer.request_stop()
    assert (await running).step == 4
    world.run.close()
    again = await resumed(tmp_path)
    assert comparable(again)["weights"] == whole["weights"]
    assert comparable(again)["metrics"] == whole["metrics"]
    assert again.events("replayed_step") == []


async def test_resuming_a_finished_run_does_nothing(tmp_path: Path) -> None:
    world = World(tmp_path, CONFIG)
    await world.trainer().run()
    world.run.close()
    again = await resumed(tmp_path)
    assert again.log.count("update") == 0
    assert [line for line in again.log if line.startswith(("play", "assign", "save"))] == []


async def test_a_damaged_commit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    world = World(tmp_path, CONFIG)
    await world.trainer().run()
    world.run.close()
    file = world.checkpoint(7) / "student.json"
    file.write_bytes(file.read_bytes().replace(b"7", b"8"))
    again = World(tmp_path, CONFIG)
    with pytest.raises(ChecksumError, match=r"step-000007/student\.json"):
        await again.trainer().run(again.checkpoint(7))
    assert again.students.policy_version == 0
    assert again.log == []


async def test_a_damaged_journal_is_one_clear_error(tmp_path: Path) -> None:
    killed = fragile(tmp_path, Fuse("update begins", 5))
    with pytest.raises(KilledError):
        await killed.trainer().run()
    killed.run.close()
    file = killed.run.path / "journal" / "step-000004.json"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ChecksumError, match=r"journal/step-000004\.json differs"):
        await resumed(tmp_path)


async def test_journalled_batches_are_not_trained_on_out_of_order(tmp_path: Path) -> None:
    killed = fragile(tmp_path, Fuse("update begins", 6))  # steps 3, 4 and 5 are journalled
    with pytest.raises(KilledError):
        await killed.trainer().run()
    killed.run.close()
    journal = killed.run.path / "journal"
    (journal / "step-000003.json").rename(journal / "aside")
    (journal / "step-000004.json").rename(journal / "step-000003.json")
    (journal / "aside").rename(journal / "step-000004.json")
    with pytest.raises(ResumeError, match=r"step-000003\.json holds the batch of step 4"):
        await resumed(tmp_path)


async def test_a_batch_within_the_lag_that_config_allows_is_replayed(tmp_path: Path) -> None:
    config = run_config(loop={"num_steps": 7, "max_policy_lag": 1}, checkpoint={"every_n_steps": 3})
    killed = fragile(tmp_path, Fuse("update begins", 6), config)
    with pytest.raises(KilledError):
        await killed.trainer().run()
    killed.run.close()
    world = await resumed(tmp_path, config)
    assert [e["step"] for e in world.events("replayed_step")] == [4, 5, 6]
    assert {line["policy_lag_max"] for line in world.records(RecordFile.METRICS)[3:6]} == {1}


async def test_a_batch_from_the_future_is_refused(tmp_path: Path) -> None:
    """Its head is right, but its groups were started after publishes that are still to come."""
    killed = fragile(tmp_path, Fuse("update begins", 5))
    with pytest.raises(KilledError):
        await killed.trainer().run()
    killed.run.close()
    journal = Journal(killed.run.path / "journal", DIGEST)
    groups = journal.read(4, 4)
    assert groups is not None
    later = [g.model_copy(update={"num_publishes": g.num_publishes + 1}) for g in groups]
    journal.write(4, 4, later)
    with pytest.raises(ResumeError, match="of step 4 has policy lag -1, expected 0 to 0"):
        await resumed(tmp_path)


async def test_counters_survive(tmp_path: Path) -> None:
    world = World(tmp_path, CONFIG)
    world.recorder.count("empty_batches", 3)
    await world.trainer().run()
    world.run.close()
    assert (await resumed(tmp_path)).recorder.counters["empty_batches"] == 3
