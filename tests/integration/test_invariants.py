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
from miniverl_dist.errors import CheckpointError, ChecksumError, ConfigError
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

TINY = """\
name: tiny
objective: grpo
environment: {kind: bfcl, prompt: compact, max_observation_chars: 80}
tasks: {kind: ids, train: [multi_turn_base_1], eval: [multi_turn_base_1]}
student:
  model: {kind: toy, num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64, batch_slots: 4}
rollout: {max_new_tokens: 8, max_context_tokens: 256, episode_deadline_s: null, num_workers: 1}
loop: {num_steps: 3, num_groups: 1, group_size: 2}
evaluation: {before: false, after: false, baselines: ["null"]}
checkpoint: {every_n_steps: 3}
"""


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
        marker.write_text(resealed.model_dump_json())
        before = (run / "metrics.jsonl").read_bytes()
        with pytest.raises(CheckpointError, match="belongs to config 000000000000"):
            launch.resume(run, progress=SilentProgress(), make_actor=no_actor)
        assert (run / "metrics.jsonl").read_bytes() == before


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
            Journal(tmp_path / "journal").read(0)
        (tmp_path / "step-000001").mkdir()
        (tmp_path / "step-000001" / "checkpoint.json").write_bytes(bomb)
        with pytest.raises(CheckpointError):
            checkpoint.verify(tmp_path / "step-000001")
        (tmp_path / "vocabulary.json").write_bytes(bomb)
        with pytest.raises(ChecksumError):
            SubVocabulary.load(tmp_path / "vocabulary.json", ByteTokenizer())


@pytest.mark.parametrize(
    "line",
    [
        "environment: !!python/object/apply:os.mkdir [TRACE]",
        "environment: !!python/name:os.system x",
        "environment: {kind: os.mkdir}",
        "environment: {kind: rollout_server.bfcl.environment.BfclEnvironment}",
        "environment: {kind: bfcl, _target_: os.mkdir}",
        "environment: {kind: bfcl, class_path: os.mkdir}",
        "loss: {kind: miniverl_dist.objective.policy_loss.policy_loss}",
        "runtime: actors.single.SingleActor",
    ],
)
def test_a_recipe_names_no_class(tmp_path: Path, line: str) -> None:
    recipe, trace = tmp_path / "recipe.yaml", tmp_path / "trace"
    recipe.write_text(RECIPE + line.replace("TRACE", str(trace)) + "\n")
    with pytest.raises(ConfigError, match=rf"{recipe}:8: "):
        load_config(recipe)
    assert not trace.exists()


def loaded(folder: Path) -> LoadedConfig:
    (folder / "tiny.yaml").write_text(TINY)
    return load_config(folder / "tiny.yaml")


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
        launch.train(loaded(folder), run_dir=folder / "run", progress=SilentProgress())
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
            loaded(tmp_path), run_dir=run, progress=SilentProgress(), make_actor=Interrupted
        )
        assert (summary.step, summary.is_finished) == (1, False)
        assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"
        assert events(run)[-1] == "stopped"
        assert checkpoint.verify(run / "checkpoints" / "step-000001").state.step == 1
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "our handler is gone"

        summary = launch.resume(run, progress=SilentProgress())
        assert (summary.step, summary.is_finished) == (3, True)
        assert weights(run, 3) == weights(whole, 3)
        assert len(weights(run, 3)) >= 4
        assert "replayed_step" not in events(run)


class Interrupted(SingleActor):
    """Sends its own process SIGTERM while the second group is being played."""

    @asynccontextmanager
    async def open(self, *, tail_calls: int | None = None) -> AsyncIterator[Parts]:
        async with super().open(tail_calls=tail_calls) as parts:
            inner = parts.ports.rollouts

            class Signalling:
                async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
                    if assignment.ticket == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                        await asyncio.Event().wait()  # until the stop cancels it
                    return await inner.rollout(assignment, member)

            yield dataclasses.replace(
                parts, ports=dataclasses.replace(parts.ports, rollouts=Signalling())
            )
