"""In one process, in one actor, on a cluster: the same run, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from actors import launch
from miniverl_dist.config.load import load_config
from miniverl_dist.observability.progress import SilentProgress
from tests.support.requirements import require_ray

require_ray()

FIXTURES = Path(__file__).parents[1] / "fixtures"
ONE_ACTOR = ("runtime=single_actor", "cluster.student.cpus_per_rank=0.5")
FRACTIONS = (
    "cluster.student.cpus_per_rank=0.5",
    "cluster.rollout.cpus_per_actor=0.5",
    "cluster.rollout.num_actors=2",
    "cluster.teacher.cpus_per_actor=0.5",
)
SAME_WHEREVER = ("reward_mean", "reverse_kl_mean", "loss", "grad_norm", "policy_lag_max")
SAME_OF_THE_LAB = ("loss", "grad_norm", "divergence_mean", "num_target_rows")


def run(folder: Path, *overrides: str, recipe: str = "tiny_bfcl.yaml") -> Path:
    """Train a tiny recipe for its 3 steps."""
    config = load_config(FIXTURES / recipe, overrides)
    summary = launch.train(config, run_dir=folder, progress=SilentProgress())
    assert (summary.step, summary.policy_version, summary.is_finished) == (3, 6, True)
    return folder


def weights(folder: Path) -> dict[str, bytes]:
    """Weights, reference and optimizer of the last commit."""
    files = (folder / "checkpoints" / "step-000003").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


def numbers(folder: Path, names: Sequence[str] = SAME_WHEREVER) -> list[dict[str, float]]:
    """What the steps measured, clocks left out."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{name: json.loads(line)[name] for name in names} for line in lines]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in this process."""
    return run(tmp_path_factory.mktemp("alone") / "run")


@pytest.mark.usefixtures("shared_cluster")
def test_one_actor_gives_the_same_weights(alone: Path, tmp_path: Path) -> None:
    hosted = run(tmp_path / "run", *ONE_ACTOR)
    assert weights(hosted) == weights(alone)
    assert numbers(hosted) == numbers(alone)


OFFLINE_KD = (
    *("objective=offline_kd", "demonstrations={}"),
    *("memory.strategy=auto", "curriculum.schedule=on_success"),
)


@pytest.mark.usefixtures("shared_cluster")
@pytest.mark.parametrize(
    "overrides",
    [(), OFFLINE_KD],
    ids=["opd", "offline_kd"],
)
def test_one_actor_distils_whole_distributions_as_one_process_does(
    overrides: tuple[str, ...], tmp_path: Path
) -> None:
    inside = run(tmp_path / "inside", *overrides, recipe="tiny_lab.yaml")
    hosted = run(tmp_path / "hosted", *overrides, *ONE_ACTOR, recipe="tiny_lab.yaml")
    assert len(weights(inside)) == 2
    assert weights(hosted) == weights(inside)
    assert numbers(hosted, SAME_OF_THE_LAB) == numbers(inside, SAME_OF_THE_LAB)


@pytest.mark.usefixtures("shared_cluster")
@pytest.mark.parametrize("transport", ["object_store", "broadcast", "disk"])
def test_a_cluster_gives_the_same_weights(transport: str, alone: Path, tmp_path: Path) -> None:
    pooled = run(tmp_path / "run", "runtime=cluster", f"publish.transport={transport}", *FRACTIONS)
    assert len(weights(alone)) == 3
    assert weights(pooled) == weights(alone)
    assert numbers(pooled) == numbers(alone)
