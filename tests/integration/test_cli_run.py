"""The commands on a real, tiny run: real tasks, real tokenizer, a toy student, one step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cli import call

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers]

RECIPE = """\
name: tiny
objective: grpo
environment: {kind: bfcl, prompt: compact, max_observation_chars: 80}
tasks: {kind: ids, train: [multi_turn_base_1], eval: [multi_turn_base_1]}
student:
  model: {kind: toy, num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64, batch_slots: 4}
rollout: {max_new_tokens: 8, max_context_tokens: 256, episode_deadline_s: null, num_workers: 1}
loop: {num_steps: 1, num_groups: 1, group_size: 2}
evaluation: {before: false, after: true, episodes_per_task: 1}
checkpoint: {every_n_steps: 1}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.yaml").write_text(RECIPE)
    lines = call(
        "train", folder / "tiny.yaml", "--run-dir", folder / "run", "-o", "seed=3", "--json"
    ).splitlines()
    records = [json.loads(line) for line in lines]
    assert [r["metrics"]["step"] for r in records if r.get("progress") == "step"] == [1]
    assert records[-1]["result"] == {
        "run_dir": str(folder / "run"),
        "step": 1,
        "policy_version": 1,
        "is_finished": True,
    }
    return folder / "run"


def test_a_run_leaves_everything_that_a_reader_needs(run: Path) -> None:
    assert "1 step" in call("validate", run)
    assert "seed: 3" in (run / "config.resolved.yaml").read_text()
    assert (run / "config.submitted.yaml").read_text() == RECIPE
    assert "softmax is restricted to" in (run / "report.html").read_text()
    assert "finished, 1 steps" in call("inspect", run)


def test_evaluating_a_run_takes_its_newest_checkpoint_and_adds_rows(run: Path) -> None:
    found = json.loads(
        call("eval", run, "--policy", "student", "--policy", "null", "--json").splitlines()[-1]
    )["result"]
    rows = [(row["policy"], row["tag"], row["policy_version"]) for row in found["rows"]]
    assert rows[-1] == ("student", "step-000001", 1)
    # It has no weights that could have changed since the run began.
    assert [row for row in rows if row[0] == "null"] == [("null", "before", None)]
    assert json.loads((run / "eval.json").read_text()) == found
    assert "| student | step-000001 |" in (run / "summary.md").read_text()


def test_evaluating_a_recipe_makes_a_folder_of_its_own(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    roomy = ("eval", "tiny.yaml", "-o", "rollout.max_context_tokens=512")
    table = call(*roomy, "--policy", "oracle", "--tail-calls", "2")
    # How it was asked stands before what was found, which a terminal shows last.
    rows = [line.split() for line in table.splitlines() if line.startswith("oracle")]
    asked = next(index for index, row in enumerate(rows) if row[2] == "-")
    found = next(index for index, row in enumerate(rows) if row[2] == "2" and row[5] == "1.000")
    assert asked < found
    assert "written to runs/tiny-eval\n" in table
    # The same tasks and settings go on in the same folder, others do not.
    both = call(*roomy, "--policy", "null")
    assert "written to runs/tiny-eval\n" in both
    assert {line.split()[0] for line in both.splitlines() if line} >= {"oracle", "null"}
    assert "runs/tiny-eval-2" in call(*roomy, "-o", "seed=9", "--policy", "null")


def test_resuming_a_finished_run_does_nothing_again(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    assert "finished after step 1" in call("resume", run)
    assert (run / "metrics.jsonl").read_bytes() == before
