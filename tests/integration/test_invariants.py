"""What must hold of a whole run: its identity, its config, its end by a signal, its load paths."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
import pickle
import platform
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from actors import launch
from actors.single import Parts, SingleActor
from miniverl_dist.backends.weights_io import load_toy_folder
from miniverl_dist.config.load import LoadedConfig, load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import CheckpointError, ChecksumError, ConfigError, ResumeError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.run_state import CheckpointManifest
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.training import checkpoint
from miniverl_dist.training.journal import Journal
from tests.fakes import ByteTokenizer
from tests.support.sample_run import RECIPE, write_run
from tests.support.toy import tiny_backend

needs_bfcl = [pytest.mark.bfcl, pytest.mark.tokenizers]

RECIPE_FILE = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_bfcl.yaml"
LAB_RECIPE_FILE = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_lab.yaml"
OVERRIDES = (
    "checkpoint.every_n_steps=3",
    "evaluation.every_n_steps=null",
    "evaluation.before=false",
    "evaluation.after=false",
)


def no_actor(*_: object) -> NoReturn:
    pytest.fail("something of the run was built before its config was checked")


class TestResumeUnderTheSameConfig:
    def test_an_edited_config_is_refused(self, tmp_path: Path) -> None:
        run = write_run(tmp_path)
        resolved = run / "config.resolved.yaml"
        resolved.write_text(resolved.read_text().replace("seed: 3", "seed: 4"))
        with pytest.raises(ConfigError, match="the file was edited"):
            launch.resume(run, progress=SilentProgress(), make_actor=no_actor)

    def test_a_commit_of_another_config_is_refused(self, tmp_path: Path) -> None:
        run = write_run(tmp_path)
        marker = run / "checkpoints" / "step-000003" / "checkpoint.json"
        commit = CheckpointManifest.model_validate_json(marker.read_bytes())
        foreign = commit.state.model_copy(update={"config_digest": "0" * 64})
        resealed = CheckpointManifest(
            **(dict(commit) | {"state": foreign, "sha256": ""})  # a sound commit, of another run
        )
        marker.write_bytes(resealed.to_bytes())
        before = (run / "metrics.jsonl").read_bytes()
        with pytest.raises(ResumeError, match="belongs to config 000000000000"):
            launch.resume(run, progress=SilentProgress(), make_actor=no_actor)
        assert (run / "metrics.jsonl").read_bytes() == before


ONE_PER_SECTION = (
    "name=other",
    "seed=1",
    "torch_threads=2",
    "objective=opd",
    "environment.max_observation_chars=81",
    'tasks.eval=["multi_turn_base_11"]',
    "student.warmup.num_steps=13",
    "teacher.max_drop_fraction=0.4",
    "curriculum.max_tail_calls=1",
    "rollout.max_new_tokens=25",
    "grpo.max_refills=9",
    "opd.coef=0.2",
    "loss.clip_low=0.1",
    "optim.lr=1e-5",
    "loop.num_steps=4",
    "evaluation.temperature=0.5",
    "checkpoint.keep=9",
    "deadlines.take_s=9000",
    "runtime=single_actor",
    "cluster.max_restarts=9",
    "publish.transport=disk",
    "tracking=[{kind: tensorboard}]",
)


LAB_SECTIONS = ("distill.top_k=9", "selection.ratio=0.6", "memory.strategy=resident")
STORED = ("objective=offline_kd", "demonstrations={}", "curriculum.schedule=on_success")


def test_the_digest_sees_every_section() -> None:
    """What a run is resumed under is all of its config."""
    changes = [*ONE_PER_SECTION, *LAB_SECTIONS, "demonstrations.noisy_fraction=0.3"]
    sections = {override.partition("=")[0].partition(".")[0] for override in changes}
    assert sections == set(RunConfig.model_fields)
    plain = {load_config(RECIPE_FILE, [override]).digest for override in ONE_PER_SECTION}
    lab = {load_config(LAB_RECIPE_FILE, [override]).digest for override in LAB_SECTIONS}
    stored = {
        load_config(LAB_RECIPE_FILE, [*STORED, *more]).digest
        for more in ([], ["demonstrations.noisy_fraction=0.3"])
    }
    untouched = {load_config(path).digest for path in (RECIPE_FILE, LAB_RECIPE_FILE)}
    assert len(plain | lab | stored | untouched) == len(changes) + 3


class Bomb:
    """Unpickling it leaves a trace."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.fspath(self.trace),)


class TestNoCodeInALoadPath:
    @pytest.fixture
    def bomb(self, tmp_path: Path) -> bytes:
        """Sure to go off in an unpickler."""
        trace = tmp_path / "trace"
        data = pickle.dumps(Bomb(trace))
        pickle.loads(data)
        trace.rmdir()
        return data

    @pytest.fixture(autouse=True)
    def _nothing_went_off(self, tmp_path: Path) -> Any:
        yield
        assert not (tmp_path / "trace").exists()

    def test_no_file_of_a_student_is_unpickled(self, tmp_path: Path, bomb: bytes) -> None:
        folder = tmp_path / "student"
        student = tiny_backend()
        student.save(folder)
        for path in sorted(folder.iterdir()):
            good = path.read_bytes()
            path.write_bytes(bomb)
            with pytest.raises(CheckpointError):
                student.load(folder, 0)
            path.write_bytes(good)
        student.load(folder, 0)
        load_toy_folder(folder)

    def test_neither_journal_nor_manifest_nor_vocabulary_is_unpickled(
        self, tmp_path: Path, bomb: bytes
    ) -> None:
        (tmp_path / "journal").mkdir()
        (tmp_path / "journal" / "step-000000.json").write_bytes(bomb)
        with pytest.raises(ChecksumError):
            Journal(tmp_path / "journal", "c" * 64).read(0, 0)
        (tmp_path / "step-000001").mkdir()
        (tmp_path / "step-000001" / "checkpoint.json").write_bytes(bomb)
        with pytest.raises(CheckpointError):
            checkpoint.verify(tmp_path / "step-000001")
        (tmp_path / "vocabulary.json").write_bytes(bomb)
        with pytest.raises(ChecksumError):
            SubVocabulary.load(tmp_path / "vocabulary.json", ByteTokenizer())


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("environment: !!python/object/apply:os.mkdir [TRACE]", "found tag"),
        ("environment: !!python/name:os.system x", "found tag"),
        ("environment: {kind: os.mkdir}", "environment.kind: found 'os.mkdir', expected 'bfcl'"),
        ("environment: {kind: rollout_server.bfcl.environment.BfclEnvironment}", "expected 'bfcl'"),
        ("environment: {kind: bfcl, _target_: os.mkdir}", "environment._target_: unknown key"),
        ("environment: {kind: bfcl, class_path: os.mkdir}", "environment.class_path: unknown key"),
        ("loss: {kind: miniverl_dist.objective.policy_loss.policy_loss}", "loss.kind: found"),
        ("runtime: actors.single.SingleActor", "expected 'inprocess'"),
    ],
)
def test_a_recipe_names_no_class(tmp_path: Path, line: str, problem: str) -> None:
    recipe, trace = tmp_path / "recipe.yaml", tmp_path / "trace"
    recipe.write_text(RECIPE + line.replace("TRACE", str(trace)) + "\n")
    with pytest.raises(ConfigError) as caught:
        load_config(recipe)
    assert str(caught.value).startswith(f"{recipe}:8: ")
    assert problem in str(caught.value)
    assert not trace.exists()


def loaded() -> LoadedConfig:
    """Three steps of two groups, with a teacher: advantages are not 0, and weights move."""
    return load_config(RECIPE_FILE, OVERRIDES)


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


def weights(run: Path, step: int) -> dict[str, str]:
    """SHA-256 of what a commit holds beside its manifest."""
    folder = run / "checkpoints" / f"step-{step:06d}"
    files = [path for path in folder.iterdir() if path.name != "checkpoint.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


IDENTITY = {"HOSTNAME": "host-5d1c9e", "USER": "user-5d1c9e", "LOGNAME": "user-5d1c9e"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run that nothing disturbs, on a machine whose names are unlike any other text."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in IDENTITY.items():
            patch.setenv(name, value)
        cache = os.environ.get("XDG_CACHE_HOME", str(Path.home() / ".cache"))
        patch.setenv("XDG_CACHE_HOME", cache)  # where tokenizers are
        patch.setenv("HOME", str(folder / "home-5d1c9e"))
        for module, function in ((socket, "gethostname"), (socket, "getfqdn"), (platform, "node")):
            patch.setattr(module, function, lambda *_: IDENTITY["HOSTNAME"])
        launch.train(loaded(), run_dir=folder / "run", progress=SilentProgress())
        yield folder / "run"


class TestWholeRun:
    pytestmark = needs_bfcl

    def test_what_it_exports_names_nobody(self, whole: Path) -> None:
        private = [*IDENTITY.values(), "home-5d1c9e", str(whole.parent), str(Path.cwd())]
        names = {path.name for path in whole.iterdir() if path.is_file()}
        assert {"manifest.json", "environment.json", "report.html", "summary.md"} <= names
        for path in sorted(whole.rglob("*")):
            if path.is_file():
                text = path.read_bytes().decode("utf-8", "replace")
                assert [name for name in private if name in text] == [], path.name

    def test_a_signal_ends_it_in_order_and_it_goes_on_to_the_same_bytes(
        self, whole: Path, tmp_path: Path
    ) -> None:
        """SIGTERM in the middle of step 2: that step is abandoned, step 1 is committed."""
        run = tmp_path / "run"
        summary = launch.train(
            loaded(), run_dir=run, progress=SilentProgress(), make_actor=Interrupted
        )
        assert (summary.step, summary.is_finished) == (1, False)
        assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"
        assert events(run)[-1] == "stopped"
        assert checkpoint.verify(run / "checkpoints" / "step-000001").state.step == 1

        summary = launch.resume(run, progress=SilentProgress())
        assert (summary.step, summary.is_finished) == (3, True)
        assert weights(run, 3) == weights(whole, 3)
        assert weights(run, 3) != weights(run, 1)
        assert "replayed_step" not in events(run)


class Interrupted(SingleActor):
    """Sends its own process SIGTERM while the groups of step 2 are being played."""

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Parts]:
        async with super().open(**options) as parts:
            inner = parts.ports.rollouts

            class Signalling:
                async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
                    if assignment.ticket == 2:
                        os.kill(os.getpid(), signal.SIGTERM)
                        await asyncio.Event().wait()  # until the stop cancels it
                    return await inner.rollout(assignment, member)

            yield dataclasses.replace(
                parts, ports=dataclasses.replace(parts.ports, rollouts=Signalling())
            )
