"""Ends of a weight transfer in this process: real outboxes and inboxes, one fault at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actors.outbox import GroupAddress, WeightOutbox
from miniverl_dist.config.cluster import PublishConfig
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import NamedArrays, weights_checksum
from rollout_server.inbox import BucketMessage, Bytes, WeightInbox


@dataclass
class FakeBackend:
    """Exports fixed buckets."""

    buckets: list[Mapping[str, Any]]
    policy_version: int = 1
    num_exported: int = 0

    def export(self, bucket_bytes: int) -> Iterator[Mapping[str, Any]]:
        for bucket in self.buckets:
            self.num_exported += 1
            yield bucket


@dataclass
class FakeEngine:
    """Holds the weights it was given last."""

    weight_version: int = -1
    weights: NamedArrays = field(default_factory=dict)
    refusal: Exception | None = None

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        if self.refusal is not None:
            raise self.refusal
        # What arrives is the sender's no more than the transport's: a copy tells them apart.
        self.weights = {name: array.copy() for name, array in snapshot.tensors.items()}
        self.weight_version = snapshot.policy_version
        return weights_checksum(self.weights)


def copies(parts: list[Bytes]) -> list[Bytes]:
    """An object store of one process."""
    return [part.copy() for part in parts]


class PlainRank:
    """A rank behind the remote protocol; ``faults`` maps a method's name to what it raises."""

    def __init__(
        self, *buckets: Mapping[str, Any], rank: int = 0, log: list[str] | None = None
    ) -> None:
        self.backend = FakeBackend(list(buckets))
        self.outbox = WeightOutbox(self.backend, PublishConfig(), rank=rank, put=copies)
        self.rank, self.log = rank, log if log is not None else []
        self.faults: dict[str, Exception] = {}
        self.hangs_in: str | None = None

    async def open(self, policy_version: int) -> int:
        await self._step("open")
        return self.outbox.open(policy_version)

    async def next(self) -> BucketMessage | None:
        await self._step("next")
        return self.outbox.next()

    async def close(self) -> dict[str, str]:
        await self._step("close")
        return self.outbox.close()

    async def endpoint(self) -> tuple[str, int] | None:
        return "host", self.rank

    async def connect(self, address: GroupAddress) -> None:
        await self._step("connect")

    async def _step(self, name: str) -> None:
        await asyncio.sleep(0)
        self.log.append(f"rank {self.rank} {name}")
        if self.hangs_in == name:
            await asyncio.Event().wait()
        if name in self.faults:
            raise self.faults[name]


class PlainEngine:
    """An engine behind the remote protocol; faults as in ``PlainRank``."""

    def __init__(self, name: str, log: list[str] | None = None) -> None:
        self.name, self.log = name, log if log is not None else []
        self.engine = FakeEngine()
        self.inbox = WeightInbox(self.engine)
        self.faults: dict[str, Exception] = {}
        self.hangs_in: str | None = None
        self.recovers = False
        """Whether each fault happens only once."""
        self.corrupts = False
        self.version_shift = 0
        self.addresses: list[GroupAddress] = []

    @property
    def weights(self) -> NamedArrays:
        return self.engine.weights

    async def begin(self, policy_version: int) -> None:
        await self._step("begin")
        await self.inbox.begin(policy_version)

    async def add(self, message: BucketMessage) -> None:
        await self._step("add")
        payload: list[NDArray[Any]] = message.payload
        if self.corrupts:
            payload = [part ^ 1 for part in payload]
        await self.inbox.add(message, payload)
        self.log.append(f"{self.name} added {message.index}")

    async def finish(self, checksum: str) -> tuple[int, str]:
        await self._step("finish")
        version, found = await self.inbox.finish(checksum)
        return version + self.version_shift, found

    async def connect(self, address: GroupAddress) -> None:
        self.addresses.append(address)
        await self._step("connect")

    async def _step(self, name: str) -> None:
        self.log.append(f"{self.name} {name}")
        if self.hangs_in == name:
            await asyncio.Event().wait()
        if name in self.faults:
            raise self.faults.pop(name) if self.recovers else self.faults[name]


def some_weights(seed: int = 0) -> dict[str, NDArray[Any]]:
    """Tensors of several dtypes and shapes, one without dimensions and one without elements."""
    import ml_dtypes

    draw = np.random.default_rng(seed)
    return {
        "matrix": draw.standard_normal((3, 4)).astype(np.float32),
        "half": draw.standard_normal((2, 3, 5)).astype(ml_dtypes.bfloat16),
        "scalar": np.array(draw.standard_normal(), dtype=np.float64),
        "none": np.empty((0, 7), dtype=np.float32),
        "ints": draw.integers(0, 9, 11),
    }
