"""Ends of a weight transfer as Ray actors: what a student rank and a rollout host do of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch

from actors.broadcast_group import BroadcastReceiver, BroadcastSender
from actors.outbox import GroupAddress, WeightOutbox
from miniverl_dist.config.cluster import PublishConfig
from rollout_server.inbox import BucketMessage, Bytes, WeightInbox
from tests.support.toy import VOCABULARY_IDS, tiny_config
from tests.support.toy_engine import ToyEngine, weights
from tests.support.weight_ends import FakeBackend

HOST = "127.0.0.1"


class RankActor:
    """Publishes a toy model, another one in every version."""

    def __init__(self, config: PublishConfig, directory: Path) -> None:
        torch.set_num_threads(1)
        self._backend = FakeBackend([])
        self._group = BroadcastSender(0, HOST)
        self._outbox = WeightOutbox(
            self._backend, config, directory=directory, broadcast=self._group.group
        )

    def hold(self, policy_version: int) -> str:
        """Take up the weights of a version, as torch tensors; returns their checksum."""
        snapshot = weights(policy_version, seed=policy_version)
        tensors = {name: torch.from_numpy(array) for name, array in snapshot.tensors.items()}
        names = list(tensors)
        self._backend.policy_version = policy_version
        self._backend.buckets = [{n: tensors[n] for n in names[i::3]} for i in range(3)]
        return snapshot.checksum

    def open_publish(self, policy_version: int) -> int:
        return self._outbox.open(policy_version)

    def next_bucket(self) -> BucketMessage | None:
        return self._outbox.next()

    def close_publish(self) -> dict[str, str]:
        return self._outbox.close()

    def broadcast_endpoint(self) -> tuple[str, int]:
        return self._group.endpoint

    def connect_broadcast(self, address: GroupAddress) -> None:
        self._group.connect(address)


class EngineActor:
    """Loads what it receives into a toy engine; ``hangs_in`` is a method that never returns."""

    def __init__(self, name: str, hangs_in: str | None = None) -> None:
        torch.set_num_threads(1)
        self._hangs_in = hangs_in
        self._groups = BroadcastReceiver(name, HOST)
        self._engine = ToyEngine(tiny_config(), VOCABULARY_IDS, name)
        self._inbox = WeightInbox(self._engine, receive=self._groups.receive)

    async def version(self) -> int:
        return self._engine.weight_version

    async def begin_weights(self, policy_version: int) -> None:
        await self._inbox.begin(policy_version)

    async def add_weights(
        self, message: BucketMessage, payload: Sequence[Bytes] | str | None
    ) -> None:
        if self._hangs_in == "add":
            await asyncio.Event().wait()
        await self._inbox.add(message, payload)

    async def finish_weights(self, checksum: str) -> tuple[int, str]:
        return await self._inbox.finish(checksum)

    async def connect_broadcast(self, address: GroupAddress) -> None:
        await asyncio.to_thread(self._groups.connect, address)
