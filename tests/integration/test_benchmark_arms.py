"""A benchmark of arms in real processes: shared start, kept runs, failures that stay alone."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from actors.arms import Benchmark
from actors.cli import app
from miniverl_dist.config.arms import load_benchmark
from miniverl_dist.errors import ConfigError
from miniverl_dist.lab.arms import COLD_START, BenchmarkReport, PlannedRun, RunOutcome
from miniverl_dist.lab.arms_table import NO_CLAIM

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers, pytest.mark.slow]

RECIPE = """\
name: tiny
objective: grpo
environment: {kind: bfcl, prompt: compact, max_observation_chars: 80}
tasks: {kind: ids, train: [multi_turn_base_1], eval: [multi_turn_base_1]}
student:
  model: {kind: toy, num_layers: 1, hidden_size: 32, num_heads: 2, ffn_size: 64, batch_slots: 4}
  warmup: {num_steps: 2, batch_size: 2, traces_per_task: 2}
rollout: {max_new_tokens: 8, max_context_tokens: 256, episode_deadline_s: null, num_workers: 1}
loop: {num_steps: 1, num_groups: 1, group_size: 2}
evaluation: {before: false, episodes_per_task: 1, baselines: []}
checkpoint: {every_n_steps: 1, keep: 5}
"""
PLAN = """\
kind: benchmark
name: tiny-arms
base: tiny.yaml
seeds: [3]
reference: plain
max_processes: 2
cold_start: {checkpoint: step-000000, overrides: {evaluation: {after: false}}}
arms:
  plain: {}
  large-steps: {overrides: {optim: {lr: 1.0e-3}}}
  broken: {overrides: {deadlines: {generate_s: 1.0e-4, take_s: 1.0e-3}}}
"""


def write(folder: Path, plan: str = PLAN) -> Path:
    (folder / "tiny.yaml").write_text(RECIPE)
    (folder / "plan.yaml").write_text(plan)
    return folder / "plan.yaml"


def outcomes(output: Path) -> dict[str, RunOutcome]:
    report = BenchmarkReport.model_validate_json((output / "benchmark.json").read_bytes())
    return {outcome.run.name: outcome for outcome in report.outcomes}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arms")
    result = CliRunner().invoke(
        app, ["benchmark", str(write(folder)), "--output", str(folder / "out")]
    )
    assert result.exit_code == 1, result.output  # an arm has failed
    return folder


def test_all_arms_of_a_seed_start_from_the_same_weights_and_take_no_warm_up(folder: Path) -> None:
    runs = folder / "out" / "runs"
    start = runs / "cold-start-seed-3" / "checkpoints" / "step-000000" / "model.safetensors"
    for arm in ("plain", "large-steps"):
        found = runs / f"{arm}-seed-3" / "checkpoints" / "step-000000" / "model.safetensors"
        assert found.read_bytes() == start.read_bytes()
        assert "warmup_step" not in (runs / f"{arm}-seed-3" / "events.jsonl").read_text()
    assert "warmup_step" in (runs / "cold-start-seed-3" / "events.jsonl").read_text()


def test_an_arm_that_fails_leaves_the_others_their_result(folder: Path) -> None:
    found = outcomes(folder / "out")
    statuses = {name.removesuffix("-seed-3"): outcome.status for name, outcome in found.items()}
    assert statuses == {
        COLD_START: "finished",
        "plain": "finished",
        "large-steps": "finished",
        "broken": "failed",
    }
    assert "exit status 2" in found["broken-seed-3"].reason
    assert all(outcome.cpu_seconds > 0.5 for outcome in found.values())


def test_what_was_used_is_counted_from_the_records(folder: Path) -> None:
    measured = outcomes(folder / "out")["plain-seed-3"].measured
    assert measured is not None
    run = folder / "out" / "runs" / "plain-seed-3"
    lines = [json.loads(line) for line in (run / "trajectories.jsonl").read_bytes().splitlines()]
    sampled = sum(
        span["end"] - span["start"]
        for line in lines
        for span in line["trajectory"]["spans"]
        if span["sampled"]
    )
    assert measured.sampled_episodes == len(lines) == 2
    assert measured.sampled_groups == measured.optimizer_steps == 1
    assert measured.sampled_tokens == sampled > 0
    assert (measured.teacher_scored_tokens, measured.teacher_asked_rows) == (0, 0)


def test_one_seed_claims_nothing(folder: Path) -> None:
    table = (folder / "out" / "benchmark.md").read_text()
    assert NO_CLAIM in table
    assert "| large-steps - plain | 1 |" in table


def test_a_second_start_keeps_what_has_finished_and_goes_on_with_the_rest(
    folder: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    shutil.copytree(folder / "out", output)
    runs, plain = output / "runs", output / "runs" / "plain-seed-3"
    kept = (runs / "large-steps-seed-3" / "eval.json").stat().st_mtime_ns
    weights = (plain / "checkpoints" / "step-000001" / "model.safetensors").read_bytes()
    # As a run that was killed between its first commit and its first step leaves it.
    shutil.rmtree(plain / "checkpoints" / "step-000001")
    manifest = json.loads((plain / "manifest.json").read_text()) | {"status": "running"}
    (plain / "manifest.json").write_text(json.dumps(manifest))
    told: list[str] = []
    plan = tmp_path / "plan.yaml"
    write(tmp_path, PLAN[: PLAN.index("  broken")])
    (output / "plan.json").unlink()
    Benchmark(load_benchmark(plan), output, told.append).run()
    assert [line.partition(":")[0] for line in told] == ["plain-seed-3"] * 2
    assert (runs / "large-steps-seed-3" / "eval.json").stat().st_mtime_ns == kept
    assert (plain / "checkpoints" / "step-000001" / "model.safetensors").read_bytes() == weights
    assert '"resumed"' in (plain / "events.jsonl").read_text()


def test_a_folder_belongs_to_one_plan(folder: Path) -> None:
    plan = write(folder, PLAN.replace("[3]", "[4]"))
    loaded = load_benchmark(plan)
    write(folder)
    with pytest.raises(ConfigError, match="belongs to plan"):
        Benchmark(loaded, folder / "out", lambda _: None).run()


def test_an_arm_whose_recipe_is_wrong_is_refused_before_anything_runs(tmp_path: Path) -> None:
    plan = write(tmp_path, PLAN.replace("lr: 1.0e-3", "lr: -1"))
    with pytest.raises(ConfigError, match="lr"):
        Benchmark(load_benchmark(plan), tmp_path / "out", lambda _: None)
    assert not (tmp_path / "out").exists()


def test_a_stop_ends_the_run_in_order_and_starts_no_other(tmp_path: Path) -> None:
    # So long that it cannot end by itself before it is told to.
    plan = write(
        tmp_path, PLAN.replace("{after: false}", "{after: false}, loop: {num_steps: 5000}")
    )
    command = [sys.executable, "-m", "actors.cli", "benchmark", str(plan)]
    process = subprocess.Popen(
        [*command, "--output", str(tmp_path / "out")],
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    assert process.stderr.readline() == "cold-start-seed-3: started\n"
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read().splitlines()
    assert process.wait(timeout=60) == 1
    assert not any("started" in line for line in rest)
    found = outcomes(tmp_path / "out")
    assert {o.status for name, o in found.items() if not name.startswith(COLD_START)} == {"not_run"}
    assert PlannedRun(arm=COLD_START, seed=3).name in found
