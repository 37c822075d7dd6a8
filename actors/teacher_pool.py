"""Teacher servers that a cluster run launches itself, behind the scorer's port.

The siblings of a group go to the same server, whose prefix cache they share. A server that is gone
is started anew within the budget, and what it was asked is asked again; any other refusal stands.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from actors.supervisor import RestartBudget, all_started
from actors.teacher_scoring import load_teacher
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, EngineError, MiniverlError
from miniverl_dist.generate_api.app import serving
from miniverl_dist.observability.events import Event
from miniverl_dist.ports import TeacherScorer
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal, TeacherResult
from miniverl_dist.schemas.trajectory import Trajectory
from teacher_server.app import build_teacher_app


class TeacherHost:
    """One scoring server in a process of its own. A plain class: Ray makes an actor of it."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        self._config, self._run_dir = config, run_dir
        self._stack = AsyncExitStack()

    async def start(self, host: str) -> str:
        """Load the model and serve it on a free port of ``host``; returns the URL."""
        from actors.builds import set_num_threads

        teacher = self._config.teacher
        if teacher is None or teacher.model is None:
            raise ConfigError("there is no teacher.model to serve")
        set_num_threads(self._config)
        app = build_teacher_app(load_teacher(teacher, self._run_dir))
        return await self._stack.enter_async_context(serving(app, host=host))

    async def ping(self) -> None:
        """Answer, as long as the process lives."""


class RemoteServer(Protocol):
    """A launched server (`actors.cluster` has Ray's)."""

    @property
    def url(self) -> str:
        """Where it answers."""

    async def is_alive(self) -> bool:
        """Whether its process still stands."""

    async def end(self) -> None:
        """End the process; may be repeated."""


Attach = Callable[[str], AbstractAsyncContextManager[TeacherScorer]]
"""URL -> the scorer that asks there."""


@dataclass
class _Place:
    """One server of the pool and the connection to it."""

    server: RemoteServer
    scorer: TeacherScorer
    connection: AsyncExitStack
    mending: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def end(self) -> None:
        """Disconnect, and end the server."""
        await self.connection.aclose()
        await self.server.end()


class TeacherPool:
    """Implements `ports.TeacherScorer` over servers of this run.

    Args:
        make: Starts server ``index``.
        attach: Connects to one.
        num_servers: At least 1.
        budget: Restarts, all servers together.
        tell: Writes events: (event, what, reason).
    """

    def __init__(
        self,
        make: Callable[[int], Awaitable[RemoteServer]],
        attach: Attach,
        *,
        num_servers: int,
        budget: RestartBudget,
        tell: Callable[[Event, str, str], None] = lambda event, what, reason: None,
    ) -> None:
        self._make, self._attach = make, attach
        self._num_servers, self._budget, self._tell = num_servers, budget, tell
        self._places: list[_Place] = []

    async def open(self) -> None:
        """Start all servers and connect."""
        starts = (self._place(index) for index in range(self._num_servers))
        self._places = await all_started(starts, lambda place: place.end())

    async def close(self) -> None:
        """Disconnect and end all servers."""
        places, self._places = self._places, []
        await asyncio.gather(*(place.end() for place in places))

    @property
    def teacher_id(self) -> str:
        """Name of the model that scores."""
        return self._places[0].scorer.teacher_id

    async def score(self, trajectory: Trajectory) -> TeacherResult:
        """See `ports.TeacherScorer`."""
        digest = hashlib.sha256(trajectory.group_id.encode()).digest()
        index = int.from_bytes(digest[:4], "big") % len(self._places)
        while True:
            place = self._places[index]
            result = await place.scorer.score(trajectory)
            if not isinstance(result, TeacherRefusal):
                return result
            is_away = result.reason is RefusalReason.UNAVAILABLE
            if not is_away or not await self._is_mended(index, place):
                return result

    async def _is_mended(self, index: int, place: _Place) -> bool:
        """Start a dead server anew; False where it lives, or must stay dead."""
        async with place.mending:
            if self._places[index] is not place:
                return True  # another trajectory's refusal has led to it already
            if await place.server.is_alive() or not self._budget.spend():
                return False
            self._tell(Event.ENGINE_LOST, f"teacher-{index}", f"{place.server.url} is gone")
            await place.server.end()  # one that only hangs would keep the place of the next
            try:
                self._places[index] = await self._place(index)
            except MiniverlError as error:
                self._tell(Event.ENGINE_LOST, f"teacher-{index}", f"it did not start: {error}")
                return False
            await place.connection.aclose()
            self._tell(Event.ENGINE_RESTARTED, f"teacher-{index}", "")
            return True

    async def _place(self, index: int) -> _Place:
        server = await self._make(index)
        connection = AsyncExitStack()
        try:
            scorer = await connection.enter_async_context(self._attach(server.url))
        except MiniverlError as error:
            await server.end()
            raise EngineError(f"the teacher server {server.url} cannot be used: {error}") from error
        return _Place(server, scorer, connection)
