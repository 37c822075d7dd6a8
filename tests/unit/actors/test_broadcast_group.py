from __future__ import annotations

import gc
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from numpy.typing import NDArray

from actors.broadcast_group import BroadcastReceiver, BroadcastSender
from actors.outbox import GroupAddress
from miniverl_dist.errors import PublishError
from rollout_server.inbox import BucketMessage, Bytes, TensorSpec
from tests.support.ports import free_ports
from tests.support.weight_ends import some_weights

HOST = "127.0.0.1"
TIMEOUT_S = 20.0
SHORT_S = 0.3


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Members of a group block each other: each needs a thread. They share no state but sockets."""
    with ThreadPoolExecutor(8) as pool:
        yield pool


def address(
    sender: BroadcastSender, *engines: str, rank: int = 0, generation: int = 1, timeout_s: float = 0
) -> GroupAddress:
    timeout_s = timeout_s or TIMEOUT_S
    return GroupAddress(rank, *sender.endpoint, generation, engines, timeout_s)


def message(tensors: dict[str, NDArray[Any]], rank: int = 0) -> BucketMessage:
    specs = tuple(TensorSpec(n, a.dtype.name, a.shape) for n, a in tensors.items())
    return BucketMessage(1, rank, 0, specs)


def memory(tensors: dict[str, NDArray[Any]]) -> list[Bytes]:
    return [array.reshape(-1).view(np.uint8).copy() for array in tensors.values()]


def results(*futures: Future[Any]) -> list[Any]:
    return [future.result(TIMEOUT_S + 10) for future in futures]


def joined(threads: ThreadPoolExecutor, *calls: Callable[[], object]) -> None:
    results(*(threads.submit(call) for call in calls))


def same(found: list[Bytes], tensors: dict[str, NDArray[Any]]) -> bool:
    return [part.tobytes() for part in found] == [part.tobytes() for part in memory(tensors)]


def test_every_engine_receives_every_bucket_bit_for_bit(threads: ThreadPoolExecutor) -> None:
    sender = BroadcastSender(0, HOST)
    engines = [BroadcastReceiver(name, HOST) for name in ("a", "b")]
    where = address(sender, "a", "b")
    joined(threads, lambda: sender.connect(where), *(lambda e=e: e.connect(where) for e in engines))
    # The second is larger than the first, the third smaller: buffers are used again.
    buckets = [{"x": np.arange(5)}, some_weights(1), {"y": np.ones((2, 2), np.float32)}]
    for bucket in buckets:
        parts = memory(bucket)
        sender.group().send(parts)
        for part in parts:
            part[:] = 0
        received = results(*(threads.submit(e.receive, message(bucket)) for e in engines))
        assert all(same(found, bucket) for found in received)
        sender.group().flush()
    assert not dist.is_initialized()


def test_read_only_memory_can_be_sent(threads: ThreadPoolExecutor) -> None:
    sender, engine = BroadcastSender(0, HOST), BroadcastReceiver("a", HOST)
    where, bucket = address(sender, "a"), {"x": np.arange(5)}
    joined(threads, lambda: sender.connect(where), lambda: engine.connect(where))
    parts = memory(bucket)
    parts[0].flags.writeable = False
    sender.group().send(parts)
    assert same(engine.receive(message(bucket)), bucket)


@pytest.mark.parametrize("first", ["a", "b"])
def test_peer_31_engines_may_arrive_in_any_order(threads: ThreadPoolExecutor, first: str) -> None:
    senders = [BroadcastSender(rank, HOST) for rank in (0, 1)]
    engines = {name: BroadcastReceiver(name, HOST) for name in ("a", "b")}
    order = [first, "b" if first == "a" else "a"]
    for rank, sender in enumerate(senders):
        where = address(sender, "a", "b", rank=rank)
        waiting = [threads.submit(sender.connect, where)]
        for name in order:
            waiting.append(threads.submit(engines[name].connect, where))
            time.sleep(0.03)
        order.reverse()
        results(*waiting)
    buckets: list[dict[str, NDArray[Any]]] = [{"x": np.arange(3)}, {"y": np.ones(4)}]
    # Both senders send at once, and one engine reads long before the other.
    for sender, bucket in zip(senders, buckets, strict=True):
        sender.group().send(memory(bucket))

    def read(name: str) -> bool:
        engine = engines[name]
        return all(
            same(engine.receive(message(bucket, rank)), bucket)
            for rank, bucket in enumerate(buckets)
        )

    early = threads.submit(read, order[0])
    time.sleep(0.03)
    assert results(early, threads.submit(read, order[1])) == [True, True]
    for sender in senders:
        sender.group().flush()


def test_an_engine_that_does_not_come_is_an_error_and_the_rest_goes_on_without_it(
    threads: ThreadPoolExecutor,
) -> None:
    sender, engine = BroadcastSender(0, HOST), BroadcastReceiver("a", HOST)
    # Long enough for the engine to find the sender on a machine that stands still for a while.
    where = address(sender, "a", "missing", timeout_s=2.0)
    started_s = time.monotonic()
    waiting = [threads.submit(sender.connect, where), threads.submit(engine.connect, where)]
    for member in waiting:
        with pytest.raises(
            PublishError, match=r"group of rank 0 with a, missing could not gather its members"
        ):
            member.result(TIMEOUT_S)
    assert time.monotonic() - started_s < TIMEOUT_S / 2
    with pytest.raises(PublishError, match="rank 0 is in no broadcast group"):
        sender.group()
    where, bucket = address(sender, "a", generation=2), {"x": np.arange(5)}
    joined(threads, lambda: sender.connect(where), lambda: engine.connect(where))
    sender.group().send(memory(bucket))
    assert same(engine.receive(message(bucket)), bucket)


def test_an_engine_that_does_not_receive_is_an_error_and_the_rest_goes_on_without_it(
    threads: ThreadPoolExecutor,
) -> None:
    sender = BroadcastSender(0, HOST)
    engines = [BroadcastReceiver(name, HOST) for name in ("a", "b", "c")]
    where = address(sender, "a", "b", "c", timeout_s=3.0)
    joined(threads, lambda: sender.connect(where), *(lambda e=e: e.connect(where) for e in engines))
    bucket = {"x": np.zeros(1 << 20)}
    sender.group().send(memory(bucket))
    started_s = time.monotonic()
    receiving = [threads.submit(engine.receive, message(bucket)) for engine in engines[1:]]
    with pytest.raises(PublishError, match="with a, b, c could not send within 3 s"):
        sender.group().flush()
    for member in receiving:
        member.exception(TIMEOUT_S)  # whichever did not depend on the missing one has its bytes
    assert time.monotonic() - started_s < TIMEOUT_S / 2
    where = address(sender, "b", "c", generation=2)
    joined(
        threads, lambda: sender.connect(where), *(lambda e=e: e.connect(where) for e in engines[1:])
    )
    sender.group().send(memory(bucket))
    received = results(*(threads.submit(e.receive, message(bucket)) for e in engines[1:]))
    assert all(same(found, bucket) for found in received)


def test_a_sender_that_is_not_there() -> None:
    [port] = free_ports(1)
    where = GroupAddress(0, HOST, port, 1, ("a",), SHORT_S)
    with pytest.raises(PublishError, match=r"could not find its sender within 0\.3 s"):
        BroadcastReceiver("a", HOST).connect(where)


def test_without_a_group_nothing_is_received() -> None:
    with pytest.raises(PublishError, match="a is in no broadcast group of rank 2"):
        BroadcastReceiver("a", HOST).receive(message({"x": np.ones(1)}, rank=2))


def _engine_process(where: GroupAddress, bucket: dict[str, NDArray[Any]], end: Connection) -> None:
    # Groups of former tests, whose threads were not forked: taken down here, they would wait for
    # them for ever.
    gc.freeze()
    engine = BroadcastReceiver(where.engines[0], HOST)
    engine.connect(where)
    end.send(same(engine.receive(message(bucket)), bucket))
    end.recv()  # until the parent has seen the other end of the group die


def test_members_in_two_processes_and_the_death_of_one() -> None:
    fork = multiprocessing.get_context("fork")
    sender, bucket = BroadcastSender(0, HOST), some_weights()
    where = address(sender, "a", timeout_s=10.0)
    ours, theirs = fork.Pipe()
    gc.collect()  # where their threads are
    process = fork.Process(target=_engine_process, args=(where, bucket, theirs))
    process.start()
    try:
        sender.connect(where)
        sender.group().send(memory(bucket))
        assert ours.poll(TIMEOUT_S)
        assert ours.recv() is True
        sender.group().flush()
    finally:
        process.kill()
        process.join()

    def send_more() -> None:
        # What fits into the socket's buffer is sent before the death is noticed.
        for _ in range(3):
            sender.group().send(memory({"x": np.zeros(1 << 20)}))
        sender.group().flush()

    with pytest.raises(PublishError, match="could not send"):
        send_more()
