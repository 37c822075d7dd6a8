"""SIGKILL in the middle of an accumulated step; resuming ends with the very same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.faults.kill_run import ACCUMULATING_POINTS
from tests.faults.test_kill_and_resume import CONFIG, FINAL, events, final_files, kill_run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.bfcl,
    pytest.mark.tokenizers,
    pytest.mark.timeout(600),
]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny recipe, accumulating; no evaluation, which these points do not touch."""
    changes = {
        "loop": {"num_steps": 3, "num_groups": 2, "group_size": 3, "accumulate": True},
        "evaluation": {"before": False, "after": False, "baselines": []},
    }
    path = tmp_path_factory.mktemp("recipe") / "accumulating.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(CONFIG.read_text()) | changes))
    return path


@pytest.fixture(scope="module")
def undisturbed(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    result = kill_run("train", str(recipe), str(run))
    assert result.returncode == 0, result.stderr
    return run


@pytest.mark.parametrize("point", ACCUMULATING_POINTS)
def test_killed_and_resumed_run_ends_with_the_same_bytes(
    point: str, recipe: Path, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    killed = kill_run("train", str(recipe), str(run), point)
    assert killed.returncode == -9, killed.stderr
    assert not (run / FINAL / "checkpoint.json").exists()
    resumed = kill_run("resume", str(run))
    assert resumed.returncode == 0, resumed.stderr
    assert final_files(run) == final_files(undisturbed)
    assert len(final_files(run)) >= 3
    # A step whose optimizer step was not reached is sampled again, the others are replayed.
    assert events(run).count("replayed_step") == {"accumulate": 1, "accumulated": 2}[point]
