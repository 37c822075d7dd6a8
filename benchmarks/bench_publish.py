"""Claim: publishing 512 MiB through the object store takes at most 1.5 times what no way can avoid.

Publish: everything between asking the store and its receipt, over real Ray with one sending and
one receiving actor. That is: export, XXH3 at the sender, the copy into shared memory, the copy
into the receiver's own memory, XXH3 over what its engine then holds, and all calls between driver
and actors. The engine keeps the arrays it is given as its weights and does nothing else.

``floor`` is the same work without Ray, messages and checks: one process counts XXH3 and copies into
shared memory, another copies out of it and counts XXH3, bucket by bucket and at the same time. Two
copies, each checksummed where it counts, cannot take less than two cores and one memory bus allow.

Ways and memcpy take turns, the least of each counts: whatever else the machine does only adds. The
first publishes are not counted: most of their time goes into touching shared memory for the first
time, which each process does once in a run. memcpy copies between two arrays that have been touched
before, in the driver. ``naive`` is what everybody writes first: all weights
as torch tensors in one ``ray.put``, ``get`` and ``copy_`` on the other side, without any checksum.

Exit status 1 when the claim does not hold. Needs Ray and torch; about two minutes on two cores.

    python -m benchmarks.bench_publish
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
import xxhash
from numpy.typing import NDArray

from actors.broadcast_group import BroadcastReceiver, BroadcastSender
from actors.outbox import GroupAddress, WeightOutbox
from actors.publish import RayWeightStore
from actors.weight_endpoints import RayEngine, RayRank
from miniverl_dist.config.cluster import PublishConfig
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.inbox import BucketMessage, Bytes, WeightInbox

MIB = 1024 * 1024
TOTAL_MIB, TENSOR_MIB, BUCKET_MIB = 512, 16, 128
MAX_OF_FLOOR = 1.5
NUM_WARM, NUM_TIMES = 8, 12
HOST = "127.0.0.1"
TRANSPORTS = ("object_store", "disk", "broadcast")

Way = Callable[[], Awaitable[object]]


class Backend:
    """Weights of one version after the other, all of them random bits."""

    policy_version = 0

    def __init__(self) -> None:
        generator = np.random.default_rng(0)
        count = TENSOR_MIB * MIB // 4
        self.tensors = {
            f"layers.{place}.weight": torch.from_numpy(generator.random(count, dtype=np.float32))
            for place in range(TOTAL_MIB // TENSOR_MIB)
        }

    def export(self, bucket_bytes: int) -> Iterator[Mapping[str, torch.Tensor]]:
        """Tensors in buckets."""
        per_bucket = bucket_bytes // (TENSOR_MIB * MIB)
        names = list(self.tensors)
        for start in range(0, len(names), per_bucket):
            yield {name: self.tensors[name] for name in names[start : start + per_bucket]}


class Sender:
    """What a student rank does for a publish."""

    def __init__(self, config: PublishConfig, directory: Path) -> None:
        torch.set_num_threads(1)
        self._backend = Backend()
        self._group = BroadcastSender(0, HOST)
        self._outbox = WeightOutbox(
            self._backend, config, directory=directory, broadcast=self._group.group
        )

    def open_publish(self, policy_version: int) -> int:
        """A new version without an update in between."""
        self._backend.policy_version = policy_version
        return self._outbox.open(policy_version)

    def next_bucket(self) -> BucketMessage | None:
        """See ``WeightOutbox``."""
        return self._outbox.next()

    def close_publish(self) -> dict[str, str]:
        """See ``WeightOutbox``."""
        return self._outbox.close()

    def broadcast_endpoint(self) -> tuple[str, int]:
        """See ``BroadcastSender``."""
        return self._group.endpoint

    def connect_broadcast(self, address: GroupAddress) -> None:
        """See ``BroadcastSender``."""
        self._group.connect(address)

    def put_naively(self) -> list[Any]:
        """All weights as torch tensors in one object."""
        return [ray.put(self._backend.tensors)]


class KeepingEngine:
    """Its weights are the arrays that it was given last."""

    weight_version = -1

    def __init__(self) -> None:
        self.weights: Mapping[str, NDArray[Any]] = {}

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """Take the arrays over and count their checksum."""
        self.weights, self.weight_version = snapshot.tensors, snapshot.policy_version
        return weights_checksum(self.weights)


class Receiver:
    """What a rollout host does for a publish."""

    def __init__(self, name: str) -> None:
        torch.set_num_threads(1)
        self._groups = BroadcastReceiver(name, HOST)
        self._inbox = WeightInbox(KeepingEngine(), receive=self._groups.receive, keeps_arrays=True)
        self._own: dict[str, torch.Tensor] = {}

    async def begin_weights(self, policy_version: int) -> None:
        """See ``WeightInbox``."""
        await self._inbox.begin(policy_version)

    async def add_weights(self, message: BucketMessage, payload: list[Bytes] | str | None) -> None:
        """See ``WeightInbox``."""
        await self._inbox.add(message, payload)

    async def finish_weights(self, checksum: str) -> tuple[int, str]:
        """See ``WeightInbox``."""
        return await self._inbox.finish(checksum)

    async def connect_broadcast(self, address: GroupAddress) -> None:
        """See ``BroadcastReceiver``."""
        await asyncio.to_thread(self._groups.connect, address)

    async def load_naively(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy tensors into the receiver's own."""
        for name, tensor in tensors.items():
            self._own.setdefault(name, torch.empty_like(tensor)).copy_(tensor)


def publishing(transport: str, directory: Path, bucket_mib: int) -> Way:
    """A store with one sender and one receiver of its own; each call publishes a new version."""
    config = PublishConfig.model_validate(
        {"transport": transport, "bucket_bytes": bucket_mib * MIB}
    )
    name = f"engine-{transport}"
    sender = ray.remote(Sender).options(num_cpus=0).remote(config, directory)
    receiver = ray.remote(Receiver).options(num_cpus=0).remote(name)
    ranks = [RayRank(sender, "rank 0")]
    store = RayWeightStore(lambda: ranks, [RayEngine(receiver, name)], config, deadline_s=120)
    versions = iter(range(1, 1000))
    return lambda: store.publish(next(versions))


def naive(directory: Path) -> Way:
    """Raw torch tensors through the object store."""
    sender: Any = ray.remote(Sender).options(num_cpus=0).remote(PublishConfig(), directory)
    receiver: Any = ray.remote(Receiver).options(num_cpus=0).remote("naive")

    async def once() -> None:
        references = await sender.put_naively.remote()
        await receiver.load_naively.remote(references[0])

    return once


def memcpy() -> Way:
    """One copy between two arrays of the driver."""
    source = np.ones(TOTAL_MIB * MIB, dtype=np.uint8)
    target = np.zeros_like(source)

    async def once() -> None:
        np.copyto(target, source)

    return once


class Floor:
    """The least that two processes must do; leaves with its receiver."""

    def __init__(self, bucket_mib: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._slices = [
            slice(start, start + bucket_mib * MIB)
            for start in range(0, TOTAL_MIB * MIB, bucket_mib * MIB)
        ]
        self._memory = SharedMemory(create=True, size=TOTAL_MIB * MIB)
        self._begin, self._full, self._done = (context.Semaphore(0) for _ in range(3))
        self._receiver = context.Process(
            target=_receive_at_the_floor,
            args=(self._memory.name, self._slices, self._begin, self._full, self._done),
            daemon=True,
        )
        self._receiver.start()
        self._source = np.random.default_rng(0).integers(0, 256, TOTAL_MIB * MIB, dtype=np.uint8)

    async def once(self) -> None:
        """Everything once."""
        shared = np.frombuffer(self._memory.buf, np.uint8, TOTAL_MIB * MIB)
        self._begin.release()
        for part in self._slices:
            xxhash.xxh3_128_digest(self._source[part])
            np.copyto(shared[part], self._source[part])
            self._full.release()
        self._done.acquire()

    def close(self) -> None:
        """End the receiver and give the memory back."""
        self._receiver.kill()
        self._receiver.join()
        self._memory.unlink()


def _receive_at_the_floor(
    name: str, slices: list[slice], begin: Semaphore, full: Semaphore, done: Semaphore
) -> None:
    memory = SharedMemory(name, track=False) if sys.version_info >= (3, 13) else SharedMemory(name)
    shared = np.frombuffer(memory.buf, np.uint8, TOTAL_MIB * MIB)
    own = np.ones_like(shared)
    while True:
        begin.acquire()
        for part in slices:
            full.acquire()
            np.copyto(own[part], shared[part])
            xxhash.xxh3_128_digest(own[part])
        done.release()


async def seconds(ways: dict[str, Way], num_times: int) -> dict[str, float]:
    """Least seconds of each way; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(NUM_WARM + num_times):
        for name, way in ways.items():
            started_s = time.perf_counter()
            await way()
            if turn >= NUM_WARM:
                found[name].append(time.perf_counter() - started_s)
    return {name: min(times) for name, times in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bucket-mib", type=int, default=BUCKET_MIB)
    parser.add_argument("--times", type=int, default=NUM_TIMES)
    parser.add_argument("--only", choices=TRANSPORTS)
    args = parser.parse_args()
    floor = Floor(args.bucket_mib)
    with tempfile.TemporaryDirectory(prefix="mvp", dir="/tmp") as folder:
        ray.init(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=2 * TOTAL_MIB * MIB,
            _temp_dir=folder,
            log_to_driver=False,
        )
        try:
            directory = Path(folder) / "publish"
            chosen = [args.only] if args.only else TRANSPORTS
            ways = {"memcpy": memcpy(), "floor": floor.once}
            ways |= {name: publishing(name, directory, args.bucket_mib) for name in chosen}
            if not args.only:
                ways["naive"] = naive(directory)
            found = asyncio.run(seconds(ways, args.times))
        finally:
            ray.shutdown()
            floor.close()
    print(f"{TOTAL_MIB} MiB in buckets of {args.bucket_mib} MiB, ratios to memcpy:")
    for name, duration in found.items():
        print(f"  {name:<12} {duration / found['memcpy']:6.2f}   ({duration * 1e3:.0f} ms)")
    ratio = found.get("object_store", 0.0) / found["floor"]
    print(f"object_store to floor: {ratio:.2f}, at most {MAX_OF_FLOOR}")
    if ratio > MAX_OF_FLOOR:
        print("FAILED")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
