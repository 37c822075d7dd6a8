"""Runs a function in several forked processes that are the ranks of one student.

``run_ranks(2, fn, argument)`` returns ``[fn(Rank(0, 2), argument), fn(Rank(1, 2), argument)]``.
Many cases fit in one world: within ``fn``, each ``with rank.layout(ParallelConfig(...)):`` makes
megatron's groups anew among the same processes.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from miniverl_dist.backends.megatron import device
from miniverl_dist.backends.megatron import setup as _imported_before_forking  # noqa: F401
from miniverl_dist.backends.rank_address import RankAddress, listen
from miniverl_dist.config.cluster import ParallelConfig


class RankFailedError(AssertionError):
    """A rank raised, died, or took too long; the message holds its traceback."""


@dataclass(frozen=True)
class Rank:
    """Who a forked process is."""

    address: RankAddress
    timeout_s: float

    @property
    def rank(self) -> int:
        return self.address.rank

    @property
    def world_size(self) -> int:
        return self.address.world_size

    @contextmanager
    def layout(self, parallel: ParallelConfig) -> Iterator[None]:
        """Connect on first use, then lay the ranks out; all ranks have to enter together."""
        if not torch.distributed.is_initialized():
            device.connect_ranks(self.address, self.timeout_s)
        device.lay_out_ranks(parallel, timeout_s=self.timeout_s)
        yield


def _child(rank: Rank, sender: Connection, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # What of the parent's process groups is still alive must not be taken down here: their threads
    # were not forked, and waiting for them ends the process.
    gc.freeze()
    try:
        result: tuple[bool, Any] = (True, fn(rank, *args))
    except BaseException:  # noqa: BLE001 - whatever it is, the parent shows it
        result = (False, traceback.format_exc())
    # Pickled here: torch's own pickling would hand over descriptors that die with this process.
    sender.send_bytes(pickle.dumps(result))
    sender.close()
    # Killed by the parent when all ranks have spoken: rank 0 holds the store that the others may
    # still be asking.
    time.sleep(rank.timeout_s)
    # Nothing of the parent's (pytest's handlers, open files) may run at exit.
    os._exit(1)


def run_ranks(
    world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 240.0
) -> list[Any]:
    """Run ``fn(Rank, *args)`` in ``world`` processes and collect what it returns.

    Results should be plain values or numpy arrays. Functions and arguments are not pickled.

    Raises:
        RankFailedError: at least one rank failed; the others have been killed.
    """
    gc.collect()  # Process groups that this process has left go where their threads are.
    context = multiprocessing.get_context("fork")
    deadline = time.monotonic() + timeout_s
    listener = listen("127.0.0.1")
    host, port = listener.getsockname()
    pending: dict[Connection, int] = {}
    processes = []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        own = listener if rank == 0 else None
        identity = Rank(RankAddress(rank, world, host, port, own), timeout_s)
        process = context.Process(target=_child, args=(identity, sender, fn, args), daemon=True)
        process.start()
        sender.close()
        pending[receiver] = rank
        processes.append(process)
    listener.close()  # the ranks have it
    try:
        return _collect(pending, deadline, timeout_s)
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.join()


def _collect(pending: dict[Connection, int], deadline: float, timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    num_ranks = len(pending)
    while pending:
        ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailedError(f"ranks {sorted(pending.values())} ran past {timeout_s} s")
        for connection in ready:
            assert isinstance(connection, Connection)
            rank = pending.pop(connection)
            results[rank] = _receive(connection, rank)
    return [results[rank] for rank in range(num_ranks)]


def _receive(connection: Connection, rank: int) -> Any:
    try:
        succeeded, value = pickle.loads(connection.recv_bytes())
    except EOFError as error:
        raise RankFailedError(f"rank {rank} died without a word") from error
    if not succeeded:
        raise RankFailedError(f"rank {rank} failed:\n{value}")
    return value
