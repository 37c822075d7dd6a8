"""Publish: a policy version counts as published when every engine has confirmed it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Protocol

from miniverl_dist.errors import MiniverlError, PublishError
from miniverl_dist.ports import PublishReceipt, WeightSnapshot


class WeightReceiver(Protocol):
    """An engine, as far as a publish is concerned."""

    @property
    def name(self) -> str:
        """Name in receipts and events."""

    @property
    def weight_version(self) -> int:
        """Policy version the engine samples under."""

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """Quiesce, load, resume; returns the checksum of what the engine now holds."""


class DirectWeightStore:
    """Implements `ports.WeightStore` for a student and engines in this process.

    An engine that fails, is late, or confirms another version or checksum leaves the rotation: it
    may hold anything, and sampling under an unknown version would go unnoticed.
    """

    def __init__(
        self,
        snapshot: Callable[[int], WeightSnapshot],
        engines: Sequence[WeightReceiver],
        *,
        deadline_s: float,
        on_quarantine: Callable[[str, str], None] = lambda engine, reason: None,
    ) -> None:
        self._snapshot, self._rotation = snapshot, list(engines)
        self._deadline_s = deadline_s
        self._on_quarantine = on_quarantine

    async def publish(self, policy_version: int) -> PublishReceipt:
        """Load a snapshot everywhere; see `ports.WeightStore`."""
        snapshot = self._snapshot(policy_version)
        if snapshot.policy_version != policy_version:
            raise PublishError(
                f"the student holds version {snapshot.policy_version}, asked for {policy_version}"
            )
        reasons = await asyncio.gather(*(self._load(engine, snapshot) for engine in self._rotation))
        confirmed, quarantined = [], []
        for engine, reason in zip(self._rotation, reasons, strict=True):
            if reason is None:
                confirmed.append(engine)
            else:
                quarantined.append(engine.name)
                self._on_quarantine(engine.name, reason)
        self._rotation = confirmed
        if not confirmed:
            raise PublishError(
                f"no engine confirmed policy version {snapshot.policy_version}: "
                f"{'; '.join(str(r) for r in reasons)}"
            )
        return PublishReceipt(
            snapshot.policy_version,
            snapshot.checksum,
            tuple(engine.name for engine in confirmed),
            tuple(quarantined),
        )

    async def _load(self, engine: WeightReceiver, snapshot: WeightSnapshot) -> str | None:
        """None when confirmed, else why not."""
        try:
            # Waits for the engine's running requests; freed when they finish.
            async with asyncio.timeout(self._deadline_s):
                found = await engine.load_weights(snapshot)
        except TimeoutError:
            return f"no confirmation within {self._deadline_s} s (deadlines.publish_s)"
        except MiniverlError as error:
            return str(error)
        if found != snapshot.checksum:
            return f"checksum {found[:12]}, expected {snapshot.checksum[:12]}"
        if engine.weight_version != snapshot.policy_version:
            return f"version {engine.weight_version}, expected {snapshot.policy_version}"
        return None
