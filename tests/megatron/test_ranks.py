# ruff: noqa: E402 - without megatron nothing below can be imported
"""The tests' own launcher: results in order, and no failure that hangs."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.support.requirements import require_megatron

require_megatron()

from miniverl_dist.config.cluster import ParallelConfig
from tests.support.ranks import Rank, RankFailedError, run_ranks


def add(rank: Rank, number: int) -> tuple[int, float]:
    with rank.layout(ParallelConfig()):
        total = torch.tensor([float(rank.rank + number)])
        dist.all_reduce(total)
        return rank.rank, total.item()


def test_results_come_in_the_order_of_ranks() -> None:
    assert run_ranks(3, add, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def fail_on_one(rank: Rank) -> None:
    with rank.layout(ParallelConfig()):
        if rank.rank == 1:
            raise ValueError("the reason")
        dist.barrier()


def test_one_failure_ends_all_with_its_traceback() -> None:
    started = time.monotonic()
    with pytest.raises(RankFailedError, match="ValueError: the reason"):
        run_ranks(2, fail_on_one)
    assert time.monotonic() - started < 120


def die(rank: Rank) -> None:
    if rank.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_death_ends_all() -> None:
    with pytest.raises(RankFailedError, match="rank 0 died without a word"):
        run_ranks(2, die)


def wait(_: Rank) -> None:
    time.sleep(60)


def test_a_hang_ends_at_the_deadline() -> None:
    with pytest.raises(RankFailedError, match=r"ranks \[0, 1\] ran past 0.5 s"):
        run_ranks(2, wait, timeout_s=0.5)
