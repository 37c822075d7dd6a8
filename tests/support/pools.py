"""Ranks, rollout actors and teacher servers without processes: they die, hang or fail on demand."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from actors.sources import EpisodeKind
from actors.supervisor import RestartBudget
from miniverl_dist.config.cluster import ClusterConfig
from miniverl_dist.errors import EngineLostError
from miniverl_dist.observability.events import Event
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.trajectory import Trajectory
from tests.fakes import FakeClock, trajectory

Answer = Callable[[], Awaitable[Any]]
"""What one rank does when it is asked anything."""


def answers(value: object) -> Answer:
    """A rank that does what it is asked."""

    async def answer() -> object:
        await asyncio.sleep(0)
        return value

    return answer


def raises(error: Exception, *, after_s: float = 0.0) -> Answer:
    """A rank that fails, the sooner the smaller ``after_s``."""

    async def answer() -> object:
        await asyncio.sleep(after_s)
        raise error

    return answer


def hangs(cancelled: list[str] | None = None) -> Answer:
    """A rank that is stuck; ``cancelled`` is told when its caller lets go of it."""

    async def answer() -> object:
        try:
            return await asyncio.Event().wait()
        except asyncio.CancelledError:
            if cancelled is not None:
                cancelled.append("let go")
            raise

    return answer


class FakeRanks:
    """`student_pool.RankGroup`: one behaviour per rank, which a test may change at any time."""

    def __init__(self, *ranks: Answer) -> None:
        self.ranks = ranks
        self.asked: list[tuple[object, ...]] = []
        self.num_ends = 0

    def call(self, method: str, *arguments: object) -> Sequence[Awaitable[Any]]:
        self.asked.append((method, *arguments))
        return [rank() for rank in self.ranks]

    async def end(self) -> None:
        await asyncio.sleep(0)
        self.num_ends += 1


def restart_budget(
    max_restarts: int, clock: FakeClock | None = None, *, window_s: float = 100.0
) -> RestartBudget:
    """A budget on a clock that stands still."""
    config = ClusterConfig(max_restarts=max_restarts, restart_window_s=window_s)
    return RestartBudget(config, clock or FakeClock())


class FakeHost:
    """`rollout_pool.RemoteHost`: plays at once, or, with a ``gate``, when that opens."""

    def __init__(self, name: str, gate: asyncio.Event | None = None) -> None:
        self.name, self.gate = name, gate
        self.played: list[tuple[EpisodeKind, str, int]] = []
        self.num_ends = 0
        self._death = asyncio.Event()

    async def play(self, kind: EpisodeKind, assignment: Assignment, member: int) -> Trajectory:
        self.played.append((kind, assignment.group_id, member))
        if self.gate is not None and not self._death.is_set():
            waits = [asyncio.ensure_future(event.wait()) for event in (self.gate, self._death)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()
        if self._death.is_set():
            raise EngineLostError(f"{self.name} is gone")
        return trajectory(f"by {self.name}", place=assignment, member=member)

    def die(self) -> None:
        """As a process that is killed: whoever waits for it is told."""
        self._death.set()

    async def end(self) -> None:
        self.num_ends += 1
        self.die()
        await asyncio.sleep(0.01)  # who waited for an episode hears of it before this returns


class FakeServer:
    """`teacher_pool.RemoteServer`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.stands = True
        self.num_ends = 0

    async def is_alive(self) -> bool:
        await asyncio.sleep(0)
        return self.stands

    async def end(self) -> None:
        await asyncio.sleep(0)
        self.stands = False
        self.num_ends += 1


class Told:
    """Events, as a pool tells them: (name, about whom, reason)."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, str]] = []

    def __call__(self, event: Event, what: str, reason: str) -> None:
        self.lines.append((event.value, what, reason))

    @property
    def names(self) -> list[tuple[str, str]]:
        """Without the reasons."""
        return [(event, what) for event, what, _ in self.lines]


async def until(is_true: Callable[[], object]) -> None:
    """Let the others run until something holds."""
    async with asyncio.timeout(60):
        while not is_true():  # noqa: ASYNC110 -- polls what has no event
            await asyncio.sleep(0)
