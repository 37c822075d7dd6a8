"""The folder that an hf student comes from: checked, described, remembered by checksum; torch-free.

The weights stay where the recipe says, and are read again at every start. What the run remembers of
them is a checksum: a resumed run, and above all a checkpoint that holds nothing but an adapter,
refuses a folder that has changed.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from actors.student_side import STUDENT_FOLDER, STUDENT_SEAL_FILE
from miniverl_dist.backends.weights_io import make_directory, read_json, write_json
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import CheckpointError, ConfigError
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.tokenizer import TokenizerLike
from miniverl_dist.training.checkpoint import seal

CONFIG_FILE: Final = "config.json"
BASE_FILE: Final = "base.json"
"""Checksum of the weights that the run was started with."""
_WEIGHTS: Final = "*.safetensors"
_MAX_HEADER_BYTES: Final = 100_000_000


@dataclass(frozen=True)
class HFFiles:
    """What a folder says of its model without loading it."""

    model_type: str
    vocab_size: int
    max_positions: int | None
    tensors: dict[str, tuple[int, ...]]
    """Shape of every stored tensor."""

    @property
    def num_parameters(self) -> int:
        """Numbers in all stored tensors."""
        return sum(math.prod(shape) for shape in self.tensors.values())

    def num_trained(self, model: HFStudentConfig) -> int:
        """Numbers that an optimizer step moves."""
        if model.lora is None:
            return self.num_parameters
        return sum(
            model.lora.rank * sum(shape)
            for name, shape in self.tensors.items()
            if name.split(".")[-2:-1] and name.split(".")[-2] in model.lora.target_modules
            if len(shape) == 2
        )


def read_hf_files(folder: Path, where: str = "") -> HFFiles:
    """Read ``config.json`` and the headers of the weights.

    Args:
        folder: Of the model.
        where: What errors begin with; default: the recipe's field.

    Raises:
        ConfigError: there is no such model, or its weights are no safetensors, or quantised.
    """
    where = where or f"student.model.path: {folder}"
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{where} holds no Hugging Face model (no {CONFIG_FILE}); give a local folder, models "
            "are not downloaded"
        )
    try:
        config: dict[str, Any] = read_json(folder / CONFIG_FILE)
        vocab_size = int(config["vocab_size"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{where}: {CONFIG_FILE} describes no text model: {error!r}") from error
    if "quantization_config" in config:
        raise ConfigError(
            f"{where} holds weights that are quantised already: give the folder they were made "
            "from, and set student.model.quantization"
        )
    files = sorted(folder.glob(_WEIGHTS))
    if not files:
        raise ConfigError(
            f"{where} holds no {_WEIGHTS}: other formats can run code when they are loaded; "
            "store the model again with transformers' save_pretrained"
        )
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    tensors = {name: shape for file in files for name, shape in _shapes(file)}
    return HFFiles(str(config.get("model_type")), vocab_size, limit, tensors)


def _shapes(file: Path) -> Iterator[tuple[str, tuple[int, ...]]]:
    try:
        with file.open("rb") as stream:
            (size,) = struct.unpack("<Q", stream.read(8))
            header = json.loads(stream.read(min(size, _MAX_HEADER_BYTES)))
        for name, entry in header.items():
            if name != "__metadata__":
                yield name, tuple(int(length) for length in entry["shape"])
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"student.model.path: {file} is no safetensors file: {error}") from error


def require_hf_student(config: RunConfig, model: HFStudentConfig) -> None:
    """Fail before anything is written when the student cannot be what the recipe says.

    Raises:
        ConfigError: the folder, its size or its tokenizer does not fit; there is no such device.
        MissingDependencyError: quantisation without its packages.
    """
    files = read_hf_files(model.path)
    require_ids(files.vocab_size, model.path, load_tokenizer(config.student.tokenizer))
    longest = min(config.rollout.max_context_tokens, model.max_context_tokens)
    if files.max_positions is not None and longest > files.max_positions:
        raise ConfigError(
            f"episodes of {longest} tokens exceed the {files.max_positions} positions of "
            f"{model.path.name}/: set student.model.max_context_tokens"
        )
    from miniverl_dist.backends.hf_model import device_of

    device_of(model)


def require_ids(vocab_size: int, folder: Path, tokenizer: TokenizerLike) -> None:
    """Raise unless a model has an embedding row for every id of a tokenizer.

    Raises:
        ConfigError: it has fewer.
    """
    if vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"student.model.path: {folder.name}/ has {vocab_size} vocabulary rows, tokenizer "
            f"{tokenizer.name} has {tokenizer.vocab_size} ids: set student.tokenizer to the folder "
            "of the model's own tokenizer"
        )


def prepare_hf_student(model: HFStudentConfig, run_dir: Path) -> None:
    """Note in the run what it starts from, and leave ``config.json`` there for its engines.

    Raises:
        CheckpointError: a file could not be written.
    """
    folder = run_dir / STUDENT_FOLDER
    make_directory(folder)
    config = read_json(model.path / CONFIG_FILE)
    # Some folders carry the path that they were stored under.
    write_json(folder / CONFIG_FILE, {k: v for k, v in config.items() if k != "_name_or_path"})
    base = {"name": model.path.name, "sha256": folder_sha256(model.path)}
    write_json(folder / BASE_FILE, base)
    seal(folder, run_dir / STUDENT_SEAL_FILE)


def base_sha256(run_dir: Path) -> str:
    """Checksum of the weights that the run was started with; its seal has been checked.

    Raises:
        CheckpointError: the run has no such file.
    """
    return str(read_json(run_dir / STUDENT_FOLDER / BASE_FILE)["sha256"])


def require_same_base(model: HFStudentConfig, run_dir: Path) -> None:
    """Raise when the folder no longer holds what the run was started with.

    Raises:
        CheckpointError: it has changed.
    """
    expected, found = base_sha256(run_dir), folder_sha256(model.path)
    if found != expected:
        raise CheckpointError(
            f"student.model.path: {model.path} has changed since the run was started (SHA-256 "
            f"{found[:12]}, expected {expected[:12]}): restore it, or start a new run"
        )


def folder_sha256(folder: Path) -> str:
    """SHA-256 (hex) over names and contents of the weights and ``config.json``."""
    whole = hashlib.sha256()
    for file in sorted([folder / CONFIG_FILE, *folder.glob(_WEIGHTS)]):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.name}\0{digest}\n".encode())
    return whole.hexdigest()
