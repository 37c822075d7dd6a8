"""Runs whose teacher is the student's own folder, read a second time: the two are one model.

Its projection has more rows than its tokenizer has ids. No softmax may cover them, on either side.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import invoke
from tests.support.hf_run import qwen_folder, tokenizer_folder

RECIPE = """\
name: own_folder
objective: opd
environment: {kind: calculator, difficulty: easy, num_tasks: 2, seed: 0, prompt: compact}
tasks: {kind: ids, train: [calculator_easy_000], eval: [calculator_easy_000]}
student:
  tokenizer: TOKENIZER
  model: {kind: hf, path: BASE, device: cpu, max_context_tokens: 2000, max_microbatch_tokens: 4000}
teacher:
  tokenizer: TOKENIZER
  rendering: verbatim
  model: {kind: hf, path: TEACHER}
rollout: {max_new_tokens: 6, max_context_tokens: 1500, episode_deadline_s: null, num_workers: 1}
optim: {lr: 1.0e-2}
loop: {num_steps: 1, num_groups: 1, group_size: 2}
evaluation: {before: false, after: false, baselines: []}
"""
SAMPLED = "opd: {coef: 1.0}\n"
TOP_K = "distill: {divergence: reverse_kl, support: top_k_tail, top_k: 8}\n"
EXACT = "distill: {divergence: reverse_kl, support: exact_full_vocab}\n"
SWAPPED = TOP_K + "memory: {strategy: swap}\n"


def recipe(root: Path, term: str) -> Path:
    """Models with 512 rows against some 265 ids, a tokenizer, and the recipe."""
    tokenizer_folder(root / "tokenizer")
    for name in ("base", "teacher"):
        qwen_folder(root / name, 512, max_position_embeddings=2048)
    text = RECIPE
    for name in ("tokenizer", "base", "teacher"):
        text = text.replace(name.upper(), str(root / name))
    (root / "run.yaml").write_text(text + term)
    return root / "run.yaml"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("term", "name"),
    [
        (SAMPLED, "reverse_kl_mean"),
        (TOP_K, "distill_loss"),
        (SWAPPED, "distill_loss"),
        (EXACT, "distill_loss"),
    ],
    ids=["sampled", "top_k", "swapped", "exact"],
)
def test_the_first_step_finds_no_difference(term: str, name: str, tmp_path: Path) -> None:
    trained = invoke("train", recipe(tmp_path, term), "--run-dir", tmp_path / "run", "--json")
    assert trained.exit_code == 0, trained.stderr
    (first,) = lines(tmp_path / "run" / "metrics.jsonl")
    assert abs(first[name]) < 1e-5


def damaged(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


@pytest.mark.parametrize("name", ["base", "teacher"])
def test_a_damaged_folder_is_refused_before_a_run_directory_exists(
    name: str, tmp_path: Path
) -> None:
    run = recipe(tmp_path, SAMPLED)
    damaged(tmp_path / name)
    start = ("train", run, "--run-dir", tmp_path / "run")
    for command in (("plan", run), ("validate", run), start):
        found = invoke(*command)
        assert found.exit_code == 2
        assert f"{name}: model.safetensors is damaged: it has" in found.stderr
    assert not (tmp_path / "run").exists()


def test_another_teacher_is_refused_at_a_resume(tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained = invoke("train", recipe(tmp_path, SAMPLED), "--run-dir", run, "--json")
    assert trained.exit_code == 0, trained.stderr
    again = invoke("resume", run)
    assert again.exit_code == 0, again.stderr
    weights = tmp_path / "teacher" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x7f")
    changed = invoke("resume", run)
    assert changed.exit_code == 2
    assert "teacher.model.path" in changed.stderr
    assert "has changed since the run was started" in changed.stderr


def test_a_recipe_is_valid_where_its_models_are_not(tmp_path: Path) -> None:
    run = recipe(tmp_path, SAMPLED)
    assert invoke("validate", run).stdout.endswith("strictly on-policy, 2 model folders\n")
    for name in ("base", "teacher"):
        shutil.rmtree(tmp_path / name)
    assert invoke("validate", run).stdout.endswith("strictly on-policy\n")
