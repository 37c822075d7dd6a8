"""``runtime: cluster``: the parts of a run as pools of Ray actors; the trainer stays the same.

driver    trainer, buffer, curriculum, run directory
student   one actor per Megatron rank            -> `student_pool.RankPool`
rollouts  one actor per engine, with episodes    -> `rollout_pool.RolloutPool`
teacher   servers of `teacher.model`, if any     -> `teacher_pool.TeacherPool`
weights   ranks -> engines                       -> `publish.RayWeightStore`
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import ray

from actors.placement import PlacedGroups, Role, place
from actors.publish import RayWeightStore
from actors.ray_calls import remote
from actors.ray_metrics import RayMetrics
from actors.ray_session import cluster_address, ray_session
from actors.rollout_host import RolloutHost
from actors.rollout_pool import RolloutPool
from actors.single import Parts, SingleActor
from actors.sources import EpisodeKind
from actors.student_pool import RankPool
from actors.student_rank import StudentRank
from actors.supervisor import RestartBudget, started_within
from actors.teacher_pool import RemoteServer, TeacherHost, TeacherPool
from actors.teacher_scoring import teacher_scorer
from actors.weight_endpoints import RayEngine, RayRank
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import EngineLostError, MiniverlError, StudentLostError
from miniverl_dist.observability.events import Event
from miniverl_dist.ports import Assignment, TeacherScorer
from miniverl_dist.schemas.evaluation import TailCalls
from miniverl_dist.schemas.trajectory import Trajectory
from teacher_server.prefix_scoring import PrefixScores, ScoredPrefix

Result = TypeVar("Result")


class RayRanks:
    """Implements `student_pool.RankGroup` over actors."""

    def __init__(self, handles: Sequence[Any]) -> None:
        self._handles = list(handles)

    def call(self, method: str, *arguments: object) -> Sequence[Awaitable[Any]]:
        """See `RankGroup.call`; large arguments are stored once for all ranks."""
        shared = [ray.put(argument) for argument in arguments]
        return [
            remote(getattr(handle, method).remote(*shared), f"rank {rank}", StudentLostError)
            for rank, handle in enumerate(self._handles)
        ]

    @property
    def senders(self) -> list[RayRank]:
        """The ranks as a publish sees them."""
        return [RayRank(handle, f"rank {rank}") for rank, handle in enumerate(self._handles)]

    async def end(self) -> None:
        """See `RankGroup.end`."""
        for handle in self._handles:
            ray.kill(handle)


class RayHost(RayEngine):
    """Implements `rollout_pool.RemoteHost`, and an engine of the weight store, over one actor."""

    def __init__(self, handle: Any, name: str, prefixes: PrefixScores) -> None:  # noqa: ANN401 - Ray types no handle
        super().__init__(handle, name)
        self._prefixes = prefixes

    async def play(self, kind: EpisodeKind, assignment: Assignment, member: int) -> Trajectory:
        """See `RemoteHost.play`; what the teacher has scored meanwhile is kept for it here."""
        call = self._handle.play.remote(kind, assignment, member)
        played: Trajectory
        scored: ScoredPrefix | None
        played, scored = await remote(call, self.name, EngineLostError)
        if scored is not None:
            self._prefixes.keep(played.trajectory_id, scored)
        return played

    async def end(self) -> None:
        """See `RemoteHost.end`."""
        ray.kill(self._handle)


class RayServer:
    """Implements `teacher_pool.RemoteServer` over one actor."""

    def __init__(self, handle: Any, url: str, ping_s: float) -> None:  # noqa: ANN401 - Ray types no handle
        self._actor, self.url, self._ping_s = handle, url, ping_s

    async def is_alive(self) -> bool:
        """See `RemoteServer.is_alive`."""
        try:
            call = remote(self._actor.ping.remote(), self.url, EngineLostError)
            async with asyncio.timeout(self._ping_s):
                await call
        except (EngineLostError, TimeoutError):
            return False
        return True

    async def end(self) -> None:
        """See `RemoteServer.end`."""
        ray.kill(self._actor)


class ClusterActor(SingleActor):
    """Builds the parts of one run on a Ray cluster."""

    _are_started = False

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[None]:
        """See `SingleActor.reserved`: a connection to Ray and the places of all actors.

        Raises:
            PlacementError: the cluster cannot hold the run.
        """
        config = self._config
        with ray_session(config.cluster):
            is_local = cluster_address(config.cluster) == "local"
            self._recorder.progress.phase("waiting for the cluster's nodes and resources")
            async with await place(config, config.name, may_grow=not is_local) as placed:
                self._recorder.event(Event.POOLS_PLACED, placement=str(placed.report))
                self._placed = placed
                yield

    @asynccontextmanager
    async def open(
        self, *, tail_calls: TailCalls | None = None, with_scorer: bool = True
    ) -> AsyncIterator[Parts]:
        """See `SingleActor.open`; leaving the block ends every actor."""
        async with AsyncExitStack() as stack:
            self._recorder.sinks.append(RayMetrics(self._recorder.run.path.name))
            prefixes = PrefixScores()
            start = _Starter(self._config, self._run_dir, self._placed, prefixes, self._has_started)
            students = RankPool(
                start.ranks, self._budget(), deadline_s=self._config.deadlines.update_s
            )
            stack.push_async_callback(students.close)
            rollouts = self._rollout_pool(start)
            stack.push_async_callback(rollouts.close)
            teacher = None
            if with_scorer and self._is_teacher_elsewhere:
                # Asked first: what is wrong with it shows before anything large is loaded.
                teacher = await self._teacher(stack, start, prefixes)
            # The longest part of a start: importing torch, loading weights, starting servers.
            self._recorder.progress.phase("starting ranks, engines, servers", self._num_starts)
            _, hosts = await asyncio.gather(students.open(), rollouts.open())
            if with_scorer and not self._is_teacher_elsewhere:
                teacher = await self._teacher(stack, start, prefixes)
            self._are_started = True
            self._weights = self._weight_store(students, rollouts, hosts)
            ports = self._ports(students, self._weights, rollouts.source("training"), teacher)
            yield Parts(ports, self._evaluator(rollouts.source("evaluation"), tail_calls))

    @property
    def _is_teacher_elsewhere(self) -> bool:
        return self._config.teacher is not None and self._config.teacher.url is not None

    @property
    def _num_starts(self) -> int:
        """Rank groups, engines and teacher servers that have to come up."""
        cluster, teacher = self._config.cluster, self._config.teacher
        has_servers = self._config.uses_teacher and not self._is_teacher_elsewhere
        num_servers = cluster.teacher.num_actors if teacher is not None and has_servers else 0
        return 1 + cluster.rollout.num_actors + num_servers

    def _has_started(self, who: str) -> None:
        if not self._are_started:  # what is started anew later belongs to no phase
            self._recorder.progress.advance(1, f"{who} has started")

    def _budget(self) -> RestartBudget:
        return RestartBudget(self._config.cluster, self._clock)

    def _rollout_pool(self, start: _Starter) -> RolloutPool[RayHost]:
        return RolloutPool(
            start.host,
            lambda host: self._weights.admit(host),
            num_hosts=self._config.cluster.rollout.num_actors,
            budget=self._budget(),
            deadline_s=self._config.deadlines.take_s,
            tell=self._tell,
            discard=lambda name: self._weights.discard(name),
        )

    def _weight_store(
        self, students: RankPool[RayRanks], rollouts: RolloutPool[RayHost], hosts: Sequence[RayHost]
    ) -> RayWeightStore:
        def quarantined(name: str, reason: str) -> None:
            self._quarantined(name, reason)
            rollouts.quarantine(name, reason)

        return RayWeightStore(
            lambda: students.group.senders,
            hosts,
            self._config.publish,
            deadline_s=self._config.deadlines.publish_s,
            on_quarantine=quarantined,
        )

    async def _teacher(
        self, stack: AsyncExitStack, start: _Starter, prefixes: PrefixScores
    ) -> TeacherScorer | None:
        teacher = self._config.teacher
        if teacher is None or not self._config.uses_teacher:
            return None

        def attach(url: str | None) -> AbstractAsyncContextManager[TeacherScorer]:
            return teacher_scorer(
                teacher,
                self.side,
                self._run_dir,
                self._clock,
                served_at=url,
                tell=self._tell,
                kept_scores=prefixes,
            )

        if teacher.prefix_scoring:
            stack.callback(self._tell_prefixes, prefixes.counts)
        if teacher.url is not None:
            return await stack.enter_async_context(attach(None))
        pool = TeacherPool(
            start.server,
            attach,
            num_servers=self._config.cluster.teacher.num_actors,
            budget=self._budget(),
            tell=self._tell,
        )
        stack.push_async_callback(pool.close)
        await pool.open()
        return pool

    def _tell(self, event: Event, engine: str, reason: str) -> None:
        self._recorder.event(event, engine=engine, reason=reason)


class _Starter:
    """Starts actors in their reserved places, each within one deadline."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        placed: PlacedGroups,
        prefixes: PrefixScores,
        has_started: Callable[[str], None],
    ) -> None:
        self._prefixes, self._has_started = prefixes, has_started
        self._config, self._run_dir, self._placed = config, run_dir.resolve(), placed
        self._deadline_s = config.cluster.start_deadline_s
        self._addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}  # type: ignore[no-untyped-call]

    async def ranks(self) -> RayRanks:
        """All ranks of the student, met and built."""
        world_size = self._config.num_student_ranks
        env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}  # megatron-core asks for it under TP and SP
        options = {"runtime_env": {"env_vars": env}} if self._has_gpus else {}
        handles = [
            self._actor(
                StudentRank,
                Role.STUDENT,
                rank,
                rank,
                world_size,
                self._host(Role.STUDENT, rank),
                **options,
            )
            for rank in range(world_size)
        ]
        ranks = RayRanks(handles)
        try:
            listening = remote(handles[0].listen.remote(), "rank 0", StudentLostError)
            where = await self._bounded(listening, "rank 0", StudentLostError)
            met = asyncio.gather(*ranks.call("start", *where))
            await self._bounded(met, "the student's ranks", StudentLostError)
            self._has_started(f"the student ({world_size} ranks)")
        except BaseException:
            await ranks.end()
            raise
        return ranks

    async def host(self, index: int, num_restarts: int) -> RayHost:
        """One rollout actor."""
        name = f"engine-{index}" + (f".{num_restarts}" if num_restarts else "")
        address = self._host(Role.ROLLOUT, index)
        handle = self._actor(RolloutHost, Role.ROLLOUT, index, name, address)
        await self._ready(handle, handle.ready.remote(), name)
        return RayHost(handle, name, self._prefixes)

    async def server(self, index: int) -> RemoteServer:
        """One teacher server."""
        name = f"teacher-{index}"
        handle = self._actor(TeacherHost, Role.TEACHER, index)
        url = await self._ready(handle, handle.start.remote(self._host(Role.TEACHER, index)), name)
        return RayServer(handle, url, ping_s=self._deadline_s)

    @property
    def _has_gpus(self) -> bool:
        return self._config.cluster.student.gpus_per_rank > 0

    def _host(self, role: Role, index: int) -> str:
        return str(self._addresses[self._placed.node_id(role, index)])

    def _actor(self, kind: type, role: Role, index: int, *arguments: object, **options: Any) -> Any:  # noqa: ANN401
        made: Any = ray.remote(kind).options(**self._placed.options(role, index), **options)
        return made.remote(self._config, self._run_dir, *arguments)

    async def _ready(self, handle: Any, call: Awaitable[Any], name: str) -> Any:  # noqa: ANN401
        try:
            ready = await self._bounded(remote(call, name, EngineLostError), name, EngineLostError)
        except BaseException:
            ray.kill(handle)
            raise
        self._has_started(name)
        return ready

    async def _bounded(
        self, work: Awaitable[Result], who: str, lost: type[MiniverlError]
    ) -> Result:
        return await started_within(work, who, self._deadline_s, lost)
