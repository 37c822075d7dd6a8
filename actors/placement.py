"""Reserves what a run needs in a Ray cluster, all of it or nothing, within a deadline.

Feasibility comes first: a run that can never fit fails at once and says what was wanted and what
there is. While a plan fits the cluster but others use part of it, nothing is reserved, so that two
waiting runs cannot hold each other up. Once it fits what is free, every bundle is reserved on the
node that was worked out for it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol, Self

from actors.placement_plan import (
    FeasibilityReport,
    GroupPlan,
    NodeResources,
    PlacementPlan,
    Role,
    feasibility,
    placement_plan,
)
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import PlacementError
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Clock

__all__ = [
    "FeasibilityReport",
    "NodeResources",
    "PlacedGroups",
    "PlacementPlan",
    "RankPlace",
    "Role",
    "feasibility",
    "place",
    "placement_plan",
    "rank_coordinates",
]

POLL_S: Final = 0.2
GRANTED: Final = "CREATED"


class Cluster(Protocol):
    """What placement needs of Ray; every call may block for a moment."""

    def nodes(self) -> list[NodeResources]:
        """All nodes with everything they have."""

    def free(self) -> dict[str, tuple[float, float]]:
        """Node id -> (CPUs, GPUs) that nobody has reserved."""

    def reserve(self, name: str, group: GroupPlan, node_ids: Sequence[str]) -> Any:  # noqa: ANN401
        """Ask for a placement group, bundle i on ``node_ids[i]``; does not wait for it."""

    def is_granted(self, group: Any) -> bool:  # noqa: ANN401 - Ray's handle
        """Whether all bundles are reserved."""

    def remove(self, group: Any) -> None:  # noqa: ANN401
        """Give the bundles back; what runs in them is killed."""


class RayCluster:
    """The cluster that this process is connected to."""

    def nodes(self) -> list[NodeResources]:
        """All nodes, dead ones too."""
        import ray

        with _ray_call("list the nodes"):
            found = ray.nodes()  # type: ignore[no-untyped-call]
        return [
            NodeResources(node["NodeID"], *_cpus_gpus(node["Resources"]), is_alive=node["Alive"])
            for node in found
        ]

    def free(self) -> dict[str, tuple[float, float]]:
        """Ray reports it with a delay of some tenths of a second."""
        from ray._private import state  # ray.available_resources() is only the cluster's sum

        with _ray_call("list what is free"):
            offered = state.available_resources_per_node()  # type: ignore[no-untyped-call]
        return {node_id: _cpus_gpus(resources) for node_id, resources in offered.items()}

    def reserve(self, name: str, group: GroupPlan, node_ids: Sequence[str]) -> Any:  # noqa: ANN401
        """Pinned by Ray's own label of each node."""
        from ray.util.placement_group import placement_group

        wanted = {"CPU": group.bundle.cpus, "GPU": group.bundle.gpus}
        bundle = {key: value for key, value in wanted.items() if value}
        with _ray_call(f"create placement group {name}"):
            return placement_group(
                [bundle] * group.num_bundles,
                strategy=group.strategy,
                name=name,
                bundle_label_selector=[{"ray.io/node-id": node_id} for node_id in node_ids],
            )

    def is_granted(self, group: Any) -> bool:  # noqa: ANN401
        """Asks the head; never waits."""
        from ray.util.placement_group import placement_group_table

        with _ray_call("ask for a placement group"):
            return bool(placement_group_table(group)["state"] == GRANTED)

    def remove(self, group: Any) -> None:  # noqa: ANN401
        """Asynchronous on Ray's side."""
        from ray.util.placement_group import remove_placement_group

        with _ray_call("remove a placement group"):
            remove_placement_group(group)


def _cpus_gpus(resources: Mapping[str, float]) -> tuple[float, float]:
    return resources.get("CPU", 0.0), resources.get("GPU", 0.0)


@contextmanager
def _ray_call(what: str) -> Iterator[None]:
    from ray.exceptions import RayError

    try:
        yield
    except RayError as error:
        raise PlacementError(f"Ray could not {what}: {error}") from error


class PlacedGroups:
    """Granted placement groups of one run; ``async with`` gives them back at the end."""

    def __init__(
        self, cluster: Cluster, report: FeasibilityReport, groups: Mapping[Role, Any]
    ) -> None:
        self.report = report
        self._cluster = cluster
        self._groups = dict(groups)

    @property
    def plan(self) -> PlacementPlan:
        """What was wanted."""
        return self.report.plan

    def node_id(self, role: Role, index: int) -> str:
        """Ray's id of the node that holds actor ``index``."""
        return self.report.assignment[role, self._bundle(role, index)]

    def options(self, role: Role, index: int) -> dict[str, Any]:
        """Keywords for ``ActorClass.options``: the reserved resources of actor ``index``.

        Student ranks are numbered node by node, so ``index`` is the rank.

        Raises:
            PlacementError: there is no such actor.
        """
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = self._bundle(role, index)
        actor = self.plan.group(role).actor
        return {
            "num_cpus": actor.cpus,
            "num_gpus": actor.gpus,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(self._groups[role], bundle),
        }

    def _bundle(self, role: Role, index: int) -> int:
        group = self.plan.group(role)
        if not 0 <= index < group.num_actors:
            raise PlacementError(f"{role} actor {index}: there are {group.num_actors}, from 0")
        return index // group.actors_per_bundle

    async def close(self) -> None:
        """Give everything back; what still runs in it is killed. May be called again."""
        groups, self._groups = self._groups, {}
        for group in groups.values():
            await asyncio.to_thread(self._cluster.remove, group)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def place(
    config: RunConfig,
    run_name: str,
    *,
    cluster: Cluster | None = None,
    clock: Clock | None = None,
    may_grow: bool = True,
) -> PlacedGroups:
    """Reserve everything a run needs, in the Ray cluster this process is connected to.

    Args:
        config: says what is wanted, how many nodes to wait for, and until when.
        run_name: part of the groups' names, which also get a random end: another run of this
            name, or what a killed one left behind, cannot be in the way.
        cluster: None takes Ray.
        clock: for the deadline; None takes real time.
        may_grow: nodes may still join, so fewer than ``cluster.min_nodes`` are waited for; False
            (a cluster of this machine alone) fails at once.

    Raises:
        PlacementError: it can never fit, or was not granted within ``cluster.start_deadline_s``.
            Nothing is left reserved.
    """
    return await _Placing(
        placement_plan(config), config, cluster or RayCluster(), clock or SystemClock()
    ).run(f"{run_name}-{secrets.token_hex(4)}", may_grow=may_grow)


class _Placing:
    """One attempt to place one plan."""

    def __init__(
        self, plan: PlacementPlan, config: RunConfig, cluster: Cluster, clock: Clock
    ) -> None:
        self._plan = plan
        self._min_nodes = config.cluster.min_nodes
        self._limit_s = config.cluster.start_deadline_s
        self._deadline = clock.now() + self._limit_s
        self._cluster = cluster
        self._clock = clock

    async def run(self, name: str, *, may_grow: bool) -> PlacedGroups:
        nodes = await self._joined(may_grow=may_grow)
        report = await self._fitting(nodes)
        groups: dict[Role, Any] = {}
        asked = asyncio.create_task(asyncio.to_thread(self._reserve, name, report, groups))
        try:
            await asyncio.shield(asked)
            await self._granted(groups, report)
        except BaseException as error:
            # A cancelled wait does not end the thread: what it is still asking for would be lost.
            await asyncio.wait([asked])
            await asyncio.shield(self._undo(groups, error))
            raise
        return PlacedGroups(self._cluster, report, groups)

    async def _joined(self, *, may_grow: bool) -> list[NodeResources]:
        """Waits for nodes to join, which their owner frees by starting them."""
        while True:
            nodes = [n for n in await asyncio.to_thread(self._cluster.nodes) if n.is_alive]
            if len(nodes) >= self._min_nodes:
                return nodes
            if not may_grow or self._is_late:
                waited = f"after {self._limit_s:g} s" if may_grow else "and none can join"
                raise PlacementError(
                    f"the cluster has {len(nodes)} node(s) {waited}, expected cluster.min_nodes "
                    f"{self._min_nodes}\n{feasibility(self._plan, nodes).table()}"
                )
            await self._clock.sleep(POLL_S)

    async def _fitting(self, nodes: Sequence[NodeResources]) -> FeasibilityReport:
        """Waits until the plan fits what is free, which other runs free by ending."""
        feasibility(self._plan, nodes).require()
        while True:
            free = await asyncio.to_thread(self._cluster.free)
            report = feasibility(self._plan, [_offering(node, free) for node in nodes])
            if report.is_feasible or self._is_late:
                report.require(f"not free within {self._limit_s:g} s (others use the cluster)")
                return report
            await self._clock.sleep(POLL_S)

    def _reserve(self, name: str, report: FeasibilityReport, groups: dict[Role, Any]) -> None:
        """Fills ``groups`` as it goes: those are to be given back should a later one fail."""
        for group in self._plan.groups:
            node_ids = [report.assignment[group.role, i] for i in range(group.num_bundles)]
            groups[group.role] = self._cluster.reserve(f"{name}-{group.role}", group, node_ids)

    async def _granted(self, groups: Mapping[Role, Any], report: FeasibilityReport) -> None:
        """Waits for Ray's head to grant what fits; somebody else may have been faster."""
        for role, group in groups.items():
            while not await asyncio.to_thread(self._cluster.is_granted, group):
                if self._is_late:
                    raise PlacementError(
                        f"the {role} group was not granted within {self._limit_s:g} s\n"
                        f"{report.table()}"
                    )
                await self._clock.sleep(POLL_S)

    async def _undo(self, groups: Mapping[Role, Any], cause: BaseException) -> None:
        """Give back what was asked for; a failure here must not hide the first one."""
        for role, group in groups.items():
            try:
                await asyncio.to_thread(self._cluster.remove, group)
            except PlacementError as error:
                cause.add_note(f"and the {role} group could not be removed: {error}")

    @property
    def _is_late(self) -> bool:
        return self._clock.now() >= self._deadline


def _offering(node: NodeResources, free: Mapping[str, tuple[float, float]]) -> NodeResources:
    cpus, gpus = free.get(node.node_id, (0.0, 0.0))
    return NodeResources(node.node_id, cpus, gpus, node.is_alive)


@dataclass(frozen=True)
class RankPlace:
    """Coordinates of one Megatron rank in its process groups."""

    rank: int
    node: int
    local_rank: int
    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    expert_dp: int


def rank_coordinates(
    parallel: ParallelConfig, num_ranks: int, ranks_per_node: int | None = None
) -> tuple[RankPlace, ...]:
    """Where every rank stands, in megatron-core's default order.

    Dense weights: tp changes fastest, then cp, dp, pp. Expert weights: etp, ep, expert_dp, pp.

    Args:
        parallel: sizes of the groups.
        num_ranks: world size.
        ranks_per_node: None puts all on one node.

    Raises:
        PlacementError: the ranks cannot be laid out so.

    Source:
        ``tp-cp-ep-dp-pp`` of megatron.core.parallel_state.RankGenerator.
    """
    if problem := parallel.problem(num_ranks):
        raise PlacementError(f"student.model.parallel: {problem}")
    per_node = ranks_per_node or num_ranks
    dp = num_ranks // parallel.model_ranks
    dense = (parallel.tensor, parallel.context, dp, parallel.pipeline)
    expert_dp = num_ranks // (parallel.expert_tensor * parallel.expert * parallel.pipeline)
    expert = (parallel.expert_tensor, parallel.expert, expert_dp, parallel.pipeline)
    places = []
    for rank in range(num_ranks):
        tp_at, cp_at, dp_at, pp_at = _digits(rank, dense)
        etp_at, ep_at, expert_dp_at, _ = _digits(rank, expert)
        node, local = divmod(rank, per_node)
        places.append(
            RankPlace(rank, node, local, tp_at, cp_at, dp_at, pp_at, ep_at, etp_at, expert_dp_at)
        )
    return tuple(places)


def _digits(number: int, sizes: Sequence[int]) -> list[int]:
    """Mixed-radix digits, fastest first."""
    digits = []
    for size in sizes:
        number, digit = divmod(number, size)
        digits.append(digit)
    return digits
