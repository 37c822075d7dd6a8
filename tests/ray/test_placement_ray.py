"""Placement against a real Ray of two nodes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from actors.placement import PlacedGroups, RayCluster, Role, place
from actors.placement_plan import Bundle, GroupPlan
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import PlacementError
from tests.support.requirements import require_ray

require_ray()
ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "cluster.student.cpus_per_rank=0.5",
    "cluster.rollout.num_actors=2",
    "cluster.rollout.cpus_per_actor=0.5",
    "cluster.teacher.cpus_per_actor=0.5",
)


def config(*overrides: str) -> RunConfig:
    recipe = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
    return load_config(recipe, ["runtime=cluster", *SMALL, *overrides]).config


@pytest.fixture
def real_cluster(shared_cluster: str) -> RayCluster:
    """Two nodes of 2 CPUs; nothing of another test is reserved any more."""
    del shared_cluster
    return RayCluster()


async def free_cpus(cluster: RayCluster, expected: float) -> float:
    """Ray's report comes a little late."""
    cpus = -1.0
    for _ in range(1200):
        cpus = sum(free for free, _gpus in cluster.free().values())
        if cpus == expected:
            break
        await asyncio.sleep(0.05)
    return cpus


class TestRealRay:
    async def test_sixteen_gpus_here_fail_within_seconds(self, real_cluster: RayCluster) -> None:
        wanted = config("cluster.rollout.num_actors=16", "cluster.rollout.gpus_per_actor=1")
        start = time.monotonic()
        with pytest.raises(PlacementError) as caught:
            await place(wanted, "run", cluster=real_cluster)
        assert time.monotonic() - start < 60
        lines = str(caught.value).splitlines()
        assert lines[0] == "infeasible placement: 16 of 18 bundles have no node"
        assert "  rollout  16 x (0.5 CPU, 1 GPU)  1 actor(s) each  wherever they fit" in lines
        assert any("2 CPU, 0 GPU" in line and "takes student 0" in line for line in lines)

    async def test_actors_run_in_what_was_granted_and_removal_frees_it(
        self, real_cluster: RayCluster
    ) -> None:
        import ray

        async with await place(config(), "same-name") as first:
            second = await place(config(), "same-name")
            assert await free_cpus(real_cluster, 0.0) == 0.0
            probe = ray.remote(Probe).options(**first.options(Role.ROLLOUT, 1)).remote()
            assert ray.get(probe.place.remote()) == (
                first.node_id(Role.ROLLOUT, 1),
                placement_group_id(first, Role.ROLLOUT),
            )
            await second.close()
            await second.close()
            assert await free_cpus(real_cluster, 2.0) == 2.0
        assert await free_cpus(real_cluster, 4.0) == 4.0

    async def test_a_third_run_waits_and_leaves_nothing(self, real_cluster: RayCluster) -> None:
        full = config("cluster.student.cpus_per_rank=2.0")
        async with await place(full, "first"):
            assert await free_cpus(real_cluster, 0.5) == 0.5
            late = full.model_copy(
                update={"cluster": full.cluster.model_copy(update={"start_deadline_s": 0.5})}
            )
            with pytest.raises(PlacementError, match=r"not free within 0\.5 s"):
                await place(late, "second")
        assert await free_cpus(real_cluster, 4.0) == 4.0

    def test_ray_errors_become_ours(self, real_cluster: RayCluster) -> None:
        g = GroupPlan(Role.STUDENT, 1, 1, Bundle(0.5, 0))
        node_id = real_cluster.nodes()[0].node_id
        handle = real_cluster.reserve("taken", g, [node_id])
        with pytest.raises(PlacementError, match="could not create placement group taken"):
            real_cluster.reserve("taken", g, [node_id])
        real_cluster.remove(handle)


def placement_group_id(placed: PlacedGroups, role: Role) -> str:
    strategy = placed.options(role, 0)["scheduling_strategy"]
    return str(strategy.placement_group.id.hex())


class Probe:
    def place(self) -> tuple[str, str]:
        import ray

        context = ray.get_runtime_context()
        return context.get_node_id(), str(context.get_placement_group_id())
