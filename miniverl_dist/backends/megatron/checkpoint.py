"""Sharded checkpoints of named parameters in megatron's torch_dist format.

A checkpoint is one folder per *kind* (weights, reference, first and second moments, masters), each
of which holds whole parameters under the model's own names. Kinds share one code path, and every
layout reads what another has written: also with other expert groups, where megatron's own format
for optimizer state cannot (it numbers the optimizers that it chains, and their number depends on
the layout).

No code in a load path: the index of a folder, which torch unpickles, is checked before (see
``index_check``), and tensors are read with ``weights_only``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save as save_state_dict

from miniverl_dist.backends.megatron.index_check import check_index
from miniverl_dist.backends.weights_io import make_directory
from miniverl_dist.errors import CheckpointError

INDEX_FILE = ".metadata"
COMPLETE_FILE = "metadata.json"
_FAILURES = (
    CheckpointingException,
    CheckpointException,
    OSError,
    EOFError,
    KeyError,
    ValueError,
    RuntimeError,
)


def save_parameters(module: torch.nn.Module, values: Mapping[str, Tensor], directory: Path) -> None:
    """Write one tensor per parameter of the whole model; all ranks together.

    Args:
        module: The model on this rank.
        values: parameter name on this rank -> tensor of the parameter's shape. Where a parameter
            has replicas, only the first one's values are read.
        directory: new or empty.

    Raises:
        CheckpointError: a file could not be written; on all ranks.
    """
    with agreed_failures(f"cannot write {directory.name}"):
        if dist.get_rank() == 0:
            make_directory(directory)
    with agreed_failures(f"cannot write {directory.name}"):
        dist_checkpointing.save(
            _sharded(module, values), str(directory), sharded_strategy=_InThisProcess()
        )


def load_parameters(
    module: torch.nn.Module, dtypes: Mapping[str, torch.dtype], directory: Path
) -> dict[str, Tensor]:
    """Read this rank's part of what ``save_parameters`` wrote under any layout.

    Args:
        module: The model on this rank.
        dtypes: parameter name -> dtype that was written.
        directory: the folder.

    Returns:
        Parameter name -> CPU tensor of the parameter's shape; the model is left as it is.

    Raises:
        CheckpointError: broken, or of another architecture; on all ranks.
    """
    what = f"{directory.name} of the checkpoint cannot be read"
    with agreed_failures(what):
        _check_folder(directory)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    targets = {name: torch.zeros(shapes[name], dtype=dtypes[name]) for name in shapes}
    with agreed_failures(what):
        loaded = dist_checkpointing.load(_sharded(module, targets), str(directory))
    return {name: loaded[name].view(shapes[name]) for name in shapes}


@contextmanager
def agreed_failures(what: str) -> Iterator[None]:
    """Raise ``CheckpointError`` on all ranks when the block failed on one; all ranks meet here."""
    problem = ""
    try:
        yield
    except CheckpointError as error:
        problem = str(error)
    except _FAILURES as error:
        lines = f"{type(error).__name__}: {error}".splitlines()
        problem = f"{what}: {' '.join(lines[:3])[:400]}"
    problems: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for rank, found in enumerate(problems):
        if found:
            raise CheckpointError(found if len(problems) == 1 else f"rank {rank}: {found}")


class _NamelessWriter(FileSystemWriter):
    """Leaves the folder's own path and a random id out of the index: equal states, equal bytes."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


class _InThisProcess(TorchDistSaveShardedStrategy):  # type: ignore[misc]
    """Writes with torch's own writer, in threads of this process.

    megatron's writer hands its results through a queue of a spawned manager process, which imports
    the caller's ``__main__`` once more; within a Ray actor that hangs.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Path) -> None:  # noqa: ANN401
        renamed, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        save_state_dict(
            mcore_to_pyt_state_dict(renamed, False),
            storage_writer=_NamelessWriter(checkpoint_dir),
            planner=MCoreSavePlanner(
                dedup_replicated_tensors=False,
                flatten_state_dict=False,
                flatten_sharded_tensors=False,
            ),
        )


def _sharded(module: torch.nn.Module, values: Mapping[str, Tensor]) -> dict[str, Any]:
    """Name on this rank -> ``values``, described as a part of the whole model's parameter."""
    metadata = ensure_metadata_has_dp_cp_group({})
    described: dict[str, Any] = {}
    parts = module.sharded_state_dict(metadata=metadata)  # type: ignore[operator]
    by_parameter = {
        id(part.data): part
        for part in parts.values()
        if isinstance(part, ShardedTensor | ShardedTensorFactory)
    }
    for name, parameter in module.named_parameters():
        part = by_parameter.get(id(parameter))
        if part is None:
            raise CheckpointError(f"megatron does not describe parameter {name!r}")
        changes: dict[str, Any] = {"data": values[name]}
        if isinstance(part, ShardedTensor):
            changes["dtype"] = values[name].dtype
        described[name] = replace(part, **changes)
    return described


def _check_folder(directory: Path) -> None:
    if not (directory / COMPLETE_FILE).is_file():
        raise CheckpointError(
            f"{directory.name} has no {COMPLETE_FILE}: it was not written to its end"
        )
    check_index(directory / INDEX_FILE)
