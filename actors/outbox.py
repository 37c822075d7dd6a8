"""The sending side of a publish: one student rank's weights as a sequence of buckets.

All ranks are asked for their next bucket at the same time, since a bucket is gathered over the
ranks that share its tensors. A bucket leaves the rank as raw memory: numpy views that the object
store copies once, a safetensors file, or a broadcast. torch is touched only through the tensors
that the backend hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from miniverl_dist.config.cluster import PublishConfig
from miniverl_dist.errors import PublishError
from miniverl_dist.schemas.weights import tensor_digest
from rollout_server.inbox import BucketMessage, Bytes, TensorSpec


class ExportsWeights(Protocol):
    """A student rank, as far as a publish is concerned; see ``backends.base.StudentBackend``."""

    @property
    def policy_version(self) -> int:
        """Committed optimizer steps."""

    def export(self, bucket_bytes: int) -> Iterator[Mapping[str, Any]]:
        """The current weights, a bucket at a time, in lockstep with the other ranks."""


@dataclass(frozen=True)
class GroupAddress:
    """Where the members of a broadcast group find each other."""

    sender: int
    """Student rank that sends; member 0 of the group."""
    host: str
    port: int
    generation: int
    """How many times groups were built before: no two share a key in the store."""
    engines: tuple[str, ...]
    """The other members, in their order."""
    timeout_s: float
    """Of every wait inside the group."""


class Broadcasts(Protocol):
    """The sending end of a group; see ``actors.broadcast_group``."""

    def send(self, parts: Sequence[Bytes]) -> None:
        """Start to broadcast; the parts may change as soon as this returns."""

    def flush(self) -> None:
        """Wait until everything sent has arrived."""


def host_array(value: Any) -> NDArray[Any]:  # noqa: ANN401 - numpy array or torch tensor
    """A C-contiguous numpy array over a tensor's memory, copied only where it must be."""
    if isinstance(value, np.ndarray):
        # Not ascontiguousarray, which gives a scalar a dimension.
        return np.asarray(value, order="C")
    # Loads torch, which is loaded already: somebody made the tensor.
    from miniverl_dist.backends.tensors import as_numpy

    return as_numpy(value)


def _memory(array: NDArray[Any]) -> Bytes:
    view: Bytes = array.reshape(-1).view(np.uint8)
    return view


def put_in_object_store(parts: list[Bytes]) -> object:
    """Copy into Ray's shared memory; returns the reference."""
    import ray  # Only in an actor.

    return ray.put(parts)


class WeightOutbox:
    """Hands out the buckets of one publish at a time.

    Args:
        backend: Whose weights.
        config: Transport and bucket size.
        rank: Place among the student's ranks; names files and messages.
        directory: Where shards are written (``disk``); shared by all nodes.
        broadcast: Its end of the group that it sends to (``broadcast``); asked for when needed,
            since groups are rebuilt.
        put: Stores the bytes of a bucket for the engines (``object_store``).
    """

    def __init__(
        self,
        backend: ExportsWeights,
        config: PublishConfig,
        *,
        rank: int = 0,
        directory: Path | None = None,
        broadcast: Callable[[], Broadcasts] | None = None,
        put: Callable[[list[Bytes]], object] = put_in_object_store,
    ) -> None:
        self._backend = backend
        self._config = config
        self._rank = rank
        self._directory = directory
        self._broadcast = broadcast
        self._put = put
        self._version = -1
        self._index = 0
        self._buckets: Iterator[Mapping[str, Any]] | None = None
        self._digests: dict[str, str] = {}
        self._hasher = ThreadPoolExecutor(1, thread_name_prefix="weight-digests")

    def open(self, policy_version: int) -> int:
        """Start over with the current weights; an unfinished publish is discarded.

        Returns:
            The policy version that this rank holds; the caller compares. Where it is not the one
            that was asked for, ``next`` refuses.
        """
        self._remove_shards()
        self._version, self._index, self._digests = policy_version, 0, {}
        self._buckets = iter(self._backend.export(self._config.bucket_bytes))
        return self._backend.policy_version

    def next(self) -> BucketMessage | None:
        """The next bucket, or None behind the last one; its bytes are on their way or arrived.

        Raises:
            PublishError: the rank holds another version than the one that is being published; a
                bucket did not get through; the file could not be written.
        """
        if self._buckets is None or self._backend.policy_version != self._version:
            raise PublishError(
                f"rank {self._rank} holds policy version {self._backend.policy_version} while "
                f"{self._version} is being published: an update came between"
            )
        if self._config.transport == "broadcast":
            # What is on its way reads the memory of the former bucket no more, but a receiver that
            # is lost must be noticed before the collective gather of the next one.
            self._group().flush()
        bucket = next(self._buckets, None)
        if bucket is None:
            return None
        return self._message({name: host_array(value) for name, value in bucket.items()})

    def close(self) -> dict[str, str]:
        """End the publish, which every engine has received or been dropped from.

        Returns:
            Name -> digest (``schemas.weights.tensor_digest``) of each tensor that this rank sent.
        """
        self._buckets = None
        self._remove_shards()
        digests, self._digests = self._digests, {}
        return digests

    def _message(self, arrays: Mapping[str, NDArray[Any]]) -> BucketMessage:
        index = self._index
        self._index += 1
        if not arrays:
            return BucketMessage(self._version, self._rank, index, ())
        # Beside the copy, which does not hold the interpreter lock (XXH3 does).
        digests = self._hasher.submit(_digests_of, arrays)
        payload = self._deliver(arrays, index)
        self._digests |= digests.result()
        specs = tuple(
            TensorSpec(name, array.dtype.name, array.shape) for name, array in arrays.items()
        )
        return BucketMessage(self._version, self._rank, index, specs, payload)

    def _deliver(self, arrays: Mapping[str, NDArray[Any]], index: int) -> object:
        match self._config.transport:
            case "object_store":
                return self._put([_memory(array) for array in arrays.values()])
            case "disk":
                return self._write(arrays, index)
            case "broadcast":
                self._group().send([_memory(array) for array in arrays.values()])
                return None

    def _group(self) -> Broadcasts:
        if self._broadcast is None:
            raise PublishError(f"rank {self._rank} has no group to broadcast to")
        return self._broadcast()

    def _write(self, arrays: Mapping[str, NDArray[Any]], index: int) -> str:
        folder = self._shards() / str(self._version)
        path = folder / f"rank-{self._rank:05d}-{index:05d}.safetensors"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file(dict(arrays), path)
        except OSError as error:
            raise PublishError(
                f"rank {self._rank} cannot write {path}: {error.strerror or error}"
            ) from error
        return str(path)

    def _shards(self) -> Path:
        if self._directory is None:
            raise PublishError("publish.transport: disk needs a directory that all nodes share")
        return self._directory

    def _remove_shards(self) -> None:
        """Remove what this rank has written, also in a publish that was cut off."""
        if self._config.transport != "disk":
            return
        for shard in self._shards().glob(f"*/rank-{self._rank:05d}-*.safetensors"):
            shard.unlink(missing_ok=True)
        for folder in self._shards().glob("*"):
            _remove_if_empty(folder)


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        # Another rank's shards are still there; that rank removes the folder.
        return


def _digests_of(arrays: Mapping[str, NDArray[Any]]) -> dict[str, str]:
    return {name: tensor_digest(name, array) for name, array in arrays.items()}
