"""The receiving side of a publish: buckets of bytes become one snapshot for one engine.

A publish arrives as ``begin``, any number of ``add`` and one ``finish``. The engine hears of it
only in ``finish``, when everything is here: whatever ends a publish before that leaves the former
weights serving. Weights are copied out of the transport as they come, so that shared memory never
holds more than the buckets in flight.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from miniverl_dist.errors import PublishError
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import dtype_of

Bytes = NDArray[np.uint8]
"""[n] raw memory of one tensor."""


@dataclass(frozen=True)
class TensorSpec:
    """What the bytes of one tensor mean."""

    name: str
    dtype: str
    """Name as numpy and ``ml_dtypes`` spell it, such as ``float32`` or ``bfloat16``."""
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in memory."""
        return prod(self.shape) * dtype_of(self.dtype).itemsize


@dataclass(frozen=True)
class BucketMessage:
    """One bucket of one sending rank; what travels beside the bytes."""

    policy_version: int
    sender: int
    """Rank that sent it."""
    index: int
    """Place among the sender's buckets, from 0."""
    tensors: tuple[TensorSpec, ...]
    """Empty where the rank had nothing to send."""
    payload: Any = None
    """Where the bytes are: a reference to (or the) list of byte arrays, a file name, or None for a
    broadcast, in which a sender's buckets come in the order of ``index``."""

    @property
    def num_bytes(self) -> int:
        """Size of all its tensors."""
        return sum(spec.num_bytes for spec in self.tensors)


class WeightReceiver(Protocol):
    """An engine, as far as a publish is concerned; see ``rollout_server.engines.base.Engine``."""

    @property
    def weight_version(self) -> int:
        """Policy version the engine samples under."""

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """Quiesce, load, resume; returns the checksum of what the engine now holds."""


class WeightInbox:
    """Collects the buckets of one publish at a time and hands them to an engine.

    The memory that buckets are copied to is kept for the next publish, since fresh memory costs
    more than the copy itself.

    Args:
        engine: Gets the snapshot. Its checksum must come from what it then holds.
        receive: Takes a message off the wire where the bytes do not come with it (broadcast):
            returns the bytes of its tensors, valid until the next call. Runs in a thread.
        keeps_arrays: The engine goes on to use the snapshot's arrays as its weights, until it has
            accepted others. Then two sets of arrays take turns, and none is copied twice.
    """

    def __init__(
        self,
        engine: WeightReceiver,
        *,
        receive: Callable[[BucketMessage], Sequence[Bytes]] | None = None,
        keeps_arrays: bool = False,
    ) -> None:
        self._engine = engine
        self._receive = receive
        self._keeps_arrays = keeps_arrays
        # A call that the driver has given up may still copy in its thread when the next begins.
        self._lock = threading.Lock()
        self._version: int | None = None
        self._num_begun = 0
        self._received: dict[str, NDArray[Any]] = {}
        self._spare: dict[str, NDArray[Any]] = {}
        self._serving: dict[str, NDArray[Any]] = {}
        """What the engine may be using; only where it keeps arrays."""

    async def begin(self, policy_version: int) -> None:
        """Expect the weights of a version; an unfinished publish is discarded."""
        # Waits for a copy that is still running; nothing else holds the lock.
        await asyncio.to_thread(self._start, policy_version)

    async def add(self, message: BucketMessage, payload: object = None) -> None:
        """Take one bucket.

        Args:
            message: Names, dtypes and shapes.
            payload: Its bytes, or where they are, as in ``BucketMessage.payload``.

        Raises:
            PublishError: no publish has begun; the bytes are not there, are not as many as the
                message says; or a tensor came twice.
        """
        await asyncio.to_thread(self._take, message, payload, self._num_begun)

    async def finish(self, checksum: str) -> tuple[int, str]:
        """Hand the snapshot to the engine, which waits for its running requests.

        Args:
            checksum: Of all the weights, as the senders counted it.

        Returns:
            Version and checksum that the engine says it now holds.

        Raises:
            PublishError: no publish has begun, or the engine refuses the weights.
        """
        if self._version is None:
            raise PublishError(
                "finish without begin: nothing was received since the last publish ended"
            )
        tensors, version = self._received, self._version
        # Not spare while the engine reads them, however long it waits and whatever comes next.
        self._received, self._version = {}, None
        found = await self._engine.load_weights(WeightSnapshot(version, tensors, checksum))
        if self._keeps_arrays:
            tensors, self._serving = self._serving, tensors
        self._spare = self._spare or tensors
        return self._engine.weight_version, found

    def _start(self, policy_version: int) -> None:
        with self._lock:
            self._version = policy_version
            self._num_begun += 1
            self._spare |= self._received
            self._received = {}

    def _take(self, message: BucketMessage, payload: object, publish: int) -> None:
        parts = self._parts(message, payload)
        if len(parts) != len(message.tensors):
            raise PublishError(
                f"{_place(message)} brought {len(parts)} tensors, expected {len(message.tensors)}"
            )
        with self._lock:
            if message.policy_version != self._version or publish != self._num_begun:
                raise PublishError(
                    f"{_place(message)} of policy version {message.policy_version} came while "
                    f"{self._version} was expected: another publish has begun since"
                )
            for spec, part in zip(message.tensors, parts, strict=True):
                if spec.name in self._received:
                    raise PublishError(f"{_place(message)} brings {spec.name!r} a second time")
                self._received[spec.name] = self._copied(spec, part, message)

    def _copied(self, spec: TensorSpec, part: Bytes, message: BucketMessage) -> NDArray[Any]:
        if part.nbytes != spec.num_bytes:
            raise PublishError(
                f"{_place(message)} holds {part.nbytes} bytes of {spec.name!r}, expected "
                f"{spec.num_bytes} for {spec.dtype} {spec.shape}"
            )
        array = self._spare.pop(spec.name, None)
        if array is None or array.shape != spec.shape or array.dtype.name != spec.dtype:
            array = np.empty(spec.shape, dtype_of(spec.dtype))
        array.reshape(-1).view(np.uint8)[:] = part
        return array

    def _parts(self, message: BucketMessage, payload: object) -> Sequence[Bytes]:
        if isinstance(payload, str):
            return _read_shard(Path(payload), message)
        if payload is not None:
            parts: Sequence[Bytes] = payload  # type: ignore[assignment]
            return parts
        if self._receive is None:
            raise PublishError(f"{_place(message)} is a broadcast, but this engine has no group")
        return self._receive(message)


def _place(message: BucketMessage) -> str:
    return f"bucket {message.index} of rank {message.sender}"


def _read_shard(path: Path, message: BucketMessage) -> list[Bytes]:
    """Bytes of a message's tensors from its safetensors file."""
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise PublishError(
            f"cannot read {_place(message)} from {path.name}: {error}: do all nodes share the run "
            f"directory? (publish.transport: disk needs that)"
        ) from error
    missing = [spec.name for spec in message.tensors if spec.name not in found]
    if missing:
        raise PublishError(f"{path.name} lacks {missing[0]!r} ({len(missing)} tensors missing)")
    return [found[spec.name].reshape(-1).view(np.uint8) for spec in message.tensors]
