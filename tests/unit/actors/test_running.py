"""A run in its directory: what the manifest says of it, and a stop that comes at any time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from actors.eval_jobs import EvaluationRequest
from actors.running import Running, update_manifest
from actors.single import Parts, SingleActor
from miniverl_dist.config.load import LoadedConfig, load_config
from miniverl_dist.errors import CheckpointError, ResumeError, UpdateError
from miniverl_dist.observability.environment import environment_record
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.observability.run_dir import RecordFile
from miniverl_dist.schemas.batch import TrainBatch, UpdateResult
from miniverl_dist.training.checkpoint import list_checkpoints
from miniverl_dist.training.loop import Trainer
from miniverl_dist.training.recorder import Recorder
from tests.fake_world import World
from tests.fakes import FakeStudents
from tests.support import sample_run
from tests.support.pools import until

RECIPE = sample_run.RECIPE + "evaluation: {before: false, after: false, baselines: []}\n"
PROVENANCE = {"package": "bfcl-eval", "sha256": "0" * 64}


class Watched(SilentProgress):
    """What a person would have read."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        self.num_closes = 0

    def message(self, text: str) -> None:
        self.messages.append(text)

    def close(self) -> None:
        self.num_closes += 1


class WorldActor(SingleActor):
    """Builds the parts of a run out of fakes; what it does may fail, or wait."""

    def __init__(self, loaded: LoadedConfig, recorder: Recorder, scene: Scene) -> None:
        super().__init__(loaded, recorder)
        self._scene, self._world = scene, scene.world
        self._world.recorder = recorder
        self.side: Any = SimpleNamespace(environment=SimpleNamespace(provenance=lambda: PROVENANCE))

    async def prepare(self, *, with_teacher: bool = True, with_student: bool = True) -> None:
        self._scene.log.append(f"prepare with_teacher={with_teacher}")
        await self._scene.reach("prepare")

    @asynccontextmanager
    async def open(
        self, *, tail_calls: int | None = None, with_scorer: bool = True
    ) -> AsyncIterator[Parts]:
        self._scene.log.append(f"open tail_calls={tail_calls} with_scorer={with_scorer}")
        await self._scene.reach("open")
        ports: Any = self._world.trainer()._ports
        try:
            yield Parts(ports, self._world.evaluator())
        finally:
            self._scene.log.append("closed")

    async def trainer(self, parts: Parts, *, with_warmup: bool) -> Trainer:
        self._scene.log.append(f"trainer with_warmup={with_warmup}")
        await self._scene.reach("trainer")
        return self._world.trainer()

    def roles(self) -> dict[str, Any]:
        return {"student": {"kind": "toy"}}


class Scene:
    """A run directory with a world of fakes around it."""

    def __init__(self, folder: Path) -> None:
        (folder / "recipe.yaml").write_text(RECIPE)
        self.config = load_config(folder / "recipe.yaml")
        self.world = World(folder, self.config.config)
        self.run = self.world.run
        if not (self.run.path / "manifest.json").exists():
            self.config.save(self.run)
            self.run.write_json("manifest.json", sample_run.manifest(self.config))
            self.run.write_json("environment.json", environment_record())
            update_manifest(self.run, status="created", roles={}, environment={})
        self.progress = Watched()
        self.log: list[str] = []
        self.at: dict[str, Callable[[], Any]] = {}
        """Place -> what happens there."""
        self.running = Running(
            self.config,
            self.run,
            self.progress,
            lambda config, recorder: WorldActor(config, recorder, self),
        )

    async def reach(self, where: str) -> None:
        await asyncio.sleep(0)
        if where in self.at:
            waits = self.at[where]()
            if waits is not None:
                await waits

    @property
    def manifest(self) -> dict[str, Any]:
        return self.run.read_json("manifest.json")

    @property
    def commits(self) -> list[str]:
        return [path.name for path in list_checkpoints(self.run.path / "checkpoints")]


@pytest.fixture
async def scene(tmp_path: Path) -> Scene:
    return Scene(tmp_path)


class TestManifest:
    async def test_a_run_that_reaches_its_last_step_is_finished(self, scene: Scene) -> None:
        seen: list[str] = []
        scene.at = {
            place: lambda: seen.append(scene.manifest["status"])
            for place in ("prepare", "open", "trainer")
        }
        assert scene.manifest["status"] == "created"
        summary = await scene.running.train(None)
        assert (summary.step, summary.is_finished) == (3, True)
        assert seen == ["running"] * 3
        told = scene.manifest
        assert (told["status"], told["name"]) == ("finished", "sample")
        assert told["roles"] == {"student": {"kind": "toy"}}
        assert told["environment"] == PROVENANCE
        assert "sample" in (scene.run.path / "summary.md").read_text()
        assert (scene.run.path / "report.html").exists()
        assert (scene.progress.messages, scene.progress.num_closes) == ([], 1)
        assert scene.log[-1] == "closed"

    @pytest.mark.parametrize("where", ["prepare", "open", "trainer"])
    async def test_an_error_anywhere_makes_it_failed(self, scene: Scene, where: str) -> None:
        def fail() -> None:
            raise UpdateError("x" * 3000)

        scene.at = {where: fail}
        with pytest.raises(UpdateError):
            await scene.running.train(None)
        assert scene.manifest["status"] == "failed"
        [event] = scene.world.events("run_failed")
        assert (event["error"], event["message"]) == ("UpdateError", "x" * 2000)
        assert scene.progress.num_closes == 1
        assert not (scene.run.path / "report.html").exists()
        assert ("closed" in scene.log) == (where == "trainer")

    async def test_an_error_of_the_training_closes_what_was_open(self, scene: Scene) -> None:
        class Failing(FakeStudents):
            async def update(self, batch: TrainBatch) -> UpdateResult:
                raise UpdateError("rank 1 died")

        scene.world.students = Failing(scene.world.log)
        with pytest.raises(UpdateError, match="rank 1 died"):
            await scene.running.train(None)
        assert (scene.manifest["status"], scene.log[-1]) == ("failed", "closed")

    async def test_a_run_that_is_interrupted_is_failed_too(self, scene: Scene) -> None:
        scene.at = {"open": asyncio.Event().wait}
        running = asyncio.create_task(scene.running.train(None))
        await until(lambda: "open tail_calls=None with_scorer=True" in scene.log)
        await asyncio.sleep(0)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        assert scene.manifest["status"] == "failed"
        assert scene.world.events("run_failed")[0]["error"] == "CancelledError"

    async def test_a_run_is_not_lost_for_want_of_its_report(self, scene: Scene) -> None:
        (scene.run.path / "report.html").mkdir()
        summary = await scene.running.train(None)
        assert (summary.is_finished, scene.manifest["status"]) == (True, "finished")
        [message] = scene.progress.messages
        assert message.startswith("no report: ")
        assert "`miniverl-dist report` later" in message

    async def test_fields_that_are_not_named_stay(self, scene: Scene) -> None:
        before = scene.manifest
        update_manifest(scene.run, status="running", seed=9)
        assert scene.manifest == before | {"status": "running", "seed": 9}


class TestStop:
    @pytest.mark.parametrize("where", ["before", "prepare", "open", "trainer"])
    async def test_before_there_is_a_trainer_it_ends_in_order(
        self, scene: Scene, where: str
    ) -> None:
        if where == "before":
            scene.running.request_stop()
        scene.at = {where: scene.running.request_stop}
        summary = await asyncio.wait_for(scene.running.train(None), 5)
        assert (summary.step, summary.policy_version, summary.is_finished) == (0, 0, False)
        assert scene.manifest["status"] == "stopped"
        # At once: the parts that are still starting may take minutes.
        assert scene.progress.messages == [
            "stop requested: the run ends in order after its parts have started"
        ]
        assert [e["event"] for e in scene.world.events("stop_requested", "stopped")] == [
            "stop_requested",
            "stopped",
        ]
        assert scene.commits in ([], ["step-000000"])
        assert scene.world.records(RecordFile.METRICS) == []
        assert [line for line in scene.world.log if line.startswith(("play", "update"))] == []
        assert scene.log[-1] == "closed"
        assert (scene.run.path / "summary.md").exists()

    async def test_while_it_trains_it_ends_after_the_step(self, scene: Scene) -> None:
        class Stopping(FakeStudents):
            async def update(self, batch: TrainBatch) -> UpdateResult:
                scene.running.request_stop()
                return await super().update(batch)

        scene.world.students = Stopping(scene.world.log)
        summary = await scene.running.train(None)
        assert (summary.step, summary.is_finished) == (1, False)
        assert (scene.manifest["status"], scene.commits[-1]) == ("stopped", "step-000001")
        assert len(scene.world.events("stop_requested")) == 1

    async def test_a_resume_that_is_stopped_at_once_leaves_the_commit_and_no_other(
        self, scene: Scene, tmp_path: Path
    ) -> None:
        class Stopping(FakeStudents):
            async def update(self, batch: TrainBatch) -> UpdateResult:
                scene.running.request_stop()
                return await super().update(batch)

        scene.world.students = Stopping(scene.world.log)
        await scene.running.train(None)
        scene.run.close()
        again = Scene(tmp_path)
        again.running.request_stop()
        summary = await again.running.train(again.world.checkpoint(1))
        assert (summary.step, summary.policy_version, summary.is_finished) == (1, 1, False)
        assert again.manifest["status"] == "stopped"
        assert again.world.students.digest == scene.world.students.digest
        assert [line for line in again.world.log if line in ("save", "update")] == []
        assert "trainer with_warmup=True" in scene.log
        assert "trainer with_warmup=False" in again.log
        again.run.close()
        last = Scene(tmp_path)
        assert (await last.running.train(last.world.checkpoint(1))).is_finished
        assert last.manifest["status"] == "finished"


class TestEvaluate:
    async def test_policies_are_measured_with_the_weights_asked_for(
        self, scene: Scene, tmp_path: Path
    ) -> None:
        await scene.running.train(None)
        scene.run.close()
        again = Scene(tmp_path)
        report = await again.running.evaluate(
            EvaluationRequest(("null", "student"), "late", again.world.checkpoint(3), tail_calls=2)
        )
        assert [(row.policy, row.tag, row.policy_version) for row in report.rows] == [
            ("null", "late-T2", None),
            ("student", "late-T2", 3),
        ]
        assert again.world.log[0] == "publish 3"
        assert again.world.students.digest == scene.world.students.digest
        assert again.log == [
            "prepare with_teacher=False",
            "open tail_calls=2 with_scorer=False",
            "closed",
        ]

    async def test_without_a_checkpoint_the_student_is_measured_as_it_begins(
        self, scene: Scene
    ) -> None:
        report = await scene.running.evaluate(EvaluationRequest(("student",), "initial"))
        assert [(row.tag, row.policy_version) for row in report.rows] == [("initial", 0)]
        assert (scene.world.weights.versions, scene.world.students.digest) == ([0], "start")

    async def test_the_teacher_is_prepared_only_when_it_is_asked_for(self, scene: Scene) -> None:
        def stop() -> None:
            raise ResumeError("far enough")

        scene.at = {"prepare": stop}
        for policies in (("teacher", "null"), ("null",)):
            with pytest.raises(ResumeError):
                await scene.running.evaluate(EvaluationRequest(policies, "initial"))
        assert scene.log == ["prepare with_teacher=True", "prepare with_teacher=False"]

    async def test_a_checkpoint_that_is_none_is_refused_before_anything_is_published(
        self, scene: Scene, tmp_path: Path
    ) -> None:
        (tmp_path / "empty").mkdir()
        with pytest.raises(CheckpointError, match="never completed"):
            await scene.running.evaluate(EvaluationRequest(("student",), "x", tmp_path / "empty"))
        assert scene.world.weights.versions == []
