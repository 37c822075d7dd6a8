"""Weights into a server by broadcast: a gloo group of this process and the server's ranks.

gloo also where the server is on GPUs: this process has none of its own, and nccl takes no two ranks
on one. The group is built directly over a TCP store, beside torch's global state, under the very
prefixes that the server's side uses.

Source: ``init_custom_process_group`` and ``WeightUpdater`` of SGLang 0.5.23, and the helper of
torch 2.13 that they call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# Typed where torch defines them; torch.distributed re-exports the same names untyped.
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, TCPStore

from miniverl_dist.backends.tensors import as_tensor
from miniverl_dist.errors import EngineError
from miniverl_dist.generate_api.app import LOOPBACK
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import NamedArrays
from rollout_server.engines.sglang_control import SGLangControl


class ServerGroup:
    """This process's end of a group with one server; the constructor waits for the server.

    Args:
        store: Its own store, at which the server finds it.
        name: Of the group.
        size: All members.
        timeout: For the members to come, and for each tensor.

    Raises:
        EngineError: they did not come.
    """

    def __init__(self, store: TCPStore, name: str, size: int, timeout: timedelta) -> None:
        self.name, self._timeout = name, timeout
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # By default gloo binds to whatever the machine's own name resolves to.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=LOOPBACK)]
        options._timeout = timeout
        prefixed = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, store)))
        try:
            self._group: Any = dist.ProcessGroupGloo(prefixed, 0, size, options)
        except RuntimeError as error:
            raise EngineError(f"group {name}: the server did not come: {error}") from error

    def send(self, tensors: Sequence[torch.Tensor]) -> None:
        """Broadcast tensors in order; waits until they have arrived.

        Raises:
            EngineError: they did not.
        """
        options = BroadcastOptions()
        options.rootRank, options.timeout = 0, self._timeout
        try:
            for work in [self._group.broadcast([tensor], options) for tensor in tensors]:
                work.wait(self._timeout)
        except RuntimeError as error:
            first_line = str(error).splitlines()[0]
            raise EngineError(f"group {self.name}: could not send: {first_line}") from error


class BroadcastLoader:
    """See ``sglang_loading.WeightLoader``.

    Args:
        name: Begins the names of its groups.
        num_ranks: Of the server.
        bucket_bytes: Sent at a time; the server holds so much beside its weights.
        timeout_s: For the group to be built, and for each tensor.
    """

    def __init__(self, name: str, *, num_ranks: int, bucket_bytes: int, timeout_s: float) -> None:
        self._name, self._size = name, 1 + num_ranks
        self._bucket_bytes, self._timeout = bucket_bytes, timedelta(seconds=timeout_s)
        self._store: TCPStore | None = None
        self._group: ServerGroup | None = None
        self._num_groups = 0

    async def load(self, control: SGLangControl, snapshot: WeightSnapshot) -> None:
        """See ``WeightLoader``."""
        if self._group is None:
            self._group = await self._joined(control)
        await control.begin_update()
        for bucket in buckets(snapshot.tensors, self._bucket_bytes):
            await self._transfer(control, self._group, bucket)
        await control.end_update()

    def forget_server(self) -> None:
        """See ``WeightLoader``."""
        self._group = None

    async def _joined(self, control: SGLangControl) -> ServerGroup:
        self._num_groups += 1
        name = f"{self._name}-{self._num_groups}"
        # A store of its own: what a former server has left in one must not be met again.
        store = TCPStore(
            LOOPBACK, 0, None, is_master=True, wait_for_workers=False, timeout=self._timeout
        )
        self._store = store
        # Both sides wait for each other, bounded by the group's timeout.
        group, _ = await asyncio.gather(
            asyncio.to_thread(ServerGroup, store, name, self._size, self._timeout),
            control.join_group(LOOPBACK, store.port, name, world_size=self._size),
        )
        return group

    async def _transfer(
        self, control: SGLangControl, group: ServerGroup, bucket: NamedArrays
    ) -> None:
        tensors = {name: as_tensor(array) for name, array in bucket.items()}
        receiving = asyncio.create_task(control.receive(_specs(bucket), group.name))
        sending = asyncio.create_task(asyncio.to_thread(group.send, list(tensors.values())))
        try:
            # Waits for the server to take the bucket; bounded by the deadlines of both.
            await asyncio.gather(receiving, sending)
        except BaseException:
            receiving.cancel()
            # Its thread may still wait in gloo, which only the end of the server interrupts; the
            # engine sees to that, and nobody waits for the thread.
            sending.add_done_callback(_ignore_outcome)
            self._group = None
            raise


def _ignore_outcome(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()


def buckets(tensors: NamedArrays, bucket_bytes: int) -> Iterator[dict[str, Any]]:
    """Tensors in order, in groups of at most ``bucket_bytes`` where none of them is larger."""
    bucket: dict[str, Any] = {}
    held = 0
    for name, array in tensors.items():
        if bucket and held + array.nbytes > bucket_bytes:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = array
        held += array.nbytes
    if bucket:
        yield bucket


def _specs(tensors: Mapping[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, array.dtype.name, array.shape) for name, array in tensors.items()]
