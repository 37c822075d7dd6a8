"""Weights between this rank's parameters and Hugging Face tensors, both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from miniverl_dist.backends.megatron.architecture import hf_parameters
from miniverl_dist.backends.megatron.hf_folder import (
    HFFolder,
    Sliceable,
    initial_weights,
    shard_name,
    write_config,
    write_description,
    write_shard,
)
from miniverl_dist.backends.megatron.setup import MegatronModel
from miniverl_dist.backends.megatron.weight_map import (
    Coordinates,
    Parameter,
    Unit,
    export_buckets,
    rank_parameters,
)
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.errors import CheckpointError

Read = Callable[[str], Sliceable]


def layout_of(model: MegatronModel) -> ParallelConfig:
    """The layout that a model was built for."""
    config = model.config
    return ParallelConfig(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        context=config.context_parallel_size,
        expert=config.expert_model_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size,
        sequence=config.sequence_parallel,
    )


def this_rank() -> Coordinates:
    """Where this rank stands."""
    return Coordinates(
        pipeline=parallel_state.get_pipeline_model_parallel_rank(),
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        expert=parallel_state.get_expert_model_parallel_rank(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_rank(),
    )


def is_stage_sender() -> bool:
    """Whether this rank sends its stage's weights: the first of the stage."""
    return _is_first_replica() and parallel_state.get_tensor_model_parallel_rank() == 0


def _is_first_replica() -> bool:
    """First of the ranks that hold these dense weights."""
    data: int = parallel_state.get_data_parallel_rank()
    context: int = parallel_state.get_context_parallel_rank()
    return data == context == 0


@torch.no_grad()
def load_hf(model: MegatronModel, read: Read) -> None:
    """Fill this rank's parameters; only what it holds is read. No collective.

    An optimizer with masters of its own (bfloat16) has to take them over afterwards
    (``reload_model_params``).

    Args:
        model: The stage.
        read: Name -> tensor, whole or lazy (``HFFolder.read``).

    Raises:
        CheckpointError: a tensor is missing or has another shape; no parameter has changed.
    """
    shapes = hf_parameters(model.arch)
    parameters = rank_parameters(model.arch, layout_of(model), this_rank())
    targets = dict(model.module.named_parameters())
    if foreign := set(targets) ^ {p.name for p in parameters}:
        raise CheckpointError(
            f"the weight map and megatron's model disagree on {sorted(foreign)[0]!r} "
            f"({len(foreign)} parameters): another version of megatron-core?"
        )
    for name in dict.fromkeys(s.tensor for p in parameters for s in p.slices):
        _check_shape(name, tuple(read(name).shape), shapes[name])
    for parameter in parameters:
        _fill(targets[parameter.name], parameter, read)


def _check_shape(name: str, found: tuple[int, ...], expected: tuple[int, ...]) -> None:
    if found != expected:
        raise CheckpointError(f"weight {name!r} has shape {found}, expected {expected}")


def _fill(target: torch.Tensor, parameter: Parameter, read: Read) -> None:
    axis, position = parameter.axis, 0
    sources = {s.tensor: read(s.tensor) for s in parameter.slices}
    everything = (slice(None),) * axis
    for part in parameter.slices:
        size = part.stop - part.start
        source = sources[part.tensor][(*everything, slice(part.start, part.stop))]
        target.narrow(axis, position, size).copy_(source)
        position += size
    target.narrow(axis, position, parameter.padding).zero_()


def export(model: MegatronModel, bucket_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    """The weights as Hugging Face tensors; see ``backends.base.StudentBackend.export``.

    Each stage gathers its own, over tensor and expert ranks, at its first rank; that one sends.
    All other ranks walk along with empty buckets, and so does a stage that has finished first.

    Args:
        model: The stage.
        bucket_bytes: Gathered at a time; a larger tensor goes alone, an expert's with those of the
            same number on the other expert ranks.

    Returns:
        Buckets of tensors on this rank's device, valid until the next one.
    """
    layout, itemsize = layout_of(model), model.config.params_dtype.itemsize
    stages = [
        export_buckets(model.arch, layout, stage, itemsize=itemsize, bucket_bytes=bucket_bytes)
        for stage in range(layout.pipeline)
    ]
    own = stages[this_rank().pipeline]
    gather = _Gather(model, layout)
    for index in range(max(len(buckets) for buckets in stages)):
        yield gather.bucket(own[index]) if index < len(own) else {}


class _Gather:
    """Collects parameters of one stage at its sender and cuts them into Hugging Face tensors."""

    def __init__(self, model: MegatronModel, layout: ParallelConfig) -> None:
        self._targets = dict(model.module.named_parameters())
        self._shapes = hf_parameters(model.arch)
        at = this_rank()
        self._own = rank_parameters(model.arch, layout, at)
        self._peers: list[list[Parameter]] = []
        self._expert_peers: list[list[Parameter]] = []
        if not is_stage_sender():
            return
        self._peers = [
            rank_parameters(model.arch, layout, Coordinates(pipeline=at.pipeline, tensor=rank))
            for rank in range(layout.tensor)
        ]
        # In the order of megatron's group: expert tensor ranks change fastest.
        self._expert_peers = [
            rank_parameters(model.arch, layout, Coordinates(at.pipeline, 0, expert, part))
            for expert in range(layout.expert)
            for part in range(layout.expert_tensor)
        ]

    @torch.no_grad()
    def bucket(self, units: list[Unit]) -> dict[str, torch.Tensor]:
        """Gather these units; empty but on the sender."""
        kinds: dict[str, list[Unit]] = {"whole": [], "split": [], "expert": []}
        for unit in units:
            own = self._own[unit.parameter]
            kinds["expert" if own.is_expert else "split" if own.is_split else "whole"].append(unit)
        found: dict[str, torch.Tensor] = {}
        if is_stage_sender():
            for unit in kinds["whole"]:
                self._place(found, self._own, unit, self._pieces(unit))
        if kinds["split"] and _is_first_replica():
            group = parallel_state.get_tensor_model_parallel_group()
            self._gather(found, kinds["split"], group, self._peers)
        if kinds["expert"] and parallel_state.get_expert_data_parallel_rank() == 0:
            group = parallel_state.get_expert_tensor_and_model_parallel_group()
            self._gather(found, kinds["expert"], group, self._expert_peers)
        return found

    def _pieces(self, unit: Unit) -> list[torch.Tensor]:
        """This rank's slices of a unit; with padding, so that all ranks' are equally large."""
        own = self._own[unit.parameter]
        target = self._targets[own.name]
        return [
            target.narrow(own.axis, position, part.stop - part.start + own.padding)
            for part, position in own.places(own.tensors[unit.part])
        ]

    def _gather(
        self,
        found: dict[str, torch.Tensor],
        units: list[Unit],
        group: dist.ProcessGroup,
        peers: list[list[Parameter]],
    ) -> None:
        own = [(unit, self._pieces(unit)) for unit in units]
        flat = torch.cat([piece.reshape(-1) for _, pieces in own for piece in pieces])
        received = [torch.empty_like(flat) for _ in peers] or None
        dist.gather(flat, received, group=group, group_dst=0)
        for peer, buffer in zip(peers, received or [], strict=True):
            position = 0
            for unit, pieces in own:
                arrived = []
                for piece in pieces:
                    part = buffer[position : position + piece.numel()]
                    arrived.append(part.view(piece.shape))
                    position += piece.numel()
                self._place(found, peer, unit, arrived)

    def _place(
        self,
        found: dict[str, torch.Tensor],
        peer: list[Parameter],
        unit: Unit,
        pieces: list[torch.Tensor],
    ) -> None:
        """Put a rank's pieces where its slices say."""
        parameter = peer[unit.parameter]
        tensor = parameter.tensors[unit.part]
        if tensor not in found:
            found[tensor] = pieces[0].new_empty(self._shapes[tensor])
        for (part, _), piece in zip(parameter.places(tensor), pieces, strict=True):
            size = part.stop - part.start
            target = found[tensor].narrow(parameter.axis, part.start, size)
            target.copy_(piece.narrow(parameter.axis, 0, size))


def save_hf(model: MegatronModel, directory: Path, *, bucket_bytes: int = 1024**3) -> None:
    """Write a Hugging Face folder that transformers loads; every stage writes its own shards.

    All ranks have to call it, and have to see the same file system. The folder is complete when
    the call returns.

    Args:
        model: The stage.
        directory: Made if needed.
        bucket_bytes: Of a shard, and of what is gathered at a time.

    Raises:
        CheckpointError: a file could not be written, by whichever rank; all of them raise.
    """
    layout, stage = layout_of(model), this_rank().pipeline
    sizes = {"itemsize": model.config.params_dtype.itemsize, "bucket_bytes": bucket_bytes}
    counts = [
        len(export_buckets(model.arch, layout, index, **sizes)) for index in range(layout.pipeline)
    ]
    file_of: dict[str, str] = {}
    failure = ""
    for index, bucket in enumerate(export(model, bucket_bytes)):
        # The others cannot know of a failure yet: this rank walks along to the end.
        if bucket and not failure:
            file = shard_name(sum(counts[:stage]) + index, sum(counts))
            failure = _failure_of(partial(write_shard, directory / file, bucket))
            file_of |= dict.fromkeys(bucket, file)
    written = _from_all_ranks(file_of, failure)
    failure = ""
    if dist.get_rank() == 0:
        merged = {name: file for part in written for name, file in part.items()}
        dtype = model.config.params_dtype
        failure = _failure_of(partial(write_description, directory, model.arch, dtype, merged))
    _from_all_ranks({}, failure)


def _failure_of(write: Callable[[], None]) -> str:
    try:
        write()
    except CheckpointError as error:
        return str(error)
    return ""


def _from_all_ranks(value: dict[str, str], failure: str) -> list[dict[str, str]]:
    """Every rank's value; when one has failed, all of them raise."""
    gathered: list[tuple[dict[str, str], str]] = [({}, "")] * dist.get_world_size()
    dist.all_gather_object(gathered, (value, failure))
    for rank, (_, message) in enumerate(gathered):
        if message:
            raise CheckpointError(f"rank {rank}: {message}")
    return [found for found, _ in gathered]


__all__ = [
    "HFFolder",
    "Read",
    "Sliceable",
    "export",
    "initial_weights",
    "is_stage_sender",
    "layout_of",
    "load_hf",
    "save_hf",
    "this_rank",
    "write_config",
]
