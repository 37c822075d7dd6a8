"""The sending end of a group with a server; the other end is torch's, built as SGLang does."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from miniverl_dist.backends.tensors import as_numpy
from miniverl_dist.errors import EngineError
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines.sglang_broadcast import BroadcastLoader, buckets

TIMEOUT = timedelta(seconds=5)


class ServerEnd:
    """Implements the part of ``SGLangControl`` that a broadcast needs."""

    def __init__(self, refuse_bucket: int | None = None) -> None:
        self.received: dict[str, Any] = {}
        self.sizes: list[int] = []
        self.groups: list[str] = []
        self.session: list[str] = []
        self._refuse_bucket = refuse_bucket

    async def join_group(self, host: str, port: int, name: str, *, world_size: int) -> None:
        self.groups.append(name)
        self._group = await asyncio.to_thread(self._join, host, port, name, world_size)

    def _join(self, host: str, port: int, name: str, world_size: int) -> Any:
        store = TCPStore(host, port, None, is_master=False, timeout=TIMEOUT)
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout = TIMEOUT
        prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        return dist.ProcessGroupGloo(prefixed, 1, world_size, options)

    def end(self) -> None:
        """The process ends, and its connections with it."""
        del self._group

    async def begin_update(self) -> None:
        self.session.append("begin")

    async def end_update(self) -> None:
        self.session.append("end")

    async def receive(self, specs: Sequence[tuple[str, str, Sequence[int]]], group: str) -> None:
        assert group == self.groups[-1]
        if len(self.sizes) == self._refuse_bucket:
            raise EngineError("no bucket more")
        self.sizes.append(len(specs))
        await asyncio.to_thread(self._receive, specs)

    def _receive(self, specs: Sequence[tuple[str, str, Sequence[int]]]) -> None:
        for name, dtype, shape in specs:
            tensor = torch.empty(*shape, dtype=getattr(torch, dtype))
            options = BroadcastOptions()
            options.rootRank, options.timeout = 0, TIMEOUT
            self._group.broadcast([tensor], options).wait(TIMEOUT)
            self.received[name] = as_numpy(tensor)


def loader(bucket_bytes: int = 100) -> BroadcastLoader:
    return BroadcastLoader("e", num_ranks=1, bucket_bytes=bucket_bytes, timeout_s=5.0)


def tensors(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    found: dict[str, Any] = {
        f"t{index}": rng.standard_normal((index + 1, 3), dtype=np.float32) for index in range(5)
    }
    found["half"] = rng.standard_normal(7).astype(ml_dtypes.bfloat16)
    found["frozen"] = np.arange(4, dtype=np.float32)
    found["frozen"].setflags(write=False)
    return found


async def test_every_tensor_arrives_as_it_was_and_the_group_is_kept() -> None:
    made, server = loader(), ServerEnd()
    for seed in (0, 1):
        sent = tensors(seed)
        await made.load(server, WeightSnapshot(seed, sent, ""))  # type: ignore[arg-type]
        assert server.received.keys() == sent.keys()
        for name, array in sent.items():
            assert server.received[name].dtype == array.dtype
            assert (server.received[name] == array).all()
    assert server.groups == ["e-1"]
    assert server.session == ["begin", "end"] * 2
    assert len(server.sizes) > 2
    made.forget_server()
    await made.load(server, WeightSnapshot(3, tensors(), ""))  # type: ignore[arg-type]
    assert server.groups == ["e-1", "e-2"]


async def test_a_server_that_refuses_leaves_no_one_waiting() -> None:
    made, server = loader(), ServerEnd(refuse_bucket=1)
    async with asyncio.timeout(4):  # less than the group's own timeout
        with pytest.raises(EngineError, match="no bucket more"):
            await made.load(server, WeightSnapshot(1, tensors(), ""))  # type: ignore[arg-type]
    assert server.session == ["begin"]
    before = asyncio.get_running_loop().time()
    server.end()
    await asyncio.get_running_loop().shutdown_default_executor()
    assert asyncio.get_running_loop().time() - before < 4


@given(sizes=st.lists(st.integers(1, 50), max_size=30), limit=st.integers(4, 120))
@settings(deadline=None)
def test_buckets_hold_everything_in_order_within_their_size(sizes: list[int], limit: int) -> None:
    given_ = {f"t{index}": np.zeros(size, np.uint8) for index, size in enumerate(sizes)}
    made = list(buckets(given_, limit))
    assert [name for bucket in made for name in bucket] == list(given_)
    for bucket in made:
        assert len(bucket) == 1 or sum(array.nbytes for array in bucket.values()) <= limit
    for first, second in itertools.pairwise(made):
        begins = next(iter(second.values())).nbytes
        assert sum(array.nbytes for array in first.values()) + begins > limit
