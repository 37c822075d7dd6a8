"""A new run from another one's weights, and from nothing else of it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from actors import launch
from actors.warm_start import WARM_START_FOLDER
from miniverl_dist.backends.weights_io import read_tensors
from miniverl_dist.config.load import load_config
from miniverl_dist.errors import (
    CheckpointError,
    ChecksumError,
    ConfigError,
    MiniverlError,
    TokenizerMismatchError,
)
from miniverl_dist.observability.progress import JsonProgress
from miniverl_dist.training import checkpoint as commits
from miniverl_dist.training.recorder import COMMITTED_FILES

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers]

RECIPE = """\
name: tiny
objective: grpo_opd
environment: {kind: bfcl, prompt: compact, max_observation_chars: 80}
tasks: {kind: ids, train: [multi_turn_base_1], eval: [multi_turn_base_1]}
student:
  model: {kind: toy, num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64, batch_slots: 4}
  warmup: {num_steps: 2, batch_size: 2, traces_per_task: 2}
teacher:
  model: {kind: toy, num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64, batch_slots: 4}
  fit: {num_steps: 2, batch_size: 2, traces_per_task: 2}
curriculum: {schedule: fixed, max_tail_calls: 2}
rollout: {max_new_tokens: 8, max_context_tokens: 256, episode_deadline_s: null, num_workers: 1}
opd: {coef: 0.3}
loop: {num_steps: 1, num_groups: 1, group_size: 2}
evaluation: {before: false, after: false, baselines: []}
checkpoint: {every_n_steps: 1, keep: 5}
"""


def train(folder: Path, name: str, *overrides: str) -> Path:
    recipe = folder / "tiny.yaml"
    recipe.write_text(RECIPE)
    launch.train(
        load_config(recipe, overrides),
        run_dir=folder / name,
        progress=JsonProgress(io.StringIO()),
    )
    return folder / name


def from_(path: Path, *more: str) -> tuple[str, ...]:
    return (f"student.warm_start={json.dumps(str(path))}", *more)


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


def first_and_last(run: Path) -> tuple[Path, Path]:
    return run / "checkpoints" / "step-000000", run / "checkpoints" / "step-000001"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("warm-start")


@pytest.fixture(scope="module")
def source(folder: Path) -> Path:
    return train(folder, "source")


@pytest.fixture(scope="module")
def warm(folder: Path, source: Path) -> Path:
    fitted = f"teacher.fitted={json.dumps(str(source))}"
    return train(folder, "warm", *from_(source, fitted, "seed=7"))


def test_the_weights_are_the_sources_and_all_else_is_new(source: Path, warm: Path) -> None:
    start, made = first_and_last(warm)[0], first_and_last(source)[1]
    assert (start / "model.safetensors").read_bytes() == (made / "model.safetensors").read_bytes()
    assert (warm / "student-vocabulary.json").read_bytes() == (
        source / "student-vocabulary.json"
    ).read_bytes()
    moments = read_tensors(start / "optimizer.safetensors")
    assert not any(np.any(array) for array in moments.values())
    assert any(np.any(a) for a in read_tensors(made / "optimizer.safetensors").values())
    fresh, used = (commits.verify(path).state for path in (start, made))
    assert (fresh.policy_version, fresh.step, fresh.next_ticket, fresh.num_publishes) == (
        0,
        0,
        0,
        1,
    )
    assert used.policy_version > 0
    assert fresh.curriculum != used.curriculum
    assert "warmup_step" in events(source)
    assert "warmup_step" not in events(warm)


def test_the_manifest_says_whose_weights_they_are_but_not_where_they_lie(
    source: Path, warm: Path
) -> None:
    made = commits.verify(first_and_last(source)[1])
    text = (warm / "manifest.json").read_text()
    manifest = json.loads(text)
    assert manifest["warmup"] is None
    assert manifest["warm_start"]["sha256"] == made.sha256
    assert manifest["warm_start"]["policy_version"] == made.state.policy_version
    assert str(source) not in text
    assert json.loads((source / "manifest.json").read_text())["warm_start"] is None


def test_a_fitted_teacher_is_taken_over_as_it_is(source: Path, warm: Path) -> None:
    assert "teacher_fitted" in events(source)
    assert "teacher_fitted" not in events(warm)
    for name in ("teacher/model.safetensors", "teacher-vocabulary.json", "teacher.json"):
        assert (warm / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize(
    "change",
    ["teacher.fit.num_steps=3", "environment.max_observation_chars=70", "teacher.rendering=raw"],
)
def test_a_teacher_that_was_fitted_otherwise_is_refused(
    folder: Path, source: Path, tmp_path: Path, change: str
) -> None:
    named = (
        change.partition("=")[0].removesuffix(".num_steps").removesuffix(".max_observation_chars")
    )
    with pytest.raises(ConfigError, match=f"another {named};"):
        train(tmp_path, "run", f"teacher.fitted={json.dumps(str(source))}", change)
    assert not (tmp_path / "run").exists()


def test_a_commit_and_a_folder_of_weights_alone_will_do(source: Path, tmp_path: Path) -> None:
    commit = first_and_last(source)[0]
    bare = tmp_path / "student"
    bare.mkdir()
    for name in ("model.json", "model.safetensors", "vocabulary.json"):
        shutil.copy(commit / name, bare / name)
    cheap = ("objective=grpo", "opd=null", "teacher=null")
    weights = (commit / "model.safetensors").read_bytes()
    for name, start in (("a", commit), ("b", bare)):
        run = train(tmp_path, name, *from_(start, *cheap))
        assert (first_and_last(run)[0] / "model.safetensors").read_bytes() == weights


def flip_optimizer(commit: Path) -> None:
    path = commit / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def empty(commit: Path) -> None:
    shutil.rmtree(commit)
    commit.mkdir()


def claim_other_tokenizer(commit: Path) -> None:
    (commit / "checkpoint.json").unlink()
    described = json.loads((commit / "model.json").read_text())
    described["tokenizer"]["fingerprint"] = "0" * 64
    (commit / "model.json").write_text(json.dumps(described))


@pytest.mark.parametrize(
    ("damage", "override", "error", "message"),
    [
        (flip_optimizer, "seed=0", ChecksumError, "optimizer.safetensors"),
        (
            lambda commit: (commit / "optimizer.safetensors").unlink(),
            "seed=0",
            CheckpointError,
            "missing files .*optimizer",
        ),
        (lambda _: None, "student.model.hidden_size=64", CheckpointError, "hidden_size 32"),
        (claim_other_tokenizer, "seed=0", TokenizerMismatchError, "another tokenizer"),
        (empty, "seed=0", ConfigError, "no run"),
    ],
)
def test_what_cannot_be_started_from_is_refused_before_a_run_is_made(
    source: Path,
    tmp_path: Path,
    damage: Callable[[Path], object],
    override: str,
    error: type[MiniverlError],
    message: str,
) -> None:
    commit = tmp_path / "commit"
    shutil.copytree(first_and_last(source)[1], commit)
    damage(commit)
    with pytest.raises(error, match=message):
        train(tmp_path, "run", *from_(commit, override))
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_commit_has_nothing_to_start_from(source: Path, tmp_path: Path) -> None:
    shutil.copytree(source, tmp_path / "empty")
    shutil.rmtree(tmp_path / "empty" / "checkpoints")
    with pytest.raises(ConfigError, match="no checkpoint yet"):
        train(tmp_path, "run", *from_(tmp_path / "empty"))


def test_the_run_can_be_resumed_when_its_source_is_gone_and_not_when_its_copy_is_damaged(
    source: Path, tmp_path: Path
) -> None:
    shutil.copytree(source, tmp_path / "source")
    cheap = ("objective=grpo", "opd=null", "teacher=null")
    run = train(tmp_path, "run", *from_(tmp_path / "source", *cheap))
    shutil.rmtree(tmp_path / "source")
    before = (first_and_last(run)[0] / "model.safetensors").read_bytes()
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "journal")
    for name in COMMITTED_FILES:
        (run / name).unlink(missing_ok=True)
    launch.resume(run, progress=JsonProgress(io.StringIO()))  # begins anew, from its own copy
    assert (first_and_last(run)[0] / "model.safetensors").read_bytes() == before
    flip = run / WARM_START_FOLDER / "model.safetensors"
    data = bytearray(flip.read_bytes())
    data[-1] ^= 1
    flip.write_bytes(data)
    with pytest.raises(ChecksumError, match=r"model\.safetensors"):
        launch.resume(run, progress=JsonProgress(io.StringIO()))
