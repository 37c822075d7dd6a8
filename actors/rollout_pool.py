"""Rollout actors behind the loop's port: rotation, deaths, restarts.

    rotation  hosts that hold the published version; a group's siblings go to the same one
    lost      a host that died, hung or did not confirm; its episodes are played again elsewhere
    restart   within the budget: new host -> current weights, confirmed -> back in rotation

Who waits: an episode for its host; with an empty rotation, for a restart. A restart frees them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

from actors.sources import EpisodeKind
from actors.supervisor import RestartBudget, all_started
from miniverl_dist.errors import EngineError, EngineLostError, MiniverlError
from miniverl_dist.observability.events import Event
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.trajectory import Trajectory


class RemoteHost(Protocol):
    """A rollout actor (`actors.cluster` has Ray's)."""

    @property
    def name(self) -> str:
        """Unique within a run, restarts included."""

    async def play(self, kind: EpisodeKind, assignment: Assignment, member: int) -> Trajectory:
        """Play an episode of this kind: ``training`` or ``evaluation``.

        Raises:
            EngineLostError: the actor is gone.
        """

    async def end(self) -> None:
        """End the process and its children; may be repeated."""


HostT = TypeVar("HostT", bound=RemoteHost)
Tell = Callable[[Event, str, str], None]
"""(event, host, reason)."""


class RolloutPool(Generic[HostT]):
    """Plays episodes on whichever host stands.

    Args:
        make: Starts host ``index``; the second number counts its restarts.
        admit: Brings the current weights to a restarted host and has them confirmed.
        num_hosts: Hosts to keep standing.
        budget: Restarts, all hosts together.
        deadline_s: For one episode; a host that takes longer is lost.
        tell: Writes events.
        discard: Told the name of a lost host, which is published to no more.
    """

    def __init__(
        self,
        make: Callable[[int, int], Awaitable[HostT]],
        admit: Callable[[HostT], Awaitable[None]],
        *,
        num_hosts: int,
        budget: RestartBudget,
        deadline_s: float,
        tell: Tell = lambda event, host, reason: None,
        discard: Callable[[str], None] = lambda name: None,
    ) -> None:
        self._make, self._admit, self._tell, self._discard = make, admit, tell, discard
        self._num_hosts, self._budget, self._deadline_s = num_hosts, budget, deadline_s
        self._rotation: dict[int, HostT] = {}
        self._num_restarts = [0] * num_hosts
        self._restarts: dict[int, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    async def open(self) -> tuple[HostT, ...]:
        """Start all hosts at once; they join the rotation here and are published to as one."""
        starts = (self._make(index, 0) for index in range(self._num_hosts))
        hosts = await all_started(starts, lambda host: host.end())
        self._rotation = dict(enumerate(hosts))
        return tuple(hosts)

    async def close(self) -> None:
        """End restarts and hosts."""
        hosts, self._rotation = list(self._rotation.values()), {}  # first: an end is not a loss
        for task in self._restarts.values():
            task.cancel()
        await asyncio.gather(*self._restarts.values(), return_exceptions=True)
        async with self._changed:
            self._restarts.clear()  # a task that had not begun yet has not left by itself
            self._changed.notify_all()
        await asyncio.gather(*(host.end() for host in hosts))

    def source(self, kind: EpisodeKind) -> PoolSource:
        """The pool as a `ports.RolloutSource` of one kind of episode."""
        return PoolSource(self, kind)

    async def play(self, kind: EpisodeKind, assignment: Assignment, member: int) -> Trajectory:
        """Play an episode, again from its start where a host is lost meanwhile.

        Seeds belong to assignment and member, so that another host plays the same episode.

        Raises:
            EngineError: no host is left, and none will come back.
        """
        while True:
            index, host = await self._host(assignment.ticket)
            try:
                # Waits for the episode; the host's own deadlines bound its turns.
                async with asyncio.timeout(self._deadline_s):
                    return await host.play(kind, assignment, member)
            except EngineLostError as error:
                self._lose(index, host, str(error))
            except TimeoutError:
                self._lose(index, host, f"an episode took longer than {self._deadline_s:g} s")

    def quarantine(self, name: str, reason: str) -> None:
        """Take a host that did not confirm a publish out of rotation, and start it anew."""
        for index, host in list(self._rotation.items()):
            if host.name == name:
                self._lose(index, host, reason)

    async def _host(self, ticket: int) -> tuple[int, HostT]:
        """The host of a group: always the same while the rotation stays the same."""
        async with self._changed:
            # Freed by a restart that ends, well or not; each is bounded by its own deadlines.
            await self._changed.wait_for(lambda: self._rotation or not self._restarts)
            if not self._rotation:
                raise EngineError(f"no rollout actor is left, and there are no more {self._budget}")
            standing = sorted(self._rotation)
            index = standing[ticket % len(standing)]
            return index, self._rotation[index]

    def _lose(self, index: int, host: HostT, reason: str) -> None:
        if self._rotation.get(index) is not host:
            return  # another of its episodes has said so already
        del self._rotation[index]
        self._discard(host.name)
        self._tell(Event.ENGINE_LOST, host.name, reason)
        self._restarts[index] = asyncio.create_task(self._restart(index, host))

    async def _restart(self, index: int, former: HostT) -> None:
        try:
            with suppress(MiniverlError):
                await former.end()
            while self._budget.spend():
                self._num_restarts[index] += 1
                if await self._is_back(index):
                    return
        finally:
            async with self._changed:
                del self._restarts[index]
                self._changed.notify_all()

    async def _is_back(self, index: int) -> bool:
        try:
            host = await self._make(index, self._num_restarts[index])
        except MiniverlError as error:
            self._tell(Event.ENGINE_LOST, f"engine-{index}", f"it did not start: {error}")
            return False
        try:
            await self._admit(host)
        except MiniverlError as error:
            self._tell(Event.ENGINE_LOST, host.name, f"it did not take the weights: {error}")
            await host.end()
            return False
        except asyncio.CancelledError:
            await host.end()  # the pool closes, and knows hosts in rotation only
            raise
        async with self._changed:
            self._rotation[index] = host
            self._changed.notify_all()
        self._tell(Event.ENGINE_RESTARTED, host.name, "")
        return True


class PoolSource:
    """Implements `ports.RolloutSource` over a pool."""

    def __init__(self, pool: RolloutPool[Any], kind: EpisodeKind) -> None:
        self._pool, self._kind = pool, kind

    async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
        """See `ports.RolloutSource`."""
        return await self._pool.play(self._kind, assignment, member)
