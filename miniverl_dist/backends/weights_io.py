"""A toy model as a folder: weights as safetensors, everything else as JSON; torch-free.

No pickle, no class names: nothing in a folder can choose what code runs. Equal models give equal
bytes in every file.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.numpy import load as parse_safetensors
from safetensors.numpy import save as safetensors_bytes

from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import CheckpointError
from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.weights import NamedArrays

WEIGHTS_FILE = "model.safetensors"
MODEL_FILE = "model.json"
VOCABULARY_FILE = "vocabulary.json"
ARCHITECTURE = "miniverl-toy-decoder"


@dataclass(frozen=True)
class TokenizerIdentity:
    """Whose ids a vocabulary holds."""

    name: str
    fingerprint: str


@dataclass(frozen=True)
class ToyFolder:
    """What a toy model folder holds."""

    config: ToyModelConfig
    vocabulary_ids: IntArray
    """[V] sorted real ids."""
    tokenizer: TokenizerIdentity
    weights: NamedArrays


def parameter_shapes(config: ToyModelConfig, vocab_rows: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every weight, in the order they are drawn."""
    hidden, ffn = config.hidden_size, config.ffn_size
    shapes: dict[str, tuple[int, ...]] = {"embed": (vocab_rows, hidden)}
    for layer in range(config.num_layers):
        shapes |= {
            f"layers.{layer}.attn_norm": (hidden,),
            f"layers.{layer}.qkv": (3 * hidden, hidden),
            f"layers.{layer}.attn_out": (hidden, hidden),
            f"layers.{layer}.ffn_norm": (hidden,),
            f"layers.{layer}.gate_up": (2 * ffn, hidden),
            f"layers.{layer}.down": (hidden, ffn),
        }
    shapes["final_norm"] = (hidden,)
    return shapes


def check_shapes(found: NamedArrays, config: ToyModelConfig, vocab_rows: int) -> None:
    """Compare names, shapes and dtypes with what ``config`` describes.

    Raises:
        CheckpointError: they are those of another architecture; the message names the first.
    """
    wanted = parameter_shapes(config, vocab_rows)
    if missing := sorted(set(wanted) - set(found)):
        raise CheckpointError(f"weights lack {missing[0]!r} ({len(missing)} tensors missing)")
    if surplus := sorted(set(found) - set(wanted)):
        raise CheckpointError(
            f"weights hold {surplus[0]!r}, which a toy decoder with {config.num_layers} layers "
            f"does not have ({len(surplus)} tensors too many): another architecture"
        )
    for name, shape in wanted.items():
        array = found[name]
        if tuple(array.shape) != shape or array.dtype != np.float32:
            raise CheckpointError(
                f"weight {name!r} is {array.dtype} {tuple(array.shape)}, expected float32 {shape} "
                f"for {config.num_layers} layers, hidden {config.hidden_size}, "
                f"ffn {config.ffn_size} and {vocab_rows} vocabulary rows"
            )


def write_tensors(path: Path, tensors: NamedArrays) -> None:
    """Write named arrays as safetensors; the same arrays give the same bytes.

    Raises:
        CheckpointError: the file could not be written.
    """
    # safetensors stores raw memory: a transposed view would come back as other numbers.
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    write_bytes(path, safetensors_bytes(contiguous))


def read_tensors(path: Path) -> dict[str, NDArray[Any]]:
    """Read what ``write_tensors`` wrote.

    Raises:
        CheckpointError: the file is missing, cut off, or no safetensors file.
    """
    try:
        tensors: dict[str, NDArray[Any]] = parse_safetensors(read_bytes(path))
    except (SafetensorError, KeyError) as error:  # KeyError: a dtype that numpy does not have
        raise CheckpointError(f"{path.name}: not a complete safetensors file: {error}") from error
    return tensors


def write_json(path: Path, value: object) -> None:
    """Write JSON with sorted keys, one byte sequence per value."""
    write_bytes(path, (json.dumps(value, indent=2, sort_keys=True) + "\n").encode())


def read_json(path: Path) -> Any:  # noqa: ANN401 - JSON can be anything; callers check fields
    """Read JSON.

    Raises:
        CheckpointError: the file is missing or not JSON.
    """
    try:
        return json.loads(read_bytes(path))
    except ValueError as error:
        raise CheckpointError(f"{path.name}: not valid JSON: {error}") from error


def make_directory(path: Path) -> None:
    """Make a folder, with a failure as ``CheckpointError``."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(f"cannot make {path.name}: {error.strerror or error}") from error


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file, with a failure as ``CheckpointError`` (disk full, no permission)."""
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CheckpointError(f"cannot write {path.name}: {error.strerror or error}") from error


def read_bytes(path: Path) -> bytes:
    """Read a file, with a failure as ``CheckpointError``."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path.name}: {error.strerror or error}") from error


def vocabulary_sha256(ids: IntArray) -> str:
    """SHA-256 (hex) of sorted ids as little-endian int64."""
    return hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest()


def save_toy_folder(
    directory: Path,
    config: ToyModelConfig,
    vocabulary_ids: Sequence[int] | IntArray,
    tokenizer: TokenizerIdentity,
    weights: NamedArrays,
) -> None:
    """Write a toy model below ``directory``, which is made if needed.

    Raises:
        CheckpointError: a file could not be written.
    """
    make_directory(directory)
    ids = np.unique(np.asarray(vocabulary_ids, dtype=np.int64))
    write_tensors(directory / WEIGHTS_FILE, weights)
    write_json(directory / VOCABULARY_FILE, ids.tolist())
    description = {
        "architecture": ARCHITECTURE,
        "config": config.model_dump(mode="json"),
        "num_vocabulary_ids": len(ids),
        "vocabulary_sha256": vocabulary_sha256(ids),
        "tokenizer": asdict(tokenizer),
    }
    write_json(directory / MODEL_FILE, description)


def load_toy_folder(directory: Path) -> ToyFolder:
    """Read a toy model folder and check it against its own description.

    Raises:
        CheckpointError: a file is missing or broken, or the folder holds another architecture or
            another vocabulary than it says.
    """
    description = read_json(directory / MODEL_FILE)
    architecture = description.get("architecture") if isinstance(description, dict) else None
    if architecture != ARCHITECTURE:
        raise CheckpointError(
            f"{MODEL_FILE} describes architecture {architecture!r}, expected {ARCHITECTURE!r}"
        )
    try:
        config = ToyModelConfig.model_validate_json(json.dumps(description["config"]))
        tokenizer = TokenizerIdentity(**description["tokenizer"])
        expected = description["vocabulary_sha256"]
        ids = np.array(read_json(directory / VOCABULARY_FILE), dtype=np.int64)
    except (KeyError, TypeError, ValueError, ValidationError) as error:
        raise CheckpointError(f"{MODEL_FILE} or {VOCABULARY_FILE} is malformed: {error}") from error
    if vocabulary_sha256(ids) != expected:
        raise CheckpointError(
            f"{VOCABULARY_FILE} holds {len(ids)} ids with SHA-256 {vocabulary_sha256(ids)[:12]}, "
            f"but {MODEL_FILE} was written for {str(expected)[:12]}"
        )
    weights = read_tensors(directory / WEIGHTS_FILE)
    check_shapes(weights, config, len(ids))
    return ToyFolder(config, ids, tokenizer, weights)
