"""Runs whose teacher is the student's own backbone: bare, with more context, with an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.cli import app
from tests.support.cli import call
from tests.support.hf_run import qwen_folder, tokenizer_folder

RECIPE = """\
name: backbone
objective: opd
environment: {kind: calculator, difficulty: easy, num_tasks: 2, seed: 0, prompt: compact}
tasks: {kind: ids, train: [calculator_easy_000], eval: [calculator_easy_000]}
student:
  tokenizer: TOKENIZER
  model:
    kind: hf
    path: BASE
    device: cpu
    max_context_tokens: 2000
    max_microbatch_tokens: 4000
    gradient_checkpointing: true
    lora: {rank: 4, alpha: 8.0, target_modules: [q_proj, v_proj]}
teacher:
  tokenizer: TOKENIZER
  rendering: verbatim
  mode: MODE
  model: {kind: student_backbone, adapter: ADAPTER}
rollout: {max_new_tokens: 6, max_context_tokens: 1500, episode_deadline_s: null, num_workers: 1}
optim: {lr: 1.0e-2}
loop: {num_steps: 2, num_groups: 1, group_size: 2}
evaluation: {before: false, after: false, baselines: []}
checkpoint: {every_n_steps: 1}
"""
SAMPLED = "opd: {coef: 1.0}\n"
WHOLE = "distill: {divergence: reverse_kl, support: exact_full_vocab}\n"
NAMES = {SAMPLED: "reverse_kl_mean", WHOLE: "distill_loss"}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def trained(
    root: Path, term: str, *, mode: str = "standard", adapter: Path | None = None, name: str = "run"
) -> Path:
    tokenizer, base = root / "tokenizer", root / "base"
    if not base.exists():
        tokenizer_folder(tokenizer)
        qwen_folder(base, max_position_embeddings=2048)
    text = RECIPE.replace("TOKENIZER", str(tokenizer)).replace("BASE", str(base))
    text = text.replace("ADAPTER", "null" if adapter is None else str(adapter))
    (root / f"{name}.yaml").write_text(text.replace("MODE", mode) + term)
    call("train", root / f"{name}.yaml", "--run-dir", root / name, "--json")
    return root / name


@pytest.mark.parametrize("term", [SAMPLED, WHOLE], ids=["sampled", "whole"])
def test_the_first_step_finds_no_difference(term: str, tmp_path: Path) -> None:
    """A new adapter changes nothing, so that student and teacher are one."""
    run = trained(tmp_path, term)
    steps = lines(run / "metrics.jsonl")
    assert abs(steps[0][NAMES[term]]) < 1e-5
    roles = json.loads((run / "manifest.json").read_text())["roles"]
    found = {role: (entry["backbone"], entry["adapter"]) for role, entry in roles.items()}
    assert found == {"student": ("student base", "actor"), "teacher": ("student base", None)}


@pytest.mark.parametrize("term", [SAMPLED, WHOLE], ids=["sampled", "whole"])
def test_more_context_makes_the_difference(term: str, tmp_path: Path) -> None:
    run = trained(tmp_path, term, mode="privileged_context")
    first = lines(run / "metrics.jsonl")[0]
    assert abs(first[NAMES[term]]) > 1e-3
    assert first["grad_norm"] > 0
    if term == WHOLE:
        (event,) = [e for e in lines(run / "events.jsonl") if e["event"] == "memory_chosen"]
        assert event["strategy"] == "resident"
        assert "the student's own backbone" in event["reason"]


def test_a_trained_adapter_teaches_the_next_run(tmp_path: Path) -> None:
    first = trained(tmp_path, WHOLE, mode="privileged_context", name="first")
    call("export", first, "--output", tmp_path / "adapter", "--format", "adapter")
    run = trained(tmp_path, SAMPLED, adapter=tmp_path / "adapter", name="second")
    assert abs(lines(run / "metrics.jsonl")[0][NAMES[SAMPLED]]) > 1e-4
    roles = json.loads((run / "manifest.json").read_text())["roles"]
    assert (roles["teacher"]["backbone"], roles["teacher"]["adapter"]) == (
        "student base",
        "teacher",
    )
    assert str(tmp_path) not in (run / "manifest.json").read_text()
    call("resume", run)


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("student.model.lora=null", "the student trains its own"),
        ("teacher.tokenizer=deepseek-v4", "verbatim gives the teacher the student's own ids"),
        ("teacher.model.adapter=nowhere", "nowhere holds no adapter"),
        ("memory.strategy=swap", "nothing to swap"),
        ('evaluation.baselines=["teacher"]', "student_backbone teacher is asked for scores only"),
    ],
)
def test_contradictions_are_named(override: str, why: str, tmp_path: Path) -> None:
    tokenizer_folder(tmp_path / "tokenizer")
    qwen_folder(tmp_path / "base", max_position_embeddings=2048)
    text = RECIPE.replace("TOKENIZER", str(tmp_path / "tokenizer"))
    text = text.replace("BASE", str(tmp_path / "base")).replace("MODE", "standard")
    (tmp_path / "run.yaml").write_text(text.replace("ADAPTER", "null") + SAMPLED)
    arguments = ["train", str(tmp_path / "run.yaml"), "--run-dir", str(tmp_path / "run")]
    result = CliRunner().invoke(app, [*arguments, "-o", override])
    assert result.exit_code == 2, result.output
    assert why in result.stderr
    assert not (tmp_path / "run").exists()
