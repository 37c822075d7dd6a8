"""What a user reads of an actor that fails, from real actors."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.config.load import load_config
from miniverl_dist.errors import CheckpointError, EngineLostError, PlacementError
from miniverl_dist.observability.progress import SilentProgress
from tests.support.requirements import require_ray

require_ray()

from actors.host import HostedRun  # noqa: E402 -- imports Ray
from actors.ray_calls import remote  # noqa: E402 -- imports Ray

TINY = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_bfcl.yaml"


class Breaks:
    """Raises where it is told to."""

    def __init__(self, at_once: bool) -> None:
        if at_once:
            raise CheckpointError("student/config.json is damaged")

    def work(self) -> None:
        raise CheckpointError("weights.bin is damaged")


def actor(*, at_once: bool) -> Any:
    import ray

    return ray.remote(Breaks).options(num_cpus=0).remote(at_once)


async def test_an_actor_that_cannot_be_built_says_why(shared_cluster: str) -> None:
    del shared_cluster
    with pytest.raises(EngineLostError, match=r"engine-0 could not be built: .*student/config"):
        await remote(actor(at_once=True).work.remote(), "engine-0", EngineLostError)


async def test_our_errors_come_through_as_themselves(shared_cluster: str) -> None:
    del shared_cluster
    with pytest.raises(CheckpointError, match=r"^weights\.bin is damaged$"):
        await remote(actor(at_once=False).work.remote(), "engine-0", EngineLostError)


async def test_a_single_actor_that_no_node_can_hold_fails_with_the_table(
    shared_cluster: str, tmp_path: Path
) -> None:
    del shared_cluster
    wanted = ["runtime=single_actor", "cluster.student.gpus_per_rank=1"]
    hosted = HostedRun(load_config(TINY, wanted), tmp_path, SilentProgress(), None)
    began = time.monotonic()
    with pytest.raises(PlacementError, match=r"infeasible placement: 1 of 1(?s:.*)1 GPU"):
        await asyncio.wait_for(hosted.run(), 120)
    assert time.monotonic() - began < 60
