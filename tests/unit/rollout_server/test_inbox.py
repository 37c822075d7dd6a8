from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import save_file

from miniverl_dist.errors import PublishError
from miniverl_dist.schemas.weights import NamedArrays, dtype_of, weights_checksum
from rollout_server.inbox import BucketMessage, Bytes, TensorSpec, WeightInbox
from tests.support.weight_ends import FakeEngine, some_weights


def message(tensors: NamedArrays, version: int = 1, index: int = 0) -> BucketMessage:
    specs = tuple(TensorSpec(n, a.dtype.name, a.shape) for n, a in tensors.items())
    return BucketMessage(version, 0, index, specs)


def memory(tensors: NamedArrays) -> list[Bytes]:
    return [array.reshape(-1).view(np.uint8).copy() for array in tensors.values()]


async def receive(inbox: WeightInbox, tensors: NamedArrays, version: int = 1) -> tuple[int, str]:
    await inbox.begin(version)
    await inbox.add(message(tensors, version), memory(tensors))
    return await inbox.finish(weights_checksum(tensors))


def assert_same(found: NamedArrays, expected: NamedArrays) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()


async def test_every_dtype_and_shape_arrives_bit_for_bit() -> None:
    engine, weights = FakeEngine(), some_weights()
    confirmed = await receive(WeightInbox(engine), weights, version=7)
    assert confirmed == (7, weights_checksum(weights))
    assert_same(engine.weights, weights)


async def test_buckets_may_change_once_they_are_added() -> None:
    engine, weights = FakeEngine(), some_weights()
    inbox = WeightInbox(engine)
    await inbox.begin(1)
    for index, name in enumerate(weights):
        bucket = {name: weights[name]}
        parts = memory(bucket)
        await inbox.add(message(bucket, index=index), parts)
        parts[0][:] = 0
    await inbox.finish("")
    assert_same(engine.weights, weights)


async def test_the_engine_hears_of_nothing_before_the_end() -> None:
    engine, first, second = FakeEngine(), some_weights(0), some_weights(1)
    inbox = WeightInbox(engine)
    await receive(inbox, first)
    await inbox.begin(2)
    await inbox.add(message(second, 2), memory(second))
    assert engine.weight_version == 1
    assert_same(engine.weights, first)


async def test_a_second_begin_discards_the_first() -> None:
    engine, first, second = FakeEngine(), some_weights(0), {"matrix": some_weights(1)["matrix"]}
    inbox = WeightInbox(engine)
    await inbox.begin(1)
    await inbox.add(message(first), memory(first))
    assert await receive(inbox, second, version=2) == (2, weights_checksum(second))
    assert_same(engine.weights, second)


async def test_a_bucket_that_is_still_copied_when_another_publish_begins_is_refused() -> None:
    old, new = {"w": np.zeros(4)}, {"w": np.ones(4)}
    entered, released = threading.Event(), threading.Event()

    def slow(given: BucketMessage) -> list[Bytes]:
        entered.set()
        released.wait(5)
        return memory(old)

    engine = FakeEngine()
    inbox = WeightInbox(engine, receive=slow)
    await inbox.begin(1)
    late = asyncio.create_task(inbox.add(message(old)))
    await asyncio.to_thread(entered.wait, 5)
    # The same version again: a transfer that was started anew.
    await inbox.begin(1)
    await inbox.add(message(new), memory(new))
    released.set()
    with pytest.raises(PublishError, match="another publish has begun since"):
        await late
    await inbox.finish("")
    assert_same(engine.weights, new)


async def test_an_engine_that_refuses_leaves_the_inbox_ready_for_the_next_publish() -> None:
    engine, weights = FakeEngine(refusal=PublishError("shapes do not fit")), some_weights()
    inbox = WeightInbox(engine)
    with pytest.raises(PublishError, match="shapes do not fit"):
        await receive(inbox, weights)
    engine.refusal = None
    assert await receive(inbox, weights, version=2) == (2, weights_checksum(weights))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda parts: parts[:-1], "brought 4 tensors, expected 5"),
        (lambda parts: [parts[0][:-1], *parts[1:]], "holds 47 bytes of 'matrix', expected 48"),
    ],
    ids=["too few", "too short"],
)
async def test_a_bucket_that_is_not_what_it_says(change: Any, found: str) -> None:
    inbox, weights = WeightInbox(FakeEngine()), some_weights()
    await inbox.begin(1)
    with pytest.raises(PublishError, match=f"bucket 0 of rank 0 {found}"):
        await inbox.add(message(weights), change(memory(weights)))


async def test_a_tensor_that_comes_twice() -> None:
    inbox, weights = WeightInbox(FakeEngine()), {"w": np.zeros(2)}
    await inbox.begin(1)
    await inbox.add(message(weights), memory(weights))
    with pytest.raises(PublishError, match="bucket 1 of rank 0 brings 'w' a second time"):
        await inbox.add(message(weights, index=1), memory(weights))


async def test_buckets_of_another_version_and_without_a_publish_are_refused() -> None:
    inbox, weights = WeightInbox(FakeEngine()), {"w": np.zeros(2)}
    with pytest.raises(PublishError, match="version 1 came while None was expected"):
        await inbox.add(message(weights), memory(weights))
    with pytest.raises(PublishError, match="finish without begin"):
        await inbox.finish("")
    await inbox.begin(2)
    with pytest.raises(PublishError, match="version 1 came while 2 was expected"):
        await inbox.add(message(weights), memory(weights))


async def test_a_broadcast_needs_a_group() -> None:
    inbox, weights = WeightInbox(FakeEngine()), {"w": np.zeros(2)}
    await inbox.begin(1)
    with pytest.raises(PublishError, match="is a broadcast, but this engine has no group"):
        await inbox.add(message(weights))


class KeepingEngine(FakeEngine):
    """Serves from the very arrays it is given."""

    async def load_weights(self, snapshot: Any) -> str:
        checksum = await super().load_weights(snapshot)
        self.weights = snapshot.tensors
        return checksum


def addresses(weights: NamedArrays) -> dict[str, int]:
    return {name: array.__array_interface__["data"][0] for name, array in weights.items()}


async def test_memory_is_used_again() -> None:
    seen: list[NamedArrays] = []

    class Watching(FakeEngine):
        async def load_weights(self, snapshot: Any) -> str:
            seen.append(dict(snapshot.tensors))
            return await super().load_weights(snapshot)

    inbox = WeightInbox(Watching())
    for version in (1, 2, 3):
        await receive(inbox, some_weights(version), version)
    assert addresses(seen[0]) == addresses(seen[1]) == addresses(seen[2])


async def test_arrays_that_an_engine_keeps_are_not_written_to_until_it_accepts_others() -> None:
    engine = KeepingEngine()
    inbox = WeightInbox(engine, keeps_arrays=True)
    await receive(inbox, some_weights(1), 1)
    first = addresses(engine.weights)
    engine.refusal = PublishError("no")
    for version in (2, 3):
        with pytest.raises(PublishError, match="no"):
            await receive(inbox, some_weights(version), version)
        assert_same(engine.weights, some_weights(1))
    engine.refusal = None
    await receive(inbox, some_weights(4), 4)
    assert_same(engine.weights, some_weights(4))
    assert addresses(engine.weights).items().isdisjoint(first.items())
    await receive(inbox, some_weights(5), 5)
    assert_same(engine.weights, some_weights(5))
    assert addresses(engine.weights)["matrix"] == first["matrix"]


async def test_a_load_that_still_waits_keeps_its_arrays() -> None:
    entered, gate = asyncio.Event(), asyncio.Event()

    class Waiting(FakeEngine):
        async def load_weights(self, snapshot: Any) -> str:
            if snapshot.policy_version == 2:
                entered.set()
                await gate.wait()
            return await super().load_weights(snapshot)

    engine = Waiting()
    inbox = WeightInbox(engine)
    await receive(inbox, some_weights(1), 1)
    waiting = asyncio.create_task(receive(inbox, some_weights(2), 2))
    await entered.wait()
    await receive(inbox, some_weights(3), 3)
    gate.set()
    await waiting
    assert_same(engine.weights, some_weights(2))


async def test_a_shard_on_disk(tmp_path: Path) -> None:
    engine, weights = FakeEngine(), some_weights()
    inbox = WeightInbox(engine)
    path = tmp_path / "shard.safetensors"
    save_file(dict(weights), path)
    await inbox.begin(1)
    await inbox.add(message(weights), str(path))
    await inbox.finish("")
    assert_same(engine.weights, weights)


@pytest.mark.parametrize(
    ("content", "reason"),
    [(None, "cannot read bucket 0 of rank 0"), (b"{}", "do all nodes share the run directory")],
    ids=["missing", "broken"],
)
async def test_a_shard_that_cannot_be_read(
    tmp_path: Path, content: bytes | None, reason: str
) -> None:
    inbox, path = WeightInbox(FakeEngine()), tmp_path / "shard.safetensors"
    if content is not None:
        path.write_bytes(content)
    await inbox.begin(1)
    with pytest.raises(PublishError, match=reason):
        await inbox.add(message({"w": np.zeros(2)}), str(path))


async def test_a_shard_that_lacks_a_tensor(tmp_path: Path) -> None:
    inbox, path = WeightInbox(FakeEngine()), tmp_path / "shard.safetensors"
    save_file({"v": np.zeros(2)}, path)
    await inbox.begin(1)
    with pytest.raises(PublishError, match=r"shard\.safetensors lacks 'w' \(1 tensors missing\)"):
        await inbox.add(message({"w": np.zeros(2)}), str(path))


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float8_e4m3fn", "int64", "bool"])
def test_dtypes_by_name(name: str) -> None:
    found: NDArray[Any] = np.zeros(1, dtype_of(name))
    assert found.dtype.name == name
