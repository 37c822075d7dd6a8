"""SIGTERM ends a run in order wherever it executes: committed, `stopped`, exit code 0."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.support.ray_head import environment
from tests.support.requirements import require_ray

require_ray()

ROOT = Path(__file__).parents[2]
RECIPE = "tests/fixtures/tiny_bfcl.yaml"
MANY_STEPS = ("loop.num_steps=400", "evaluation.every_n_steps=null", "checkpoint.every_n_steps=300")
CLUSTER = (
    "runtime=cluster",
    "cluster.num_cpus=4",
    "cluster.rollout.num_actors=2",
)
WITHIN_S = 200.0


def started(folder: Path, temp: str, overrides: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """A driver with a Ray of its own, started by it."""
    command = [sys.executable, "-m", "actors.launch", "train", RECIPE, "--run-dir", str(folder)]
    for override in (*MANY_STEPS, *overrides):
        command += ["-o", override]
    with (folder.parent / "driver.log").open("wb") as log:
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(RAY_TMPDIR=temp), stdout=log, stderr=log
        )


def wait_for_a_step(driver: subprocess.Popen[bytes], folder: Path) -> None:
    ends_at = time.monotonic() + WITHIN_S
    metrics = folder / "metrics.jsonl"
    while not metrics.exists() or not metrics.stat().st_size:
        assert driver.poll() is None, (folder.parent / "driver.log").read_text()[-2000:]
        assert time.monotonic() < ends_at, "no step in time"
        time.sleep(0.05)


@pytest.mark.parametrize(
    "overrides", [("runtime=single_actor",), CLUSTER], ids=["single_actor", "cluster"]
)
def test_a_term_signal_in_a_step_ends_in_a_checkpoint(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    temp = tempfile.mkdtemp(prefix="mvs-", dir="/tmp")
    driver = started(folder, temp, overrides)
    try:
        wait_for_a_step(driver, folder)
        driver.send_signal(signal.SIGTERM)
        assert driver.wait(WITHIN_S) == 0
    finally:
        driver.kill()
        driver.wait()
        shutil.rmtree(temp, ignore_errors=True)
    trained = len((folder / "metrics.jsonl").read_text().splitlines())
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "stopped"] == [trained]
    assert (folder / "checkpoints" / f"step-{trained:06d}" / "checkpoint.json").exists()
    assert json.loads((folder / "manifest.json").read_text())["status"] == "stopped"
