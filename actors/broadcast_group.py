"""A broadcast group from one student rank to the rollout engines, beside torch's global state.

Process groups are built directly over a TCP store: no default group, so the ranks' own groups
(Megatron's) are never touched, and a group that lost a member is dropped and built anew. Every
wait ends: a member that does not come is an error on all others, not a hang.

Groups are built one at a time, in the order of the sending ranks, by everyone at once. A member's
number comes from the address, not from when it arrives, so engines may arrive in any order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist

# Typed where torch defines them; torch.distributed re-exports the same names untyped.
from torch._C._distributed_c10d import BroadcastOptions, PrefixStore, Store, TCPStore, Work

from actors.outbox import GroupAddress
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import PublishError
from rollout_server.inbox import BucketMessage, Bytes

Wire = Literal["gloo", "nccl"]


def wire_of(config: RunConfig) -> Wire:
    """Between GPUs where ranks and engines have them, else between the hosts' memories."""
    student, rollout = config.cluster.student, config.cluster.rollout
    has_gpus = student.gpus_per_rank > 0 and rollout.gpus_per_actor > 0
    return "nccl" if has_gpus else "gloo"


class BroadcastGroup:
    """One member's end of a group; the constructor waits for all other members.

    Args:
        store: The sender's own store, or a connection to it.
        address: Of the group.
        member: 0 for the sender, 1 + its place among ``address.engines`` for an engine.
        host: Of this member, as the others can reach it.
        wire: ``nccl`` moves GPU memory, ``gloo`` the host's.

    Raises:
        PublishError: not all members came within ``address.timeout_s``.
    """

    def __init__(
        self, store: Store, address: GroupAddress, member: int, host: str, wire: Wire
    ) -> None:
        self._address = address
        self._timeout = timedelta(seconds=address.timeout_s)
        self._device = torch.device("cuda" if wire == "nccl" else "cpu")
        self._buffer = torch.empty(0, dtype=torch.uint8, device=self._device)
        self._work: Work | None = None
        prefixed = PrefixStore(f"publish/{address.generation}/{address.sender}", store)
        size = 1 + len(address.engines)
        with self._bounded("gather its members"):
            self._group: Any = (
                _nccl(prefixed, member, size, self._timeout)
                if wire == "nccl"
                else _gloo(prefixed, member, size, self._timeout, host)
            )

    def send(self, parts: Sequence[Bytes]) -> None:
        """Start to broadcast byte arrays; they may change as soon as this returns.

        Raises:
            PublishError: what was sent before did not arrive.
        """
        self.flush()
        flat = self._flat(sum(part.nbytes for part in parts))
        start = 0
        for part in parts:
            # A view of read-only memory is only read here; torch would warn about it all the same.
            source = part if part.flags.writeable else part.copy()
            flat[start : start + part.nbytes].copy_(torch.from_numpy(source))
            start += part.nbytes
        with self._bounded("send"):
            self._work = self._broadcast(flat)

    def flush(self) -> None:
        """Wait until what was sent has arrived everywhere.

        Raises:
            PublishError: it did not within the group's timeout.
        """
        work, self._work = self._work, None
        if work is not None:
            with self._bounded("send"):
                work.wait(self._timeout)

    def receive(self, message: BucketMessage) -> list[Bytes]:
        """The bytes of each tensor of the sender's next bucket, valid until the next call.

        Raises:
            PublishError: the bucket did not come within the group's timeout.
        """
        flat = self._flat(message.num_bytes)
        with self._bounded("receive"):
            self._broadcast(flat).wait(self._timeout)
        ends = np.cumsum([spec.num_bytes for spec in message.tensors])
        return np.split(flat.cpu().numpy(), ends[:-1])

    def close(self) -> None:
        """Break the group off; whoever still waits in it gets an error."""
        self._group.abort()

    def _flat(self, num_bytes: int) -> torch.Tensor:
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._buffer[:num_bytes]

    def _broadcast(self, flat: torch.Tensor) -> Work:
        options = BroadcastOptions()
        options.rootRank = 0
        options.timeout = self._timeout
        work: Work = self._group.broadcast([flat], options)
        return work

    @contextmanager
    def _bounded(self, doing: str) -> Iterator[None]:
        with _as_publish_error(self._address, doing):
            yield


class BroadcastSender:
    """What a student rank keeps of its group.

    Args:
        rank: Of the student.
        host: Of this rank, as the engines can reach it.
        wire: See ``BroadcastGroup``.
    """

    def __init__(self, rank: int, host: str, wire: Wire = "gloo") -> None:
        self._rank, self._host, self._wire = rank, host, wire
        # The first free port; kept for the life of the rank, since generations differ by prefix.
        self._store = TCPStore(host, 0, None, is_master=True, wait_for_workers=False)
        self._group: BroadcastGroup | None = None

    @property
    def endpoint(self) -> tuple[str, int]:
        """Host and port of the store in which the group's members meet."""
        return self._host, self._store.port

    def connect(self, address: GroupAddress) -> None:
        """Build the group anew; waits for its engines.

        Raises:
            PublishError: not all of them came in time.
        """
        self.disconnect()
        self._store.set_timeout(timedelta(seconds=address.timeout_s))
        self._group = BroadcastGroup(self._store, address, 0, self._host, self._wire)

    def disconnect(self) -> None:
        """Break the group off."""
        if self._group is not None:
            self._group.close()
        self._group = None

    def group(self) -> BroadcastGroup:
        """The group that stands.

        Raises:
            PublishError: none does.
        """
        if self._group is None:
            raise PublishError(f"rank {self._rank} is in no broadcast group: connect comes first")
        return self._group


class BroadcastReceiver:
    """What an engine keeps of its groups, one per sending rank.

    Args:
        engine: Its name, as in ``GroupAddress.engines``.
        host: Of this engine, as the other members can reach it.
        wire: See ``BroadcastGroup``.
    """

    def __init__(self, engine: str, host: str, wire: Wire = "gloo") -> None:
        self._engine, self._host, self._wire = engine, host, wire
        self._groups: dict[int, BroadcastGroup] = {}

    def connect(self, address: GroupAddress) -> None:
        """Build the group of one sender anew; waits for its other members.

        Raises:
            PublishError: not all of them came in time.
        """
        if (former := self._groups.pop(address.sender, None)) is not None:
            former.close()
        member = 1 + address.engines.index(self._engine)
        timeout = timedelta(seconds=address.timeout_s)
        with _as_publish_error(address, "find its sender"):
            store = TCPStore(address.host, address.port, None, is_master=False, timeout=timeout)
        self._groups[address.sender] = BroadcastGroup(
            store, address, member, self._host, self._wire
        )

    def receive(self, message: BucketMessage) -> list[Bytes]:
        """A sender's next bucket; see ``BroadcastGroup.receive``."""
        group = self._groups.get(message.sender)
        if group is None:
            raise PublishError(
                f"{self._engine} is in no broadcast group of rank {message.sender}: connect first"
            )
        return group.receive(message)


@contextmanager
def _as_publish_error(address: GroupAddress, doing: str) -> Iterator[None]:
    """What torch.distributed raises, timeouts too, are plain RuntimeErrors."""
    try:
        yield
    except RuntimeError as error:
        first_line = str(error).splitlines()[0]
        raise PublishError(
            f"the broadcast group of rank {address.sender} with {', '.join(address.engines)} could "
            f"not {doing} within {address.timeout_s:.3g} s: {first_line}"
        ) from error


def _gloo(store: Store, member: int, size: int, timeout: timedelta, host: str) -> Any:  # noqa: ANN401 - torch exports no type for it
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    # By default gloo binds to whatever the machine's own name resolves to.
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timeout
    return dist.ProcessGroupGloo(store, member, size, options)


def _nccl(store: Store, member: int, size: int, timeout: timedelta) -> Any:  # noqa: ANN401 - torch exports no type for it
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, member, size, options)
