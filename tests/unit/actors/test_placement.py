"""Planning and placing without Ray; the rank map against Megatron."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.placement import (
    NodeResources,
    PlacementPlan,
    Role,
    feasibility,
    place,
    placement_plan,
    rank_coordinates,
)
from actors.placement_plan import Bundle, GroupPlan
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.load import load_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, PlacementError
from tests.fakes import FakeClock

ROOT = Path(__file__).resolve().parents[3]
SMALL = (
    "cluster.student.cpus_per_rank=0.25",
    "cluster.rollout.num_actors=2",
    "cluster.rollout.cpus_per_actor=0.25",
    "cluster.teacher.cpus_per_actor=0.25",
)


def config(*overrides: str, runtime: str = "cluster") -> RunConfig:
    recipe = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
    return load_config(recipe, [f"runtime={runtime}", *overrides]).config


def nodes(*sizes: tuple[float, float]) -> list[NodeResources]:
    return [NodeResources(f"{i:08d}", cpus, gpus) for i, (cpus, gpus) in enumerate(sizes)]


def group(role: Role, count: int, cpus: float, gpus: float, *, spread: bool = False) -> GroupPlan:
    return GroupPlan(role, count, 1, Bundle(cpus, gpus), is_spread=spread)


class TestPlan:
    def test_cluster_reserves_a_bundle_per_node_and_per_actor(self) -> None:
        student = config("cluster.student.cpus_per_rank=0.1", *SMALL[1:])
        plan = placement_plan(student)
        assert [(g.role, g.num_bundles, g.strategy) for g in plan.groups] == [
            (Role.STUDENT, 1, "PACK"),
            (Role.ROLLOUT, 2, "PACK"),
            (Role.TEACHER, 1, "PACK"),
        ]
        assert plan.total == Bundle(0.1 + 0.5 + 0.25, 0)

    def test_ranks_of_a_node_share_a_bundle_and_nodes_are_spread(self) -> None:
        megatron = {"kind": "megatron", "config": "c.json", "parallel": {"tensor": 2}}
        data = config().model_dump(mode="json")
        data["student"]["model"] = megatron
        data["cluster"]["student"] = {
            "num_nodes": 2,
            "ranks_per_node": 3,
            "cpus_per_rank": 0.1,
            "gpus_per_rank": 1.0,
        }
        plan = placement_plan(RunConfig.model_validate(data, strict=False))
        student = plan.group(Role.STUDENT)
        assert (student.strategy, student.num_actors) == ("STRICT_SPREAD", 6)
        assert student.bundle == Bundle(0.3, 3.0)

    def test_other_runtimes(self) -> None:
        assert placement_plan(config(runtime="inprocess")).groups == ()
        (single,) = placement_plan(config(runtime="single_actor")).groups
        assert (single.role, single.num_actors) == (Role.STUDENT, 1)

    def test_a_teacher_elsewhere_takes_no_place(self) -> None:
        data = config().model_dump(mode="json")
        data["teacher"] |= {"url": "http://teacher:30000", "model": None, "fit": None}
        plan = placement_plan(RunConfig.model_validate(data, strict=False))
        assert [g.role for g in plan.groups] == [Role.STUDENT, Role.ROLLOUT]
        with pytest.raises(PlacementError, match="places no teacher actors"):
            plan.group(Role.TEACHER)

    def test_an_actor_without_resources_is_refused(self) -> None:
        with pytest.raises(ConfigError, match=r"cluster\.rollout: .* neither CPUs nor GPUs"):
            placement_plan(config("cluster.rollout.cpus_per_actor=0"))


class TestFeasibility:
    def test_first_fit_would_fail_where_a_packing_exists(self) -> None:
        plan = PlacementPlan(
            (
                group(Role.STUDENT, 1, 3, 0),
                group(Role.ROLLOUT, 1, 2, 0),
                group(Role.TEACHER, 2, 2, 0),
            )
        )
        report = feasibility(plan, nodes((6, 0), (3, 0)))
        assert report.is_feasible
        assert report.assignment[Role.STUDENT, 0] == "00000001"

    def test_fractions_fill_a_node_exactly(self) -> None:
        plan = PlacementPlan((group(Role.ROLLOUT, 10, 0.1, 0),))
        assert feasibility(plan, nodes((1, 0))).is_feasible
        assert not feasibility(plan, nodes((0.9999, 0))).is_feasible

    def test_many_equal_actors_are_decided_quickly(self) -> None:
        plan = PlacementPlan(
            (group(Role.STUDENT, 8, 8, 8, spread=True), group(Role.ROLLOUT, 65, 2, 1))
        )
        start = time.process_time()
        assert not feasibility(plan, nodes(*[(24, 16)] * 8)).is_feasible
        assert feasibility(plan, nodes(*[(26, 17)] * 8)).is_feasible
        assert time.process_time() - start < 2

    def test_spread_bundles_take_a_node_each(self) -> None:
        plan = PlacementPlan((group(Role.STUDENT, 2, 1, 0, spread=True),))
        report = feasibility(plan, nodes((4, 0), (4, 0)))
        assert sorted(report.assignment.values()) == ["00000000", "00000001"]
        assert feasibility(plan, nodes((8, 0))).missing == ((Role.STUDENT, 1),)

    def test_dead_nodes_offer_nothing(self) -> None:
        dead = NodeResources("gone", 100, 100, is_alive=False)
        report = feasibility(PlacementPlan((group(Role.STUDENT, 1, 1, 0),)), [dead])
        assert report.missing == ((Role.STUDENT, 0),)
        assert "no node" in report.table()
        assert str(report) == report.table()

    def test_the_error_holds_wanted_offered_and_missing(self) -> None:
        plan = PlacementPlan(
            (
                GroupPlan(Role.STUDENT, 2, 8, Bundle(1, 1), is_spread=True),
                group(Role.ROLLOUT, 2, 0.5, 0),
            )
        )
        with pytest.raises(PlacementError) as caught:
            feasibility(plan, nodes((2, 0), (64, 8))).require()
        assert str(caught.value).splitlines() == [
            "infeasible placement: 1 of 4 bundles have no node",
            "wanted",
            "  student  2 x (8 CPU, 8 GPU)    8 actor(s) each  each on a node of its own",
            "  rollout  2 x (0.5 CPU, 0 GPU)  1 actor(s) each  wherever they fit",
            "offered",
            "  node 00000000  2 CPU, 0 GPU   takes rollout 0, rollout 1",
            "  node 00000001  64 CPU, 8 GPU  takes student 0",
            "does not fit",
            "  student 1  8 CPU, 8 GPU",
            "ask for less under `cluster`, or add nodes (`cluster.min_nodes` waits for them)",
        ]

    @given(
        st.lists(st.tuples(st.integers(0, 8), st.integers(0, 5)), min_size=2, max_size=3),
        st.lists(
            st.tuples(
                st.integers(1, 3), st.integers(0, 3), st.integers(0, 2), st.booleans()
            ).filter(lambda g: g[1] + g[2] > 0),
            min_size=1,
            max_size=3,
        ),
    )
    def test_agrees_with_trying_everything(
        self, sizes: list[tuple[int, int]], groups: list[tuple[int, int, int, bool]]
    ) -> None:
        plan = PlacementPlan(
            tuple(
                group(role, count, cpus / 2, gpus, spread=spread)
                for role, (count, cpus, gpus, spread) in zip(Role, groups, strict=False)
            )
        )
        report = feasibility(plan, nodes(*[(cpus / 2, gpus) for cpus, gpus in sizes]))
        assert report.is_feasible == any_assignment_fits(plan, report.nodes)
        assert is_allowed(plan, report.nodes, dict(report.assignment))
        assert len(report.assignment) + len(report.missing) == sum(
            g.num_bundles for g in plan.groups
        )


def is_allowed(
    plan: PlacementPlan, offered: Sequence[NodeResources], assignment: dict[Any, str]
) -> bool:
    """No node holds more than it has, and spread bundles stand apart."""
    for g in plan.groups:
        mine = [at for (role, _), at in assignment.items() if role is g.role]
        if g.is_spread and len(set(mine)) < len(mine):
            return False
    for node in offered:
        held = [plan.group(r).bundle for (r, _), at in assignment.items() if at == node.node_id]
        if sum(b.cpus for b in held) > node.cpus or sum(b.gpus for b in held) > node.gpus:
            return False
    return True


def any_assignment_fits(plan: PlacementPlan, offered: Sequence[NodeResources]) -> bool:
    names = [(g.role, i) for g in plan.groups for i in range(g.num_bundles)]
    ids = [node.node_id for node in offered]
    return any(
        is_allowed(plan, offered, dict(zip(names, choice, strict=True)))
        for choice in itertools.product(ids, repeat=len(names))
    )


class TestRankMap:
    def test_reference_layout(self) -> None:
        parallel = ParallelConfig(tensor=2, pipeline=2, context=2, expert=4, sequence=True)
        places = rank_coordinates(parallel, 16, ranks_per_node=8)
        assert [(p.node, p.local_rank, p.pp) for p in places] == [
            (rank // 8, rank % 8, rank // 8) for rank in range(16)
        ]
        fifth = places[5]
        assert (fifth.tp, fifth.cp, fifth.dp, fifth.ep, fifth.expert_dp) == (1, 0, 1, 1, 1)

    def test_a_layout_that_does_not_divide_is_refused(self) -> None:
        with pytest.raises(PlacementError, match="6 ranks do not divide"):
            rank_coordinates(ParallelConfig(tensor=4), 6)

    def test_agrees_with_megatron(self) -> None:
        from tests.support.requirements import require_megatron

        require_megatron()
        for sizes in (
            (2, 2, 2, 4, 1, 16),
            (1, 2, 1, 2, 2, 16),
            (4, 1, 2, 2, 2, 16),
            (1, 4, 1, 1, 1, 8),
        ):
            tp, pp, cp, ep, etp, world = sizes
            parallel = ParallelConfig(
                tensor=tp, pipeline=pp, context=cp, expert=ep, expert_tensor=etp
            )
            places = rank_coordinates(parallel, world)
            for name, field, is_expert in AXES:
                expected = megatron_groups(name, sizes, is_expert=is_expert)
                assert groups_along(places, field, is_expert=is_expert) == expected, (sizes, name)


LAYOUTS = ((2, 2, 2, 4, 1, 16), (1, 2, 1, 2, 2, 16), (4, 1, 2, 2, 2, 16), (1, 4, 1, 1, 1, 8))
"""tp, pp, cp, ep, etp, world"""
AXES = (
    ("tp", "tp", False),
    ("cp", "cp", False),
    ("dp", "dp", False),
    ("pp", "pp", False),
    ("tp", "etp", True),
    ("ep", "ep", True),
    ("dp", "expert_dp", True),
)
DENSE, EXPERT = ("tp", "cp", "dp", "pp"), ("etp", "ep", "expert_dp", "pp")


def groups_along(places: Sequence[Any], field: str, *, is_expert: bool) -> list[list[int]]:
    """Ranks that differ in one coordinate only, ordered along it."""
    others = [name for name in (EXPERT if is_expert else DENSE) if name != field]
    found: dict[tuple[int, ...], list[Any]] = {}
    for at in places:
        found.setdefault(tuple(getattr(at, name) for name in others), []).append(at)
    return sorted(
        [at.rank for at in sorted(group_, key=lambda at: getattr(at, field))]
        for group_ in found.values()
    )


def megatron_groups(
    name: str, sizes: tuple[int, int, int, int, int, int], *, is_expert: bool
) -> list[list[int]]:
    from megatron.core.parallel_state import RankGenerator

    tp, pp, cp, ep, etp, world = sizes
    order = "tp-cp-ep-dp-pp"
    if is_expert:
        generator = RankGenerator(etp, ep, world // (etp * ep * pp), pp, 1, order)
    else:
        generator = RankGenerator(tp, 1, world // (tp * cp * pp), pp, cp, order)
    return sorted(generator.get_ranks(name))


class FakeCluster:
    """`placement.Cluster` in memory; what is reserved is granted unless told otherwise."""

    def __init__(self, *sizes: tuple[float, float]) -> None:
        self.all = nodes(*sizes)
        self.used: dict[str, float] = {}
        self.reserved: dict[str, Sequence[str]] = {}
        self.grants = True
        self.polls = 0
        self.join_after = 0
        self.fail_on: str | None = None
        self.fail_remove = False
        self.gate: threading.Event | None = None
        self.entered = threading.Event()
        self.asked_for_all = threading.Event()

    def nodes(self) -> list[NodeResources]:
        self.polls += 1
        return self.all if self.polls > self.join_after else self.all[:1]

    def free(self) -> dict[str, tuple[float, float]]:
        self.polls += 1
        if self.polls > 5:
            self.used.pop("until the sixth poll", None)
        used = sum(self.used.values())
        return {node.node_id: (node.cpus - used, node.gpus) for node in self.all}

    def reserve(self, name: str, group: GroupPlan, node_ids: Sequence[str]) -> Any:
        if self.gate is not None:
            self.entered.set()
            self.gate.wait(10)
        if group.role == self.fail_on:
            raise PlacementError(f"cannot create {group.role}")
        self.reserved[name] = node_ids
        if group.role is Role.TEACHER:
            self.asked_for_all.set()
        return name

    def is_granted(self, group: Any) -> bool:
        return self.grants

    def remove(self, group: Any) -> None:
        if self.fail_remove:
            raise PlacementError("cannot remove")
        del self.reserved[group]


class TestPlace:
    async def test_each_bundle_stands_where_the_report_says(self) -> None:
        cluster = FakeCluster((0.5, 0), (1, 0))
        async with await place(config(*SMALL), "run", cluster=cluster, clock=FakeClock()) as placed:
            assert [name.split("-")[-1] for name in cluster.reserved] == list(Role)
            for role, ids in zip(Role, cluster.reserved.values(), strict=True):
                assert [placed.node_id(role, i) for i in range(len(ids))] == list(ids)
            with pytest.raises(PlacementError, match="rollout actor 2: there are 2"):
                placed.node_id(Role.ROLLOUT, 2)
        assert cluster.reserved == {}
        await placed.close()

    async def test_ranks_are_numbered_node_by_node(self) -> None:
        local = load_config(
            ROOT / "configs" / "local_megatron.yaml",
            ["cluster.student.num_nodes=2", "student.model.parallel.tensor=4"],
        ).config
        cluster = FakeCluster((2, 0), (2, 0))
        placed = await place(local, "run", cluster=cluster, clock=FakeClock())
        first, second = (node.node_id for node in cluster.all)
        found = [placed.node_id(Role.STUDENT, rank) for rank in range(4)]
        assert found == [first, first, second, second]

    async def test_waits_for_nodes(self) -> None:
        cluster = FakeCluster((0.5, 0), (1, 0))
        cluster.join_after = 3
        clock = FakeClock()
        placed = await place(
            config(*SMALL, "cluster.min_nodes=2"), "run", cluster=cluster, clock=clock
        )
        assert len(placed.report.nodes) == 2
        assert 0 < clock.time < 2

    async def test_the_wait_for_nodes_ends(self) -> None:
        clock = FakeClock()
        waiting = config(*SMALL, "cluster.min_nodes=2", "cluster.start_deadline_s=7")
        with pytest.raises(PlacementError, match=r"1 node\(s\) after 7 s, expected .*min_nodes 2"):
            await place(waiting, "run", cluster=FakeCluster((1, 0)), clock=clock)
        assert 7 <= clock.time < 8

    async def test_a_cluster_that_cannot_grow_is_not_waited_for(self) -> None:
        clock = FakeClock()
        waiting = config(*SMALL, "cluster.min_nodes=2")
        with pytest.raises(PlacementError, match=r"none can join, expected .*min_nodes 2"):
            await place(waiting, "run", cluster=FakeCluster((1, 0)), clock=clock, may_grow=False)
        assert clock.time == 0

    async def test_what_can_never_fit_fails_at_once(self) -> None:
        clock, cluster = FakeClock(), FakeCluster((0.5, 0))
        with pytest.raises(PlacementError, match="infeasible placement: 2 of 4"):
            await place(config(*SMALL), "run", cluster=cluster, clock=clock)
        assert clock.time == 0

    async def test_nothing_is_reserved_while_others_use_the_cluster(self) -> None:
        cluster, clock = FakeCluster((1, 0)), FakeClock()
        cluster.used["until the sixth poll"] = 0.5
        placed = await place(config(*SMALL), "run", cluster=cluster, clock=clock)
        assert placed.report.is_feasible
        assert clock.time > 0
        cluster = FakeCluster((1, 0))
        cluster.used["for ever"] = 0.5
        with pytest.raises(PlacementError, match="not free within 600 s") as caught:
            await place(config(*SMALL), "run", cluster=cluster, clock=clock)
        assert "0.5 CPU, 0 GPU" in str(caught.value)
        assert cluster.reserved == {}

    async def test_a_group_that_is_not_granted_gives_all_back(self) -> None:
        cluster, clock = FakeCluster((1, 0)), FakeClock()
        cluster.grants = False
        with pytest.raises(PlacementError, match="student group was not granted within 600 s"):
            await place(config(*SMALL), "run", cluster=cluster, clock=clock)
        assert cluster.reserved == {}

    async def test_the_first_error_wins_and_earlier_groups_go_back(self) -> None:
        cluster = FakeCluster((1, 0))
        cluster.fail_on = Role.TEACHER
        with pytest.raises(PlacementError, match="cannot create teacher"):
            await place(config(*SMALL), "run", cluster=cluster, clock=FakeClock())
        assert cluster.reserved == {}
        cluster.fail_remove = True
        with pytest.raises(PlacementError, match="cannot create teacher") as caught:
            await place(config(*SMALL), "run", cluster=cluster, clock=FakeClock())
        assert "student group could not be removed" in caught.value.__notes__[0]

    async def test_a_cancelled_placement_gives_back_what_it_was_asking_for(self) -> None:
        cluster = FakeCluster((1, 0))
        cluster.gate = threading.Event()
        task = asyncio.create_task(place(config(*SMALL), "run", cluster=cluster, clock=FakeClock()))
        assert await asyncio.to_thread(cluster.entered.wait, 10)
        task.cancel()
        await asyncio.sleep(0.02)
        cluster.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(cluster.asked_for_all.wait, 10)
        assert cluster.reserved == {}
