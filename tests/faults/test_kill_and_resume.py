"""SIGKILL at five points of a small run; resuming ends with the very same weights."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.faults.kill_run import POINTS

pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers, pytest.mark.timeout(600)]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
FINAL = "checkpoints/step-000003"


def kill_run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.faults.kill_run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def final_files(run: Path) -> dict[str, str]:
    """SHA-256 of weights, reference and optimizer at the end (the manifest holds wall times)."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((run / FINAL).rglob("*"))
        if path.is_file() and path.name != "checkpoint.json"
    }


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    result = kill_run("train", str(CONFIG), str(run))
    assert result.returncode == 0, result.stderr
    return run


def events(run: Path) -> list[str]:
    return [json.loads(line)["event"] for line in (run / "events.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("point", POINTS)
def test_killed_and_resumed_run_ends_with_the_same_bytes(
    point: str, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    killed = kill_run("train", str(CONFIG), str(run), point)
    assert killed.returncode == -9, killed.stderr
    assert not (run / FINAL / "checkpoint.json").exists()
    resumed = kill_run("resume", str(run))
    assert resumed.returncode == 0, resumed.stderr
    assert final_files(run) == final_files(undisturbed)
    assert len(final_files(run)) >= 3
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert "resumed" in events(run)
    rows = json.loads((run / "eval.json").read_text())["rows"]
    assert len({(row["policy"], row["tag"]) for row in rows}) == len(rows) == 5


def test_batches_behind_the_commit_are_replayed_without_sampling(
    undisturbed: Path, tmp_path: Path
) -> None:
    """Killed in the update of step 2: its batch is in the journal and is not rolled out again."""
    run = tmp_path / "run"
    assert kill_run("train", str(CONFIG), str(run), "update").returncode == -9
    before = events(run).count("group_finished")
    assert kill_run("resume", str(run)).returncode == 0
    assert events(run).count("replayed_step") == 2
    assert events(run).count("group_finished") - before == 2  # those of step 3 alone
    assert final_files(run) == final_files(undisturbed)
