"""In one process, in one actor, on a cluster: the same run, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors import launch
from miniverl_dist.config.load import load_config
from miniverl_dist.observability.progress import SilentProgress
from tests.support.requirements import require_ray

require_ray()

RECIPE = Path(__file__).parents[1] / "fixtures" / "tiny_bfcl.yaml"
FRACTIONS = (
    "cluster.student.cpus_per_rank=0.5",
    "cluster.rollout.cpus_per_actor=0.5",
    "cluster.rollout.num_actors=2",
    "cluster.teacher.cpus_per_actor=0.5",
)
SAME_WHEREVER = ("reward_mean", "reverse_kl_mean", "loss", "grad_norm", "policy_lag_max")


def run(folder: Path, *overrides: str) -> Path:
    """Train the tiny recipe for its 3 steps."""
    summary = launch.train(
        load_config(RECIPE, overrides), run_dir=folder, progress=SilentProgress()
    )
    assert (summary.step, summary.policy_version, summary.is_finished) == (3, 6, True)
    return folder


def weights(folder: Path) -> dict[str, bytes]:
    """Weights, reference and optimizer of the last commit."""
    files = (folder / "checkpoints" / "step-000003").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


def numbers(folder: Path) -> list[dict[str, float]]:
    """What the steps measured, clocks left out."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in SAME_WHEREVER} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in this process."""
    return run(tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.usefixtures("shared_cluster")
def test_one_actor_gives_the_same_weights(alone: Path, tmp_path: Path) -> None:
    hosted = run(tmp_path / "run", "runtime=single_actor", "cluster.student.cpus_per_rank=0.5")
    assert weights(hosted) == weights(alone)
    assert numbers(hosted) == numbers(alone)


@pytest.mark.usefixtures("shared_cluster")
@pytest.mark.parametrize("transport", ["object_store", "broadcast", "disk"])
def test_a_cluster_gives_the_same_weights(transport: str, alone: Path, tmp_path: Path) -> None:
    pooled = run(tmp_path / "run", "runtime=cluster", f"publish.transport={transport}", *FRACTIONS)
    assert len(weights(alone)) == 3
    assert weights(pooled) == weights(alone)
    assert numbers(pooled) == numbers(alone)
