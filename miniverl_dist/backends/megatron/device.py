"""The device and the process groups of one rank: cuda with nccl, or cpu with gloo."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

from miniverl_dist.backends.megatron import cpu_compat
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.errors import ConfigError


def current_device() -> torch.device:
    """Where this rank computes."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def connect_ranks(address: RankAddress, timeout_s: float) -> None:
    """Meet the other ranks; alone, nothing listens and the address is not used.

    Args:
        address: Of this rank; its listener is used up.
        timeout_s: For the meeting, and for every collective of the default group.
    """
    cpu_compat.install()
    backend = "gloo"
    if torch.cuda.is_available():
        # Ray shows an actor only its own GPUs; elsewhere the ranks of a machine share the list.
        torch.cuda.set_device(address.rank % torch.cuda.device_count())
        backend = "nccl"
    store: Any
    if address.world_size == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    else:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            address.master_addr,
            address.master_port,
            address.world_size,
            is_master=address.rank == 0,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=None if address.listener is None else address.listener.detach(),
        )
    dist.init_process_group(
        backend,
        store=store,
        rank=address.rank,
        world_size=address.world_size,
        timeout=timedelta(seconds=timeout_s),
    )


def lay_out_ranks(parallel: ParallelConfig, *, timeout_s: float, seed: int = 0) -> None:
    """Make megatron's groups among connected ranks, in place of earlier ones.

    Args:
        parallel: The layout; data parallelism takes the ranks that are left.
        timeout_s: For every collective of these groups.
        seed: Of megatron's random states (they draw nothing: there is no dropout).

    Raises:
        ConfigError: the ranks do not divide so.
    """
    if problem := parallel.problem(dist.get_world_size()):
        raise ConfigError(f"student.model.parallel: {problem}")
    _leave_groups()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=timeout_s / 60,
    )
    tensor_parallel.model_parallel_cuda_manual_seed(seed)


def init_ranks(address: RankAddress, parallel: ParallelConfig, timeout_s: float) -> None:
    """Connect this rank with the others and lay them out; see the two functions above.

    Raises:
        ConfigError: the ranks do not divide so; nothing stays connected.
    """
    connect_ranks(address, timeout_s)
    try:
        lay_out_ranks(parallel, timeout_s=timeout_s)
    except ConfigError:
        shutdown_ranks()
        raise


def shutdown_ranks() -> None:
    """Leave all groups; afterwards ``init_ranks`` can be called again. No collective."""
    _leave_groups()
    if dist.is_initialized():
        dist.destroy_process_group()


def _leave_groups() -> None:
    """Leave all groups but the default one, each of which has threads that poll."""
    parallel_state.destroy_model_parallel()
    # What megatron keeps for the process's life would let groups outlive this call, and in a
    # process forked later their end is a crash or a hang: rotary tables, cached by module and
    # group, and the groups that destroy_model_parallel forgets.
    RotaryEmbedding.forward.cache_clear()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    if dist.is_initialized():
        for group in list(dist.distributed_c10d._world.pg_map):
            if group is not dist.group.WORLD:
                dist.destroy_process_group(group)


@contextmanager
def single_rank(parallel: ParallelConfig, timeout_s: float = 60.0) -> Iterator[None]:
    """A student of one rank in this process, for the time of the block."""
    init_ranks(RankAddress(), parallel, timeout_s)
    try:
        yield
    finally:
        shutdown_ranks()
