"""Every objective of the lab through the one trainer: real tokenizers, tiny toys, three steps."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from actors import launch
from actors.arms_results import measure
from actors.inspection import run_view
from actors.validation import validate_path
from miniverl_dist.config.load import load_config, load_run_config
from miniverl_dist.errors import (
    ChecksumError,
    ConfigError,
    ResumeError,
    TeacherDropFractionError,
    TokenizerMismatchError,
)
from miniverl_dist.lab.teacher_cache import TeacherCache
from miniverl_dist.observability.progress import SilentProgress

pytestmark = [pytest.mark.tokenizers]
RECIPE = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_lab.yaml"
STORED = [
    *("curriculum.schedule=on_success", "loss.kl_coef=0"),
    *("student.warmup=null", "demonstrations={traces_per_task: 2}"),
]
ALL_TOKENS = ["selection.kind=all_model_tokens", "selection.ratio=0.25"]
SFT = [
    "objective=sft",
    "teacher=null",
    "distill=null",
    "memory.strategy=auto",
    *ALL_TOKENS,
    *STORED,
]
KD = ["objective=offline_kd", "memory.strategy=auto", *STORED]
SAME = ["teacher.tokenizer=qwen3.6", "teacher.rendering=verbatim"]
EXACT = [*SAME, "distill.support=exact_full_vocab", "distill.top_k=32", "memory.strategy=auto"]


OF_ADVANTAGES = {
    *("policy_loss", "advantage_abs_mean", "group_advantage_abs_mean", "clip_low_fraction"),
    *("clip_high_fraction", "dual_clip_fraction", "mismatch_capped_fraction"),
}
POLICY_ONLY = OF_ADVANTAGES | {
    *("kl_loss", "ratio_max", "entropy_mean", "mismatch_mean_abs", "mismatch_max_ratio"),
    *("mismatch_kl", "reference_kl_mean", "reward_mean", "pass_rate", "num_zero_variance_groups"),
    *("policy_lag_mean", "policy_lag_max", "tail_calls_mean", "tail_calls_max"),
    "finished_tasks_fraction",
}


def train(folder: Path, *overrides: str) -> Path:
    run = folder / "run"
    launch.train(load_config(RECIPE, list(overrides)), run_dir=run, progress=SilentProgress())
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def metrics(run: Path) -> list[dict[str, Any]]:
    found = lines(run / "metrics.jsonl")
    assert [line["step"] for line in found] == [1, 2, 3]
    return found


def memory_choice(run: Path) -> str:
    [event] = [e for e in lines(run / "events.jsonl") if e["event"] == "memory_chosen"]
    assert event["reason"]
    return str(event["strategy"])


def test_sft_learns_stored_episodes_without_a_teacher(tmp_path: Path) -> None:
    run = train(tmp_path, *SFT, "optim.lr=5e-3", "loop.num_minibatches=1")
    told = metrics(run)
    assert told[-1]["divergence_mean"] < told[0]["divergence_mean"]
    assert told[0]["num_target_rows"] == told[0]["num_loss_tokens"]
    for line in told:
        assert not POLICY_ONLY & line.keys()  # nobody sampled: no such thing was measured
        assert line["loss"] == pytest.approx(line["divergence_mean"])
    summary = (run / "summary.md").read_text()
    assert "| loss |" in summary
    assert "| divergence_mean |" in summary
    assert "entropy" not in summary
    stored = lines(run / "trajectories.jsonl")
    assert all(not any(one["trajectory"]["loss_mask"]) for one in stored)
    assert json.loads((run / "manifest.json").read_text())["policy_label"].startswith("supervised")
    assert "3 steps" in validate_path(run)
    assert "sft" in run_view(run).text
    used = measure(run)
    assert (used.sampled_tokens, used.teacher_asked_rows, used.optimizer_steps) == (0, 0, 3)


def test_sft_goes_on_from_what_another_run_has_stored(tmp_path: Path) -> None:
    first = train(tmp_path / "a", *SFT)
    path = first / "trajectories.jsonl"
    again = [*SFT[:-1], f"demonstrations={{trajectories: {path}, only_passed: false}}"]
    metrics(train(tmp_path / "b", *again))
    ids = [f"calculator_easy_{number:03d}" for number in range(9)]
    more = ["environment.num_tasks=9", f"tasks.train={json.dumps(ids)}"]
    found = rf"no episode of 6 of 9 training tasks: {', '.join(ids[3:8])}, …; leave them out"
    with pytest.raises(ConfigError, match=found):
        train(tmp_path / "c", *again, *more)
    kept = [line for line in path.read_bytes().splitlines(keepends=True) if b"_002" not in line]
    path.write_bytes(b"".join(kept))
    found = "no episode of 1 of 3 training tasks: calculator_easy_002; leave them out"
    with pytest.raises(ConfigError, match=found):
        train(tmp_path / "c", *again)
    assert not (tmp_path / "c").exists()  # found before anything is made, fitted or written


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run over a file named by a relative path, whose last step was lost."""
    first = train(tmp_path / "a", *SFT)
    for name in ("trajectories.jsonl", "student-vocabulary.json"):
        (tmp_path / name).write_bytes((first / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    again = "demonstrations={trajectories: trajectories.jsonl, only_passed: false}"
    run = train(tmp_path / "b", *SFT[:-1], again)
    shutil.rmtree(run / "checkpoints" / "step-000003")
    return run


def test_a_run_goes_on_only_with_the_episodes_that_it_was_started_with(
    stopped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "trajectories.jsonl"
    whole, told = path.read_bytes(), (stopped / "metrics.jsonl").read_bytes()
    manifest = json.loads((stopped / "manifest.json").read_text())
    assert manifest["demonstrations"] == {
        "name": "trajectories.jsonl",
        "sha256": hashlib.sha256(whole).hexdigest(),
    }
    path.write_bytes(whole.splitlines(keepends=True)[0] + whole)
    found = rf"found {path} with SHA-256 .*; expected SHA-256 .*: restore the file, or start a new"
    with pytest.raises(ResumeError, match=found):
        launch.resume(stopped, progress=SilentProgress())
    path.unlink()
    with pytest.raises(ResumeError, match=rf"cannot read {path}: No such file"):
        launch.resume(stopped, progress=SilentProgress())
    assert (stopped / "metrics.jsonl").read_bytes() == told
    assert json.loads((stopped / "manifest.json").read_text())["status"] == "finished"

    path.write_bytes(whole)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    launch.resume(stopped, progress=SilentProgress())
    losses = [json.loads(line)["loss"] for line in told.splitlines()]
    assert [line["loss"] for line in metrics(stopped)] == losses


def test_what_only_reads_a_run_does_without_its_episodes(stopped: Path, tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").unlink()
    launch.evaluate(
        load_run_config(stopped),
        policies=("student",),
        checkpoint=stopped / "checkpoints" / "step-000002",
        tail_calls=None,
        output=tmp_path / "eval",
        progress=SilentProgress(),
    )
    assert (tmp_path / "eval" / "eval.json").is_file()
    manifest = json.loads((stopped / "manifest.json").read_text())
    for told in (manifest, {k: v for k, v in manifest.items() if k != "demonstrations"}):
        (stopped / "manifest.json").write_text(json.dumps(told))  # at last of an earlier version
        assert "3 steps" in validate_path(stopped)
        assert "sft" in run_view(stopped).text


def test_stored_episodes_outlive_another_declared_vocabulary(tmp_path: Path) -> None:
    """A toy's vocabulary hangs on its tasks and warm-up; what counts is that it has the ids."""
    first = train(tmp_path / "a", *SFT)
    stored = first / "trajectories.jsonl"
    again = [*SFT[:-2], "student.warmup.num_steps=1"]
    told = "demonstrations={{trajectories: {}, only_passed: false}}".format
    second = train(tmp_path / "b", *again, told(stored))
    ours, theirs = lines(second / "trajectories.jsonl"), lines(stored)
    fingerprints = [one[0]["trajectory"]["tokenizer_fingerprint"] for one in (ours, theirs)]
    assert fingerprints[0] != fingerprints[1]
    assert {tuple(one["trajectory"]["token_ids"]) for one in ours} == {
        tuple(one["trajectory"]["token_ids"]) for one in theirs
    }
    alone = tmp_path / "alone.jsonl"
    alone.write_bytes(stored.read_bytes())
    with pytest.raises(TokenizerMismatchError, match=r"leave the run's student-vocabulary\.json"):
        train(tmp_path / "c", *again, told(alone))
    assert not (tmp_path / "c").exists()


def test_offline_kd_asks_the_teacher_once_about_each_episode(tmp_path: Path) -> None:
    run = train(tmp_path, *KD)
    told = metrics(run)
    assert memory_choice(run) == "swap"
    assert not POLICY_ONLY & told[0].keys()
    assert told[0]["teacher_entropy_mean"] > 0
    cache = TeacherCache.read(run / "teacher-cache")
    assert cache.validate() == []
    names = {one["trajectory"]["trajectory_id"] for one in lines(run / "trajectories.jsonl")}
    assert len(names) == cache.stats().num_entries == 6  # two of each task, in three steps


def test_opd_with_a_teacher_that_comes_and_goes(tmp_path: Path) -> None:
    run = train(tmp_path)
    told = metrics(run)
    assert memory_choice(run) == "swap"
    assert all(0 < line["teacher_queried_position_ratio"] < 1 for line in told)
    for line in told:  # nothing has an advantage: no policy loss, and nothing that it would clip
        assert not OF_ADVANTAGES & line.keys()
        assert {"entropy_mean", "mismatch_mean_abs", "ratio_max"} <= line.keys()
    assert all(line["loss"] == pytest.approx(line["distill_loss"]) for line in told)
    for line in told:
        by_kind = line["loss_by_span_type"]
        assert by_kind
        assert min(by_kind.values()) <= line["divergence_mean"] <= max(by_kind.values())
    used, num_rows = measure(run), sum(line["num_target_rows"] for line in told)
    assert (used.teacher_scored_tokens, used.teacher_asked_rows) == (0, num_rows)
    assert TeacherCache.read(run / "teacher-cache").validate() == []


def test_a_damaged_teacher_is_made_again_as_its_error_says(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "evaluation={every_n_steps: null, after: false, before: false, warm: false, baselines: []}",
    )
    weights = run / "teacher" / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-1])
    found = r"teacher/model\.safetensors: .* remove teacher/ and teacher\.json to have `resume`"
    with pytest.raises(ChecksumError, match=found):
        validate_path(run)
    with pytest.raises(ChecksumError, match=found):
        launch.resume(run, progress=SilentProgress())
    shutil.rmtree(run / "teacher")
    (run / "teacher.json").unlink()
    launch.resume(run, progress=SilentProgress())
    assert weights.read_bytes() == whole
    assert "3 steps" in validate_path(run)
    assert not (run / "eval.json").exists()


def test_exact_divergence_of_a_privileged_teacher(tmp_path: Path) -> None:
    run = train(tmp_path, *EXACT, "teacher.mode=privileged_context")
    told = metrics(run)
    assert memory_choice(run) == "resident"
    assert not (run / "teacher-cache").exists()
    assert all(line["num_target_rows"] > 0 for line in told)
    # The oracle's words reach neither the student nor what is recorded of it.
    assert "Reference solution" not in (run / "trajectories.jsonl").read_text()


@pytest.mark.parametrize(
    "overrides",
    [("memory.strategy=resident",), ("memory.strategy=swap",), tuple(KD)],
    ids=["resident", "swap", "stored episodes"],
)
def test_texts_that_are_too_long_for_the_teacher_end_the_run_in_its_words(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    found = (
        r"6 of 6 trajectories have no teacher targets, .*; the teacher said: too_long: \d+ teacher "
        r"tokens, the limit is 10 \(teacher\.max_prefill_tokens\).* start a new run in which the "
        r"teacher may read more \(teacher\.max_prefill_tokens"
    )
    with pytest.raises(TeacherDropFractionError, match=found):
        train(tmp_path, "teacher.max_prefill_tokens=10", *overrides)
    refused = [e for e in lines(tmp_path / "run/events.jsonl") if e["event"] == "targets_refused"]
    assert {event["reason"] for event in refused} == {"too_long"}
    assert all("the limit is 10" in event["detail"] for event in refused)


def test_a_step_without_a_row_is_told(tmp_path: Path) -> None:
    """The ratio is so small that no token is kept."""
    run = train(tmp_path, "selection.kind=uniform_ratio", "selection.ratio=0.00001")
    told = metrics(run)
    assert [line["num_target_rows"] for line in told] == [0, 0, 0]
    assert all(line["loss"] == 0 and "divergence_mean" not in line for line in told)
    alarms = [e for e in lines(run / "events.jsonl") if e["event"] == "alarm"]
    assert [e["step"] for e in alarms if "compared with its target" in e["what"]] == [1, 2, 3]


def test_rewards_and_distributions_make_one_loss(tmp_path: Path) -> None:
    run = train(
        tmp_path,
        "objective=grpo_opd",
        "distill.divergence=jsd",
        "distill.coef=0.5",
        "distill.entropy_aware=null",
        "loss.kl_coef=0.02",
    )
    for line in metrics(run):
        parts = line["policy_loss"] + line["kl_loss"] + line["distill_loss"]
        assert line["loss"] == pytest.approx(parts, abs=1e-5)


def test_resident_and_swapped_teachers_train_the_same_student(tmp_path: Path) -> None:
    resident = metrics(train(tmp_path / "a", "memory.strategy=resident"))
    swapped = metrics(train(tmp_path / "b", "memory.strategy=swap"))
    for one, other in zip(resident, swapped, strict=True):
        assert one["teacher_tail_mass_mean"] == pytest.approx(
            other["teacher_tail_mass_mean"], rel=1e-4
        )
        assert one["divergence_mean"] == pytest.approx(other["divergence_mean"], rel=1e-4)
