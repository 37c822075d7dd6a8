"""The folder that an hf student comes from: checked, described, remembered by checksum; torch-free.

The weights stay where the recipe says, and are read again at every start. What the run remembers of
them is a checksum: a resumed run, and above all a checkpoint that holds nothing but an adapter,
refuses a folder that has changed.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from actors.student_side import STUDENT_FOLDER, STUDENT_SEAL_FILE
from actors.tensor_headers import SAFETENSORS, stored_shapes
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
_DESCRIPTIONS: Final = (CONFIG_FILE, "adapter_config.json", "model.json")
"""Of a Hugging Face model, of an adapter alone, of a toy."""


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
    config = read_model_config(folder, where)
    vocab_size = config.get("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ConfigError(
            f"{where}: {CONFIG_FILE} describes no text model: vocab_size is {vocab_size!r}, "
            "expected a number of tokens"
        )
    if "quantization_config" in config:
        raise ConfigError(
            f"{where} holds weights that are quantised already: give the folder they were made "
            "from, and set student.model.quantization"
        )
    files = sorted(folder.glob(SAFETENSORS))
    if not files:
        raise ConfigError(
            f"{where} holds no {SAFETENSORS}: other formats can run code when they are loaded; "
            "store the model again with transformers' save_pretrained"
        )
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    if limit is not None and type(limit) is not int:
        raise ConfigError(
            f"{where}: {CONFIG_FILE} gives {limit!r} positions, expected a number of tokens"
        )
    return HFFiles(str(config.get("model_type")), vocab_size, limit, stored_shapes(files, where))


def read_model_config(folder: Path, where: str) -> dict[str, Any]:
    """The fields of a folder's ``config.json``.

    Args:
        folder: Of the model.
        where: What errors begin with.

    Raises:
        ConfigError: there is none, or it holds something else.
    """
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(
            f"{where} holds no Hugging Face model (no {CONFIG_FILE}); give a local folder, models "
            "are not downloaded"
        )
    try:
        config = read_json(folder / CONFIG_FILE)
    except CheckpointError as error:
        raise ConfigError(f"{where}: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"{where}: {CONFIG_FILE} holds no JSON object")
    return config


def check_hf_student(config: RunConfig, model: HFStudentConfig) -> None:
    """Raise when the student cannot be what the recipe says; which device it gets is not asked.

    Raises:
        ConfigError: the folder, its weights, its size or its tokenizer does not fit, its layers do
            not take the adapters, or it cannot be sampled.
        MissingDependencyError: transformers is not installed.
    """
    where = f"student.model.path: {model.path}"
    files = read_hf_files(model.path)
    require_ids(files.vocab_size, model.path, load_tokenizer(config.student.tokenizer))
    longest = min(config.rollout.max_context_tokens, model.max_context_tokens)
    if files.max_positions is not None and longest > files.max_positions:
        raise ConfigError(
            f"episodes of {longest} tokens exceed the {files.max_positions} positions of "
            f"{model.path.name}/: set student.model.max_context_tokens"
        )
    from miniverl_dist.backends.hf_adapters import adapted_layers
    from miniverl_dist.backends.hf_skeleton import require_described, skeleton
    from rollout_server.engines.hf_decoder import sampled_config

    module = skeleton(model.path, where)
    require_described(module, files.tensors, where)
    try:
        sampled_config(model.path)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    if model.lora is not None:
        adapted_layers(module, model.lora.target_modules)


def require_device(model: HFStudentConfig) -> None:
    """Raise unless this machine has the device that a recipe asks for.

    Raises:
        ConfigError: there is none.
        MissingDependencyError: quantisation without its packages.
    """
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
    """SHA-256 (hex) over names and contents of a model's or adapter's weights and description."""
    whole = hashlib.sha256()
    described = next((name for name in _DESCRIPTIONS if (folder / name).is_file()), CONFIG_FILE)
    for file in sorted([folder / described, *weight_files(folder)]):
        with file.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        whole.update(f"{file.name}\0{digest}\n".encode())
    return whole.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Files with a folder's weights: safetensors, or where it has none (a teacher), the others."""
    return sorted(folder.glob(SAFETENSORS)) or sorted(folder.glob("*.bin"))
