"""SIGKILL at twenty moments of a three-step run, wherever it is just then: resumed, the same bytes.

The moments are spread over the time that an undisturbed run takes, each at a random place within
its twentieth. A run that had ended before its moment is killed earlier.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.faults.test_kill_and_resume import final_files, kill_run

pytestmark = [pytest.mark.slow, pytest.mark.tokenizers, pytest.mark.timeout(1800)]
ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "tests" / "fixtures" / "tiny_lab.yaml"
NUM_MOMENTS = 20


def killed_after(seconds: float, run: Path) -> bool:
    """Start the run and kill it; False where it had ended by itself."""
    command = [sys.executable, "-m", "tests.faults.kill_run", "train", str(CONFIG), str(run)]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(seconds)
        return False
    process.kill()
    process.wait()
    return True


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, float]:
    run, started = tmp_path_factory.mktemp("undisturbed") / "run", time.monotonic()
    result = kill_run("train", str(CONFIG), str(run))
    assert result.returncode == 0, result.stderr
    return run, time.monotonic() - started


@pytest.mark.parametrize("moment", range(NUM_MOMENTS))
def test_the_same_bytes_wherever_it_was_killed(
    moment: int, undisturbed: tuple[Path, float], tmp_path: Path
) -> None:
    expected, duration_s = undisturbed
    share = (moment + random.Random(moment).random()) / NUM_MOMENTS
    run, attempt = tmp_path / "run-0", 0
    while not killed_after(share * duration_s, run):
        attempt += 1
        share *= 0.8
        run = tmp_path / f"run-{attempt}"
    resumed = kill_run("resume", str(run)) if (run / "manifest.json").exists() else None
    if resumed is None:  # killed before there was a run to go on with
        run = tmp_path / "anew"
        resumed = kill_run("train", str(CONFIG), str(run))
    assert resumed.returncode == 0, f"killed after {share:.2f} of the run: {resumed.stderr}"
    assert final_files(run) == final_files(expected)
    assert (run / "teacher-cache" / "index.json").exists()
