"""Hugging Face folders: weights read slice by slice, written shard by shard."""

from __future__ import annotations

import hashlib
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from miniverl_dist.backends.megatron.architecture import Architecture, hf_parameters
from miniverl_dist.backends.weights_io import make_directory, read_json, write_json
from miniverl_dist.errors import CheckpointError

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
CONFIG_FILE = "config.json"
INITIAL_STD = 0.02
SHARD_BYTES = 1024**3


class Sliceable(Protocol):
    """A tensor of which parts can be had: a torch tensor, or one that lies in a file."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole tensor."""

    def __getitem__(self, key: tuple[slice, ...]) -> torch.Tensor:
        """The part under slices with steps of 1."""


class _Stored:
    """A tensor in a safetensors file; only the slices that are asked for are read."""

    def __init__(self, handle: Any) -> None:  # noqa: ANN401 - safetensors has no types
        self._handle = handle
        self.shape = tuple(int(size) for size in handle.get_shape())

    def __getitem__(self, key: tuple[slice, ...]) -> torch.Tensor:
        part: torch.Tensor = self._handle[key]
        return part


class _ExpertOf:
    """One expert's matrix within a tensor of all experts, [E, rows, columns]."""

    def __init__(self, fused: _Stored, expert: int, start: int, rows: int) -> None:
        self._fused, self._expert, self._start = fused, expert, start
        self.shape = (rows, fused.shape[2])

    def __getitem__(self, key: tuple[slice, ...]) -> torch.Tensor:
        rows, *columns = key
        start, stop, _ = rows.indices(self.shape[0])
        rows = slice(self._start + start, self._start + stop)
        return self._fused[(slice(self._expert, self._expert + 1), rows, *columns)][0]


class HFFolder:
    """The weights of a Hugging Face folder under the names of ``architecture.hf_parameters``.

    Names of a multimodal model (``model.language_model.``) and experts that are stored as one
    tensor per layer are found too.

    Args:
        directory: Holds ``model.safetensors``, or shards with their index.

    Raises:
        CheckpointError: no weights there, or an index that is malformed.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, Any] = {}
        index = directory / INDEX_FILE
        if index.is_file():
            content = read_json(index)
            found = content.get("weight_map") if isinstance(content, dict) else None
            if not isinstance(found, dict):
                raise CheckpointError(f"{index}: has no object `weight_map`")
            self._file_of: dict[str, str] = found
        else:
            self._file_of = dict.fromkeys(self._open(SINGLE_FILE).keys(), SINGLE_FILE)

    def read(self, name: str) -> Sliceable:
        """A tensor, not read yet.

        Raises:
            CheckpointError: the folder does not hold it, or its file is missing or broken.
        """
        for spelled in (name, name.replace("model.", "model.language_model.", 1)):
            if spelled in self._file_of:
                return self._stored(spelled)
            if (part := self._expert(spelled)) is not None:
                return part
        raise CheckpointError(
            f"{self._directory}: holds no tensor {name!r} among its {len(self._file_of)}: "
            "the weights of another architecture?"
        )

    def _expert(self, name: str) -> _ExpertOf | None:
        """Part of ``experts.gate_up_proj`` [E, 2F, H] or ``experts.down_proj`` [E, H, F]."""
        layer, found, rest = name.partition(".experts.")
        if not found:
            return None
        number, projection = rest.split(".")[:2]
        fused_name = "down_proj" if projection == "down_proj" else "gate_up_proj"
        spelled = f"{layer}.experts.{fused_name}"
        if spelled not in self._file_of:
            return None
        fused, expert = self._stored(spelled), int(number)
        if len(fused.shape) != 3 or expert >= fused.shape[0]:
            raise CheckpointError(
                f"{self._directory}: {spelled!r} has shape {fused.shape}, which holds no expert "
                f"{expert}"
            )
        rows = fused.shape[1] if projection == "down_proj" else fused.shape[1] // 2
        return _ExpertOf(fused, expert, rows if projection == "up_proj" else 0, rows)

    def _stored(self, name: str) -> _Stored:
        file = self._file_of[name]
        try:
            return _Stored(self._open(file).get_slice(name))
        except SafetensorError as error:
            raise CheckpointError(f"{self._directory / file}: {name!r}: {error}") from error

    def _open(self, file: str) -> Any:  # noqa: ANN401 - safetensors has no types
        if file not in self._files:
            path = self._directory / file
            try:
                self._files[file] = safe_open(path, framework="pt", device="cpu")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{path}: cannot be read as safetensors ({error}): is the folder complete?"
                ) from error
        return self._files[file]


def shard_name(index: int, count: int) -> str:
    """File of shard ``index`` (from 0) of ``count``."""
    return SINGLE_FILE if count == 1 else f"model-{index + 1:05d}-of-{count:05d}.safetensors"


def write_shard(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write one safetensors file; its folder is made if needed.

    Raises:
        CheckpointError: it could not be written.
    """
    make_directory(path.parent)
    stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    try:
        save_file(stored, path, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {path.name}: {error}") from error


def write_config(arch: Architecture, directory: Path, dtype: torch.dtype = torch.float32) -> None:
    """Write the ``config.json`` of a decoder into a folder, which is made if needed.

    Raises:
        CheckpointError: it could not be written.
    """
    make_directory(directory)
    config = arch.hf_config() | {"dtype": str(dtype).removeprefix("torch.")}
    write_json(directory / CONFIG_FILE, config)


def write_description(
    directory: Path, arch: Architecture, dtype: torch.dtype, file_of: Mapping[str, str]
) -> None:
    """Write ``config.json`` and, for more than one shard, the index that transformers reads."""
    write_config(arch, directory, dtype)
    if set(file_of.values()) == {SINGLE_FILE}:
        (directory / INDEX_FILE).unlink(missing_ok=True)
        return
    total = arch.num_parameters * dtype.itemsize
    index = {"metadata": {"total_size": total}, "weight_map": dict(file_of)}
    write_json(directory / INDEX_FILE, index)


def initial_weights(
    arch: Architecture,
    seed: int,
    directory: Path,
    dtype: torch.dtype = torch.float32,
    *,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Draw a model and write it as a Hugging Face folder, a shard at a time.

    Every tensor has a random state of its own, from the seed and its name. A folder that is there
    already is kept: it appears under its name only when it is complete.

    Args:
        arch: What to draw.
        seed: Equal seeds give equal weights.
        directory: The folder.
        dtype: Of the stored weights; drawn in float32.
        shard_bytes: Of a file; a larger tensor has its own.

    Raises:
        CheckpointError: a file could not be written.

    Source:
        The distributions are those that transformers has for these models.
    """
    if (directory / CONFIG_FILE).exists():
        return
    partial = directory.with_name(f"{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    shapes = hf_parameters(arch)
    shards = list(_shards(shapes, dtype.itemsize, shard_bytes))
    file_of: dict[str, str] = {}
    for index, names in enumerate(shards):
        file = shard_name(index, len(shards))
        drawn = {name: _draw(name, shapes[name], arch, seed).to(dtype) for name in names}
        write_shard(partial / file, drawn)
        file_of |= dict.fromkeys(names, file)
    write_description(partial, arch, dtype, file_of)
    try:
        partial.rename(directory)
    except OSError as error:
        raise CheckpointError(
            f"{directory}: cannot be made ({error.strerror or error}): is something else there?"
        ) from error


def _shards(
    shapes: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> Iterator[Iterable[str]]:
    names: list[str] = []
    filled = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * itemsize
        if names and filled + size > shard_bytes:
            yield names
            names, filled = [], 0
        names.append(name)
        filled += size
    yield names


def _draw(name: str, shape: tuple[int, ...], arch: Architecture, seed: int) -> torch.Tensor:
    digest = hashlib.sha256(f"{seed}\0{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    tensor = torch.empty(shape)
    if name.endswith("A_log"):
        return tensor.uniform_(1, 16, generator=generator).log_()
    if len(shape) == 1:
        # Norm weights of the hybrid are stored minus 1, those in its delta nets are not.
        is_centered = arch.gated_attention and ".linear_attn." not in name
        return tensor.fill_(0.0 if is_centered else 1.0)
    return tensor.normal_(0.0, INITIAL_STD, generator=generator)
