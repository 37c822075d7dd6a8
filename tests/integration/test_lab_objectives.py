"""Every objective of the lab through the one trainer: real tokenizers, tiny toys, three steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from actors import launch
from actors.inspection import run_view
from actors.validation import validate_path
from miniverl_dist.config.load import load_config
from miniverl_dist.errors import ConfigError
from miniverl_dist.lab.teacher_cache import TeacherCache
from miniverl_dist.observability.progress import SilentProgress

pytestmark = [pytest.mark.tokenizers]
RECIPE = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_lab.yaml"
STORED = ["loss.kl_coef=0", "student.warmup=null", "demonstrations={traces_per_task: 2}"]
SFT = ["objective=sft", "teacher=null", "distill=null", "selection.kind=all_model_tokens", *STORED]
KD = ["objective=offline_kd", "memory.strategy=auto", *STORED]
SAME = ["teacher.tokenizer=qwen3.6", "teacher.rendering=verbatim"]
EXACT = [*SAME, "distill.support=exact_full_vocab", "memory.strategy=auto"]


def train(folder: Path, *overrides: str) -> Path:
    run = folder / "run"
    launch.train(load_config(RECIPE, list(overrides)), run_dir=run, progress=SilentProgress())
    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


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
    assert told[0]["policy_loss"] == 0
    assert "reward_mean" not in told[0]
    stored = lines(run / "trajectories.jsonl")
    assert all(not any(one["trajectory"]["loss_mask"]) for one in stored)
    assert json.loads((run / "manifest.json").read_text())["policy_label"].startswith("supervised")
    assert "3 steps" in validate_path(run)
    assert "sft" in run_view(run).text


def test_sft_goes_on_from_what_another_run_has_stored(tmp_path: Path) -> None:
    first = train(tmp_path / "a", *SFT)
    path = first / "trajectories.jsonl"
    again = [
        *SFT,
        f"demonstrations.trajectories={path}",
        "demonstrations.only_passed=false",
    ]
    metrics(train(tmp_path / "b", *again))
    kept = [line for line in path.read_text().splitlines() if "easy_002" not in line]
    path.write_text("\n".join(kept))
    with pytest.raises(ConfigError, match="no episode of 1 of 3 training tasks"):
        train(tmp_path / "c", *again)


def test_offline_kd_asks_the_teacher_once_about_each_episode(tmp_path: Path) -> None:
    run = train(tmp_path, *KD)
    told = metrics(run)
    assert memory_choice(run) == "swap"
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
    assert all(line["policy_loss"] == 0 for line in told)  # no reward enters
    assert all(line["loss"] == pytest.approx(line["distill_loss"]) for line in told)
    for line in told:
        by_kind = line["loss_by_span_type"]
        assert by_kind
        assert min(by_kind.values()) <= line["divergence_mean"] <= max(by_kind.values())
    assert TeacherCache.read(run / "teacher-cache").validate() == []


def test_exact_divergence_of_a_privileged_teacher(tmp_path: Path) -> None:
    run = train(tmp_path, *EXACT, "teacher.mode=privileged_context")
    told = metrics(run)
    assert memory_choice(run) == "resident"
    assert not (run / "teacher-cache").exists()
    assert all(line["num_target_rows"] > 0 for line in told)
    # The oracle's words reach neither the student nor what is recorded of it.
    assert "Reference solution" not in (run / "trajectories.jsonl").read_text()


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
        assert one["divergence_mean"] == pytest.approx(other["divergence_mean"], rel=1e-4)
