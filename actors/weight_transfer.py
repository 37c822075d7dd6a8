"""One transfer of weights from the student's ranks to engines, within one deadline.

::

    ranks.open, engines.begin -> [ ranks.next (bucket i+1) | engines.add (bucket i) ] ...
        -> ranks.close -> engines.finish -> version and checksum compared

All ranks are asked for their next bucket together, since gathering one is a collective, and one
bucket ahead, so that sending and receiving overlap. An engine that is lost, late or wrong is left
behind with a reason; a rank that is lost ends the transfer. Before the weights are all there, an
engine may take half of the time that is left for each step, so that one which hangs leaves the
others time to finish.

A broadcast group fails as a whole. Those of its engines that still answer are not to blame: the
transfer starts again with them, in a new group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from actors.outbox import GroupAddress
from miniverl_dist.errors import DeadlineError, MiniverlError, PublishError
from miniverl_dist.schemas.weights import combined_digest
from rollout_server.inbox import BucketMessage

T = TypeVar("T")


class RemoteRank(Protocol):
    """A student rank.

    Raises ``StudentLostError`` where it is gone, ``PublishError`` where only this publish failed.
    """

    async def open(self, policy_version: int) -> int:
        """See ``WeightOutbox.open``."""

    async def next(self) -> BucketMessage | None:
        """See ``WeightOutbox.next``."""

    async def close(self) -> dict[str, str]:
        """See ``WeightOutbox.close``."""

    async def endpoint(self) -> tuple[str, int] | None:
        """Host and port where its broadcast group meets; None for a rank that sends nothing."""

    async def connect(self, address: GroupAddress) -> None:
        """See ``BroadcastSender.connect``."""


class RemoteEngine(Protocol):
    """An engine.

    Raises ``EngineLostError`` where it is gone, ``PublishError`` where only this publish failed.
    """

    @property
    def name(self) -> str:
        """Unique within a run."""

    async def begin(self, policy_version: int) -> None:
        """See ``WeightInbox.begin``."""

    async def add(self, message: BucketMessage) -> None:
        """See ``WeightInbox.add``."""

    async def finish(self, checksum: str) -> tuple[int, str]:
        """See ``WeightInbox.finish``."""

    async def connect(self, address: GroupAddress) -> None:
        """See ``BroadcastReceiver.connect``."""


@dataclass
class BroadcastGroups:
    """Which groups stand; outlives a transfer."""

    num_built: int = 0
    members: tuple[object, ...] = ()
    """Ranks and engines that are connected; empty where a group has broken."""


class _GroupBrokenError(PublishError):
    """A broadcast failed; whose fault it is, is not known yet."""


@dataclass
class WeightTransfer:
    """See the module.

    Raises nothing of an engine; what became of each is in ``failed``.
    """

    policy_version: int
    ranks: Sequence[RemoteRank]
    engines: Sequence[RemoteEngine]
    deadline_s: float
    """For all of it."""
    spent_s: float = 0.0
    """How much of that was spent before; the clock goes on here."""
    groups: BroadcastGroups | None = None
    """Given where the transport is ``broadcast``."""
    failed: dict[str, str] = field(default_factory=dict)
    """Engine -> why it did not confirm."""

    def __post_init__(self) -> None:
        self._ends_at = asyncio.get_running_loop().time() + self.deadline_s - self.spent_s
        self._broken: str | None = None
        self._group_size = 0

    @property
    def standing(self) -> list[RemoteEngine]:
        """Engines that have not failed."""
        return [engine for engine in self.engines if engine.name not in self.failed]

    @property
    def remaining_s(self) -> float:
        """Time left; never negative."""
        return max(0.0, self._ends_at - asyncio.get_running_loop().time())

    async def run(self, expected: str | None = None) -> str:
        """Bring the weights to every engine; returns their checksum.

        Args:
            expected: Checksum that the weights must have; no engine is given others.

        Raises:
            StudentLostError: a rank is gone.
            DeadlineError: a rank did not answer in time.
            PublishError: the ranks hold another version or other weights, or could not send.
        """
        checksum = combined_digest(await self._sent())
        if expected is not None and checksum != expected:
            raise PublishError(
                f"the student's weights have checksum {checksum[:12]}, expected {expected[:12]}: "
                f"they are no longer those of policy version {self.policy_version}"
            )

        async def finish(engine: RemoteEngine) -> None:
            # Waits for the engine's running requests.
            version, found = await engine.finish(checksum)
            if found != checksum:
                raise PublishError(f"checksum {found[:12]}, expected {checksum[:12]}")
            if version != self.policy_version:
                raise PublishError(f"version {version}, expected {self.policy_version}")

        await self._engines_do(finish, "confirm", self.remaining_s)
        return checksum

    async def _sent(self) -> dict[str, str]:
        """Send everything, anew where a broadcast group broke; digests of what was sent."""
        has_broken = False
        while self.standing:
            num_failed = len(self.failed)
            try:
                return await self._stream()
            except _GroupBrokenError as error:
                assert self.groups is not None
                self.groups.members = ()
                if has_broken and len(self.failed) == num_failed:
                    raise PublishError(f"every engine answers, but twice: {error}") from error
                has_broken = True
                self._broken = None
        return {}

    async def _stream(self) -> dict[str, str]:
        await self._open()
        messages = await self._next() if self.standing else None
        while messages is not None and self.standing:
            receiving = asyncio.create_task(self._receive(messages))
            try:
                messages = await self._next()
                await receiving
            except _GroupBrokenError:
                # Tells who is to blame: the engines that do not answer.
                await receiving
                raise
            finally:
                receiving.cancel()
            self._raise_if_broken()
        digests: dict[str, str] = {}
        for sent in await self._ranks_do(lambda rank: rank.close(), "close"):
            if twice := digests.keys() & sent.keys():
                raise PublishError(f"two ranks sent {min(twice)!r}: a tensor has one owner")
            digests |= sent
        return digests

    async def _open(self) -> None:
        opening = asyncio.create_task(
            self._engines_do(lambda engine: engine.begin(self.policy_version), "begin")
        )
        try:
            held = await self._ranks_do(lambda rank: rank.open(self.policy_version), "open")
            await opening
        finally:
            opening.cancel()
        for place, version in enumerate(held):
            if version != self.policy_version:
                raise PublishError(
                    f"rank {place} holds policy version {version}, asked to publish "
                    f"{self.policy_version}"
                )
        if self.groups is not None and self.standing:
            await self._connect(self.groups)

    async def _connect(self, groups: BroadcastGroups) -> None:
        """Build the groups unless they stand: one by one, in the order of the ranks, everywhere."""
        self._group_size = len(self.standing)
        if groups.members == (members := (*self.ranks, *self.standing)):
            return
        groups.members = ()
        names = tuple(engine.name for engine in self.standing)
        for place, rank in enumerate(self.ranks):
            found = await self._ranks_do(lambda rank: rank.endpoint(), "name an endpoint", [rank])
            if found[0] is None:
                continue
            groups.num_built += 1
            # Shorter than what an engine is given, so that those which came say so in time.
            address = GroupAddress(
                place, *found[0], groups.num_built, names, timeout_s=self.remaining_s / 4
            )
            await self._meet(rank, address)
        groups.members = members

    async def _meet(self, rank: RemoteRank, address: GroupAddress) -> None:
        joining = asyncio.create_task(
            self._engines_do(lambda engine: engine.connect(address), "join the broadcast group")
        )
        try:
            await self._ranks_do(lambda rank: rank.connect(address), "connect", [rank])
        except _GroupBrokenError:
            await joining
            raise
        else:
            await joining
        finally:
            joining.cancel()
        self._raise_if_broken()

    async def _next(self) -> list[BucketMessage] | None:
        """The ranks' next buckets without the empty ones; None behind the last."""
        messages = await self._ranks_do(lambda rank: rank.next(), "gather a bucket")
        found = [message for message in messages if message is not None]
        if not found:
            return None
        if len(found) < len(messages):
            raise PublishError(
                f"{len(messages) - len(found)} of {len(messages)} ranks have no bucket "
                f"{found[0].index} while the others do: ranks must walk in lockstep"
            )
        return [message for message in found if message.tensors]

    async def _receive(self, messages: Sequence[BucketMessage]) -> None:
        async def add(engine: RemoteEngine) -> None:
            # In the order of the ranks: so every engine is in the same broadcast at a time.
            for message in messages:
                await engine.add(message)

        index = messages[0].index if messages else 0
        await self._engines_do(add, f"take bucket {index}")

    async def _ranks_do(
        self,
        call: Callable[[RemoteRank], Awaitable[T]],
        doing: str,
        ranks: Sequence[RemoteRank] | None = None,
    ) -> list[T]:
        """Ask ranks at the same time; the first failure ends it, for the others may then hang."""
        asked = self.ranks if ranks is None else ranks
        try:
            async with asyncio.timeout_at(self._ends_at):
                return await asyncio.gather(*(call(rank) for rank in asked))
        except TimeoutError as error:
            raise DeadlineError(
                f"the student's ranks did not {doing} within what was left of "
                f"{self.deadline_s:g} s (deadlines.publish_s)"
            ) from error
        except PublishError as error:
            if self.groups is None:
                raise
            raise _GroupBrokenError(str(error)) from error

    async def _engines_do(
        self,
        call: Callable[[RemoteEngine], Awaitable[None]],
        doing: str,
        limit_s: float | None = None,
    ) -> None:
        """Ask all standing engines at the same time; notes those that fail."""
        is_final = limit_s is not None
        limit_s = self.remaining_s / 2 if limit_s is None else limit_s

        async def ask(engine: RemoteEngine) -> None:
            try:
                # Waits for the engine; freed by its answer, its death, or the limit.
                async with asyncio.timeout(limit_s):
                    await call(engine)
            except TimeoutError:
                self.failed[engine.name] = (
                    f"did not {doing} within {limit_s:.3g} s of {self.deadline_s:g} s "
                    f"(deadlines.publish_s)"
                )
            except PublishError as error:
                if self.groups is None or is_final:
                    self.failed[engine.name] = str(error)
                else:
                    self._broken = str(error)
            except MiniverlError as error:
                self.failed[engine.name] = str(error)

        await asyncio.gather(*(ask(engine) for engine in self.standing))

    def _raise_if_broken(self) -> None:
        if self.groups is None:
            return
        if self._broken is not None or len(self.standing) < self._group_size:
            raise _GroupBrokenError(self._broken or "an engine of the broadcast group is lost")
