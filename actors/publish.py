"""Which engines hold the published weights: publishing to all, admitting one, leaving some out.

An engine is in rotation while it has confirmed the newest publish, version and checksum. One that
does not confirm leaves, since it may hold anything. One that comes back is admitted only after it
has confirmed the published weights: sent again to it alone while the student still holds them,
else with the next publish.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from actors.weight_transfer import BroadcastGroups, RemoteEngine, RemoteRank, WeightTransfer
from miniverl_dist.config.cluster import PublishConfig
from miniverl_dist.errors import DeadlineError, PublishError, StudentLostError
from miniverl_dist.ports import PublishReceipt


class RayWeightStore:
    """Implements `ports.WeightStore` for ranks and engines in other processes.

    Args:
        ranks: The student's ranks, asked for at every transfer: a rebuilt student has new ones.
        engines: Those that the first publish goes to.
        config: Transport.
        deadline_s: For one publish, all of it.
        on_quarantine: Told engine and reason when one leaves the rotation.
    """

    def __init__(
        self,
        ranks: Callable[[], Sequence[RemoteRank]],
        engines: Sequence[RemoteEngine],
        config: PublishConfig,
        *,
        deadline_s: float,
        on_quarantine: Callable[[str, str], None] = lambda engine, reason: None,
    ) -> None:
        self._ranks = ranks
        self._rotation = {engine.name: engine for engine in engines}
        self._deadline_s = deadline_s
        self._on_quarantine = on_quarantine
        self._groups = BroadcastGroups() if config.transport == "broadcast" else None
        self._joining: dict[str, tuple[RemoteEngine, asyncio.Future[None]]] = {}
        self._has_joiner = asyncio.Event()
        self._transferring = asyncio.Lock()
        self._resending: asyncio.Task[bool] | None = None
        self._is_publishing = False
        self._receipt: PublishReceipt | None = None

    @property
    def rotation(self) -> tuple[str, ...]:
        """Engines that hold the newest publish (before the first: those that it goes to)."""
        return tuple(self._rotation)

    def discard(self, name: str) -> None:
        """Take out an engine that is known to be lost; it is not told of as quarantined."""
        self._rotation.pop(name, None)

    async def publish(self, policy_version: int) -> PublishReceipt:
        """Bring the student's weights to every engine; see `ports.WeightStore`.

        Engines that wait to be admitted take part. With none in rotation, waits for one.

        Raises:
            PublishError: not one engine confirmed, or the ranks could not send.
            StudentLostError: a rank is gone, or did not answer before the deadline.
        """
        self._is_publishing = True
        if self._resending is not None:
            # Its engine takes part in this publish.
            self._resending.cancel()
        try:
            # Freed by the resend that was just ended.
            async with self._transferring:
                return await self._publish(policy_version)
        finally:
            self._is_publishing = False

    async def admit(self, engine: RemoteEngine) -> None:
        """Bring the published weights to an engine that has come back; then it is in rotation.

        Where the student has moved on, or nothing is published yet, waits for the next publish.

        Raises:
            PublishError: it did not confirm.
        """
        joined: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._joining[engine.name] = (engine, joined)
        self._has_joiner.set()
        try:
            # Freed by the transfer that runs, within its deadline.
            async with self._transferring:
                if not joined.done() and await self._resend(engine):
                    return
            # Freed by the next publish.
            await joined
        finally:
            self._joining.pop(engine.name, None)

    async def _publish(self, policy_version: int) -> PublishReceipt:
        started_s = asyncio.get_running_loop().time()
        await self._wait_for_an_engine(policy_version)
        joining = dict(self._joining)
        engines = self._rotation | {name: engine for name, (engine, _) in joining.items()}
        transfer = WeightTransfer(
            policy_version,
            self._ranks(),
            list(engines.values()),
            self._deadline_s,
            asyncio.get_running_loop().time() - started_s,
            self._groups,
        )
        try:
            checksum = await transfer.run()
        except DeadlineError as error:
            raise StudentLostError(str(error)) from error
        self._rotation = {
            engine.name: engine
            for engine in transfer.standing
            # Not one that was discarded meanwhile.
            if engine.name in self._rotation or engine.name in joining
        }
        for name, reason in transfer.failed.items():
            if name not in joining:
                self._on_quarantine(name, reason)
        for name, (_, joined) in joining.items():
            if joined.done():  # whoever wanted it admitted has given up
                self._rotation.pop(name, None)
            elif name in transfer.failed:
                joined.set_exception(PublishError(f"{name}: {transfer.failed[name]}"))
            else:
                joined.set_result(None)
        if not self._rotation:
            raise PublishError(
                f"no engine confirmed policy version {policy_version}: "
                f"{'; '.join(f'{name}: {why}' for name, why in transfer.failed.items())}"
            )
        self._receipt = PublishReceipt(
            policy_version,
            checksum,
            tuple(self._rotation),
            tuple(name for name in transfer.failed if name not in joining),
        )
        return self._receipt

    async def _wait_for_an_engine(self, policy_version: int) -> None:
        if self._rotation or self._joining:
            return
        self._has_joiner.clear()
        try:
            # Freed by `admit`, when an engine has been restarted.
            async with asyncio.timeout(self._deadline_s / 2):
                await self._has_joiner.wait()
        except TimeoutError as error:
            raise PublishError(
                f"no engine to publish policy version {policy_version} to, and none came back "
                f"within half of {self._deadline_s:g} s (deadlines.publish_s)"
            ) from error

    async def _resend(self, engine: RemoteEngine) -> bool:
        """Send the published weights again; False where that must wait for the next publish."""
        receipt = self._receipt
        if receipt is None or self._is_publishing:
            return False
        self._resending = asyncio.create_task(self._is_resent(engine, receipt))
        try:
            # Freed within a publish's deadline, or by a publish, which takes the engine along.
            await asyncio.wait([self._resending])
            return not self._resending.cancelled() and self._resending.result()
        finally:
            self._resending.cancel()
            self._resending = None

    async def _is_resent(self, engine: RemoteEngine, receipt: PublishReceipt) -> bool:
        failed: dict[str, str] = {}
        try:
            transfer = WeightTransfer(
                receipt.policy_version,
                self._ranks(),
                [engine],
                self._deadline_s,
                groups=self._groups,
                failed=failed,
            )
            await transfer.run(expected=receipt.checksum)
        except StudentLostError:
            # It will be rebuilt, and publish. Not the engine's fault, whatever it ran into.
            return False
        except (DeadlineError, PublishError):
            # The student is busy with its next update, or past it.
            is_sent = False
        else:
            is_sent = True
        if failed:
            raise PublishError(f"{engine.name}: {failed[engine.name]}")
        if is_sent:
            self._rotation[engine.name] = engine
        return is_sent
