"""Ray actors as the ends of a weight transfer.

The actors' methods carry the names used here: ``open_publish, next_bucket, close_publish,
broadcast_endpoint, connect_broadcast`` of a student rank; ``begin_weights, add_weights,
finish_weights, connect_broadcast`` of a rollout host.
"""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass, replace
from typing import Any

from actors.outbox import GroupAddress
from actors.ray_calls import remote
from miniverl_dist.errors import EngineLostError, StudentLostError
from rollout_server.inbox import BucketMessage


@dataclass(frozen=True)
class RayRank:
    """Implements ``weight_transfer.RemoteRank``.

    Two of one actor are equal: a broadcast group stands as long as its members are the same.
    """

    handle: Any
    """The actor."""
    name: str
    """For messages."""

    async def open(self, policy_version: int) -> int:
        """See ``RemoteRank``."""
        held: int = await self._ask(self.handle.open_publish.remote(policy_version))
        return held

    async def next(self) -> BucketMessage | None:
        """See ``RemoteRank``."""
        message: BucketMessage | None = await self._ask(self.handle.next_bucket.remote())
        return message

    async def close(self) -> dict[str, str]:
        """See ``RemoteRank``."""
        digests: dict[str, str] = await self._ask(self.handle.close_publish.remote())
        return digests

    async def endpoint(self) -> tuple[str, int] | None:
        """See ``RemoteRank``."""
        found: tuple[str, int] | None = await self._ask(self.handle.broadcast_endpoint.remote())
        return found

    async def connect(self, address: GroupAddress) -> None:
        """See ``RemoteRank``."""
        await self._ask(self.handle.connect_broadcast.remote(address))

    async def _ask(self, call: Awaitable[Any]) -> Any:  # noqa: ANN401 - any result
        return await remote(call, self.name, StudentLostError)


class RayEngine:
    """Implements ``weight_transfer.RemoteEngine``.

    Args:
        handle: The actor.
        name: Of the engine.
    """

    def __init__(self, handle: Any, name: str) -> None:  # noqa: ANN401 - Ray types no handle
        self._handle, self.name = handle, name

    async def begin(self, policy_version: int) -> None:
        """See ``RemoteEngine``."""
        await self._ask(self._handle.begin_weights.remote(policy_version))

    async def add(self, message: BucketMessage) -> None:
        """See ``RemoteEngine``."""
        # As an argument of its own, Ray hands a reference over as what it refers to: views of
        # shared memory. Inside the message it would stay a reference.
        described = replace(message, payload=None)
        await self._ask(self._handle.add_weights.remote(described, message.payload))

    async def finish(self, checksum: str) -> tuple[int, str]:
        """See ``RemoteEngine``."""
        confirmed: tuple[int, str] = await self._ask(self._handle.finish_weights.remote(checksum))
        return confirmed

    async def connect(self, address: GroupAddress) -> None:
        """See ``RemoteEngine``."""
        await self._ask(self._handle.connect_broadcast.remote(address))

    async def _ask(self, call: Awaitable[Any]) -> Any:  # noqa: ANN401 - any result
        return await remote(call, self.name, EngineLostError)
