"""What a run asks of a cluster, and whether that fits on its nodes; knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from actors.inspection import aligned
from miniverl_dist.config.cluster import ActorPlacement, StudentPlacement
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, PlacementError

GRANULARITY: Final = 10_000
"""Ray counts resources in units of 1/10,000; adding floats would lose a fit by a rounding error."""


class Role(StrEnum):
    """A pool of actors that is placed together."""

    STUDENT = "student"
    ROLLOUT = "rollout"
    TEACHER = "teacher"


@dataclass(frozen=True)
class Bundle:
    """Resources that are reserved together, on one node."""

    cpus: float
    gpus: float

    @property
    def units(self) -> tuple[int, int]:
        """(CPU, GPU) in 1/10,000."""
        return round(self.cpus * GRANULARITY), round(self.gpus * GRANULARITY)

    def __str__(self) -> str:
        return f"{self.cpus:g} CPU, {self.gpus:g} GPU"


@dataclass(frozen=True)
class NodeResources:
    """A node of the cluster and what it has."""

    node_id: str
    cpus: float
    gpus: float
    is_alive: bool = True

    @property
    def name(self) -> str:
        """Short and without the host's name, which belongs in no record of a run."""
        return f"node {self.node_id[:8]}"

    @property
    def bundle(self) -> Bundle:
        """All of it."""
        return Bundle(self.cpus, self.gpus)


@dataclass(frozen=True)
class GroupPlan:
    """The actors of one role: equal bundles, each of which holds ``actors_per_bundle``."""

    role: Role
    num_bundles: int
    actors_per_bundle: int
    actor: Bundle
    is_spread: bool = False
    """Every bundle on a node of its own."""

    @property
    def bundle(self) -> Bundle:
        """What all actors of a bundle need together."""
        return Bundle(
            round(self.actor.cpus * self.actors_per_bundle, 4),
            round(self.actor.gpus * self.actors_per_bundle, 4),
        )

    @property
    def num_actors(self) -> int:
        """Actors of this role."""
        return self.num_bundles * self.actors_per_bundle

    @property
    def strategy(self) -> str:
        """Ray's word for it."""
        return "STRICT_SPREAD" if self.is_spread else "PACK"


BundleName = tuple[Role, int]


@dataclass(frozen=True)
class PlacementPlan:
    """Everything that a run reserves; empty for ``runtime: inprocess``."""

    groups: tuple[GroupPlan, ...]

    def group(self, role: Role) -> GroupPlan:
        """The plan of one role.

        Raises:
            PlacementError: the run has no such actors.
        """
        for group in self.groups:
            if group.role is role:
                return group
        raise PlacementError(f"this run places no {role} actors")

    @property
    def total(self) -> Bundle:
        """What the cluster has to have at least."""
        return Bundle(
            sum(group.bundle.cpus * group.num_bundles for group in self.groups),
            sum(group.bundle.gpus * group.num_bundles for group in self.groups),
        )


def placement_plan(config: RunConfig) -> PlacementPlan:
    """What a run asks of the cluster, from its config alone.

    Raises:
        ConfigError: actors that ask for neither CPUs nor GPUs, which Ray cannot place.
    """
    cluster = config.cluster
    if config.runtime == "inprocess":
        return PlacementPlan(())
    if config.runtime == "single_actor":
        single = cluster.student.model_copy(update={"num_nodes": 1, "ranks_per_node": 1})
        return PlacementPlan((_student_group(single),))
    groups = [_student_group(cluster.student), _actor_group(Role.ROLLOUT, cluster.rollout)]
    if config.teacher is not None and config.teacher.model is not None:
        groups.append(_actor_group(Role.TEACHER, cluster.teacher))
    return PlacementPlan(tuple(groups))


def _student_group(student: StudentPlacement) -> GroupPlan:
    return GroupPlan(
        Role.STUDENT,
        num_bundles=student.num_nodes,
        actors_per_bundle=student.ranks_per_node,
        actor=_needed(Role.STUDENT, student.cpus_per_rank, student.gpus_per_rank),
        is_spread=student.num_nodes > 1,
    )


def _actor_group(role: Role, pool: ActorPlacement) -> GroupPlan:
    actor = _needed(role, pool.cpus_per_actor, pool.gpus_per_actor)
    return GroupPlan(role, num_bundles=pool.num_actors, actors_per_bundle=1, actor=actor)


def _needed(role: Role, cpus: float, gpus: float) -> Bundle:
    bundle = Bundle(cpus, gpus)
    if bundle.units == (0, 0):
        raise ConfigError(
            f"cluster.{role}: its actors ask for neither CPUs nor GPUs, and Ray cannot place that; "
            f"give them a share, down to {1 / GRANULARITY:g} CPU"
        )
    return bundle


@dataclass(frozen=True)
class FeasibilityReport:
    """What is wanted, what each node offers, what fits where."""

    plan: PlacementPlan
    nodes: tuple[NodeResources, ...]
    """Those that are alive."""
    assignment: Mapping[BundleName, str]
    """Bundle -> node id; where not everything fits, as much as fits, largest first."""
    missing: tuple[BundleName, ...]
    """Bundles without a node."""

    @property
    def is_feasible(self) -> bool:
        """Everything has a place."""
        return not self.missing

    def __str__(self) -> str:
        return self.table()

    def table(self) -> str:
        """Wanted, offered and missing, as aligned text."""
        lines = ["wanted", *_indented(self._wanted_rows())]
        lines += ["offered", *_indented(self._offered_rows())]
        if self.missing:
            lines += ["does not fit", *_indented(self._missing_rows())]
        return "\n".join(lines)

    def _wanted_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for group in self.plan.groups:
            where = "each on a node of its own" if group.is_spread else "wherever they fit"
            per_bundle = f"{group.actors_per_bundle} actor(s) each"
            rows.append((group.role, f"{group.num_bundles} x ({group.bundle})", per_bundle, where))
        return rows

    def _offered_rows(self) -> list[tuple[str, ...]]:
        rows: list[tuple[str, ...]] = []
        for node in self.nodes:
            held = [b for b, node_id in self.assignment.items() if node_id == node.node_id]
            holds = "takes " + ", ".join(f"{role} {i}" for role, i in held) if held else "unused"
            rows.append((node.name, str(node.bundle), holds))
        return rows or [("no node",)]

    def _missing_rows(self) -> list[tuple[str, ...]]:
        return [
            (f"{role} {index}", str(self.plan.group(role).bundle)) for role, index in self.missing
        ]

    def require(self, what: str = "infeasible placement") -> None:
        """Raise unless everything fits.

        Raises:
            PlacementError: ``what``, the whole table, and what to change.
        """
        if self.missing:
            raise PlacementError(
                f"{what}: {len(self.missing)} of {len(self.missing) + len(self.assignment)} "
                f"bundles have no node\n{self.table()}\n"
                "ask for less under `cluster`, or add nodes (`cluster.min_nodes` waits for them)"
            )


def _indented(rows: list[tuple[str, ...]]) -> list[str]:
    return [f"  {line}" for line in aligned(rows)]


def feasibility(plan: PlacementPlan, nodes: Sequence[NodeResources]) -> FeasibilityReport:
    """Whether the plan fits on these nodes: exact, largest bundles first.

    The GPU share of a bundle counts before its CPU share. Where there is no solution, the report
    shows what fits when each bundle takes the first node that has room.
    """
    alive = tuple(node for node in nodes if node.is_alive)
    packing = _Packing(plan, alive)
    assignment = packing.exact()
    if assignment is None:
        assignment = packing.greedy()
    bundles = [(group.role, i) for group in plan.groups for i in range(group.num_bundles)]
    return FeasibilityReport(
        plan,
        alive,
        {name: alive[assignment[name]].node_id for name in bundles if name in assignment},
        tuple(name for name in bundles if name not in assignment),
    )


Units = tuple[int, int]


class _Packing:
    """First fit decreasing, with backtracking.

    Equal bundles are tried on rising nodes only, and a state of the nodes from which the rest did
    not fit is not entered again, whichever nodes are in it: that keeps the search small.
    """

    def __init__(self, plan: PlacementPlan, nodes: Sequence[NodeResources]) -> None:
        groups = sorted(plan.groups, key=lambda g: g.bundle.units[::-1], reverse=True)
        self._items = [(group, i) for group in groups for i in range(group.num_bundles)]
        self._start = [node.bundle.units for node in nodes]
        self._dead_ends: set[tuple[int, tuple[tuple[Units, bool], ...]]] = set()

    def exact(self) -> dict[BundleName, int] | None:
        """Bundle -> index of its node; None where there is no solution."""
        places = self._search(0, list(self._start), ())
        if places is None:
            return None
        return {(g.role, i): at for (g, i), at in zip(self._items, places, strict=True)}

    def greedy(self) -> dict[BundleName, int]:
        """As many bundles as fit when each takes the first node with room."""
        free, places = list(self._start), dict[BundleName, int]()
        for group, index in self._items:
            taken = {at for (role, _), at in places.items() if role is group.role}
            for at, room in enumerate(free):
                if _fits(group, room) and not (group.is_spread and at in taken):
                    free[at] = _less(room, group)
                    places[group.role, index] = at
                    break
        return places

    def _search(
        self, number: int, free: list[Units], places: tuple[int, ...]
    ) -> tuple[int, ...] | None:
        if number == len(self._items):
            return places
        group, index = self._items[number]
        mine = places[number - index :]
        first = mine[-1] + group.is_spread if mine else 0
        # Nodes are interchangeable but for their room, and whether this group may still use them.
        state = tuple(sorted((room, at >= first) for at, room in enumerate(free)))
        room_for = sum(_capacity(group, room) for room, is_open in state if is_open)
        if (number, state) in self._dead_ends or room_for < group.num_bundles - index:
            return None
        for at in range(first, len(free)):
            room = free[at]
            if _fits(group, room):
                free[at] = _less(room, group)
                if found := self._search(number + 1, free, (*places, at)):
                    return found
                free[at] = room
        self._dead_ends.add((number, state))
        return None


def _capacity(group: GroupPlan, room: Units) -> int:
    """Bundles of this group that one node can take."""
    pairs = zip(room, group.bundle.units, strict=True)
    num = min(have // need for have, need in pairs if need)
    return min(num, 1) if group.is_spread else num


def _fits(group: GroupPlan, room: Units) -> bool:
    return _capacity(group, room) > 0


def _less(room: Units, group: GroupPlan) -> Units:
    needed = group.bundle.units
    return room[0] - needed[0], room[1] - needed[1]
