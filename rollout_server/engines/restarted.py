"""An engine in this process whose server may die: started anew with the weights it served.

Across processes the pool does this, with another actor (``actors.rollout_pool``).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from miniverl_dist.errors import EngineLostError, PublishError
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines.base import Engine

SpendsRestart = Callable[[], bool]
"""Takes one restart; False when there is none left."""
TellsLoss = Callable[[str, str], None]
"""(engine, reason); an empty reason: it is back."""


@runtime_checkable
class RestartableEngine(Engine, Protocol):
    """An engine with a server of its own."""

    async def restart(self, snapshot: WeightSnapshot) -> str:
        """End the server, start it anew with these weights; returns their checksum."""


class RestartedEngine:
    """Answers a request again after a restart: prompts are whole, so nothing is lost but time.

    Args:
        engine: Behind it.
        spend: The budget of restarts.
        tell: Told of each loss and each return.
    """

    def __init__(self, engine: RestartableEngine, spend: SpendsRestart, tell: TellsLoss) -> None:
        self._engine, self._spend, self._tell = engine, spend, tell
        self._snapshot: WeightSnapshot | None = None
        self._repairing = asyncio.Lock()
        self._num_restarts = 0

    @property
    def name(self) -> str:
        """See ``Engine``."""
        return self._engine.name

    @property
    def weight_version(self) -> int:
        """See ``Engine``."""
        return self._engine.weight_version

    async def start(self) -> None:
        """See ``Engine``."""
        await self._engine.start()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """See ``Engine``.

        Raises:
            EngineLostError: the server is gone, and the budget is used up.
        """
        while True:
            # Waits for a restart, during which the engine holds no weights.
            async with self._repairing:
                num_restarts = self._num_restarts
            try:
                return await self._engine.generate(request)
            except EngineLostError as error:
                await self._repair(num_restarts, error)

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """See ``Engine``."""
        checksum = await self._engine.load_weights(snapshot)
        self._snapshot = snapshot
        return checksum

    async def close(self) -> None:
        """See ``Engine``."""
        await self._engine.close()

    async def _repair(self, num_restarts: int, lost: EngineLostError) -> None:
        """Restart once for all requests that have met the same loss."""
        # Waits for the restart that another request has begun, which has deadlines of its own.
        async with self._repairing:
            if self._num_restarts != num_restarts:
                return
            self._tell(self.name, str(lost))
            while self._snapshot is not None and self._spend():
                try:
                    await self._engine.restart(self._snapshot)
                except PublishError as error:
                    self._tell(self.name, f"it did not start: {error}")
                    continue
                self._num_restarts += 1
                self._tell(self.name, "")
                return
        raise lost
