"""A cluster run that loses a rank, a rollout actor or its driver still ends, with right counts."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors import launch
from actors.cluster import ClusterActor
from actors.single import Parts
from miniverl_dist.config.load import load_config
from miniverl_dist.observability.progress import SilentProgress
from tests.support.requirements import require_megatron, require_ray

require_ray()
require_megatron()
pytestmark = pytest.mark.usefixtures("shared_cluster")

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
TOY = (
    "runtime=cluster",
    "cluster.student.cpus_per_rank=0.5",
    "cluster.rollout.cpus_per_actor=0.5",
    "cluster.rollout.num_actors=2",
    "cluster.teacher.cpus_per_actor=0.5",
)
NUM_STEPS, EPISODES_PER_STEP = 3, 6


class Deadly:
    """Passes everything on to a port; a process dies during the n-th call of one method."""

    def __init__(self, inner: Any, method: str, *, nth: int, pid: int, after_s: float) -> None:
        self._inner, self._method, self._left = inner, method, nth
        self._pid, self._after_s = pid, after_s

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._deadly(found) if name == self._method else found

    def _deadly(self, call: Any) -> Any:
        async def called(*args: Any, **kwargs: Any) -> Any:
            self._left -= 1
            working = asyncio.ensure_future(call(*args, **kwargs))
            if self._left == 0:
                await asyncio.sleep(self._after_s)
                os.kill(self._pid, signal.SIGKILL)  # as the kernel does when memory is short
            return await working

        return called


async def pid_of(actor: Any) -> int:
    pid: int = await actor.__ray_call__.remote(lambda self: os.getpid())
    return pid


class LosesARank(ClusterActor):
    """The last rank dies in the second update."""

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Parts]:
        async with super().open(**options) as parts:
            students: Any = parts.ports.students
            pid = await pid_of(students.group._handles[-1])
            deadly = Deadly(students, "update", nth=2, pid=pid, after_s=0.02)
            yield dataclasses.replace(
                parts, ports=dataclasses.replace(parts.ports, students=deadly)
            )


class LosesAnEngine(ClusterActor):
    """A rollout actor dies while it plays an episode of the second step."""

    @asynccontextmanager
    async def open(self, **options: Any) -> AsyncIterator[Parts]:
        async with super().open(**options) as parts:
            rollouts: Any = parts.ports.rollouts
            pid = await pid_of(rollouts._pool._rotation[0]._handle)
            deadly = Deadly(rollouts, "rollout", nth=7, pid=pid, after_s=0.0)
            yield dataclasses.replace(
                parts, ports=dataclasses.replace(parts.ports, rollouts=deadly)
            )


def train(folder: Path, recipe: str, maker: type[ClusterActor] | None, *overrides: str) -> Path:
    config = load_config(FIXTURES / recipe, overrides)
    launch.train(config, run_dir=folder, progress=SilentProgress(), make_actor=maker)
    return folder


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def events(folder: Path) -> set[str]:
    return {line["event"] for line in lines(folder, "events.jsonl")}


def weights(folder: Path) -> dict[str, bytes]:
    files = (folder / "checkpoints" / f"step-{NUM_STEPS:06d}").glob("*.safetensors")
    return {file.name: file.read_bytes() for file in files}


def assert_right_counts(folder: Path) -> None:
    """Three steps of two optimizer steps, each trajectory trained on once."""
    metrics = lines(folder, "metrics.jsonl")
    assert [line["step"] for line in metrics] == [1, 2, 3]
    assert [line["policy_version"] for line in metrics] == [2, 4, 6]
    played = [line["trajectory"]["trajectory_id"] for line in lines(folder, "trajectories.jsonl")]
    assert len(played) == len(set(played)) == NUM_STEPS * EPISODES_PER_STEP
    assert json.loads((folder / "manifest.json").read_text())["status"] == "finished"


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("calm") / "run"
    config = load_config(FIXTURES / "tiny_bfcl.yaml")
    launch.train(config, run_dir=folder, progress=SilentProgress())
    return weights(folder)


def test_a_rank_of_two_that_dies_in_the_update(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "tiny_megatron.yaml", LosesARank)
    assert {"student_lost", "student_rebuilt"} <= events(folder)
    assert_right_counts(folder)
    sampled = [line for line in lines(folder, "events.jsonl") if line["event"] == "group_started"]
    assert len(sampled) == NUM_STEPS * 2, "nothing was sampled again"


def test_the_only_rank_dies_and_the_weights_are_what_they_would_have_been(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    folder = train(tmp_path / "run", "tiny_bfcl.yaml", LosesARank, *TOY)
    assert {"student_lost", "student_rebuilt"} <= events(folder)
    assert_right_counts(folder)
    assert weights(folder) == undisturbed


def test_an_engine_dies_and_its_episodes_are_played_elsewhere(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    folder = train(tmp_path / "run", "tiny_bfcl.yaml", LosesAnEngine, *TOY)
    assert "engine_lost" in events(folder)
    assert_right_counts(folder)
    assert weights(folder) == undisturbed


@pytest.mark.slow
def test_an_engine_of_a_megatron_student_dies(tmp_path: Path) -> None:
    folder = train(tmp_path / "run", "tiny_megatron.yaml", LosesAnEngine)
    assert "engine_lost" in events(folder)
    assert_right_counts(folder)


def killed_driver(folder: Path, recipe: str, *overrides: str) -> None:
    """Train in a process with a Ray of its own, which dies behind the second step's update."""
    command = [sys.executable, "-m", "tests.faults.kill_run", "train", str(FIXTURES / recipe)]
    log = folder.parent / "driver.log"  # not a pipe: what outlives the driver would hold it open
    with pytest.MonkeyPatch.context() as patch, log.open("wb") as output:
        patch.delenv("RAY_ADDRESS", raising=False)
        died = subprocess.run(
            [*command, str(folder), "update", *overrides],
            cwd=ROOT,
            stdout=output,
            stderr=output,
            check=False,
        )
    assert died.returncode == -signal.SIGKILL, log.read_text()[-2000:]
    assert (folder / "journal" / "step-000001.json").exists()  # the second: to be trained again


def resumed(folder: Path) -> Path:
    assert json.loads((folder / "manifest.json").read_text())["status"] == "running"
    launch.resume(folder, progress=SilentProgress())
    return folder


def test_the_driver_dies_and_the_run_is_resumed(
    tmp_path: Path, undisturbed: dict[str, bytes]
) -> None:
    killed_driver(tmp_path / "run", "tiny_bfcl.yaml", *TOY)
    folder = resumed(tmp_path / "run")
    assert_right_counts(folder)
    assert weights(folder) == undisturbed


@pytest.mark.slow
def test_the_driver_of_a_megatron_student_dies(tmp_path: Path) -> None:
    # The driver's own Ray has one node.
    one_node = ("cluster.student.num_nodes=1", "cluster.student.ranks_per_node=2")
    killed_driver(tmp_path / "run", "tiny_megatron.yaml", *one_node, "cluster.num_cpus=4")
    assert_right_counts(resumed(tmp_path / "run"))
