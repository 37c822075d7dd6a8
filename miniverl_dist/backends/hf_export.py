"""A checkpoint of an hf student as a folder for others: merged weights, or the adapter alone."""

from __future__ import annotations

from pathlib import Path

import torch

from miniverl_dist.backends.hf_adapters import ACTOR
from miniverl_dist.backends.hf_checkpoint import HFCheckpoint
from miniverl_dist.backends.hf_model import load_module
from miniverl_dist.backends.hf_peft import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_WEIGHTS_FILE,
    peft_config,
    peft_name,
)
from miniverl_dist.backends.hf_student import HFStudent
from miniverl_dist.backends.tensors import as_numpy
from miniverl_dist.backends.weights_io import (
    TokenizerIdentity,
    make_directory,
    write_json,
    write_tensors,
)
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import CheckpointError, ConfigError


def stored_student(
    config: HFStudentConfig,
    vocab_rows: int,
    tokenizer: TokenizerIdentity,
    base_sha256: str,
    checkpoint: Path,
    policy_version: int,
) -> HFStudent:
    """The actor of a checkpoint, without optimizer and reference.

    Where nothing is quantised, it is loaded into CPU memory.

    Raises:
        CheckpointError, TokenizerMismatchError: the checkpoint is broken or does not fit.
        ConfigError, MissingDependencyError: the model cannot be loaded here.
    """
    if config.quantization == "none":
        config = config.model_copy(update={"device": "cpu"})
    student = HFStudent(config, vocab_rows, with_reference=False, seed=0)
    _, weights = HFCheckpoint(student, tokenizer, base_sha256).read_actor(
        checkpoint, policy_version
    )
    student.take(weights)
    return student


@torch.no_grad()
def write_merged(student: HFStudent, directory: Path) -> None:
    """Write what transformers' ``from_pretrained`` loads: the actor's weights, adapter included.

    Raises:
        CheckpointError: a file could not be written.
    """
    config = student.model.config
    merged = {name: weight.cpu() for name, weight in student.merged()}
    module = student.model.module
    if config.quantization != "none":
        plain = config.model_copy(update={"quantization": "none", "device": "cpu"})
        module = load_module(plain)
    for name, parameter in module.named_parameters():
        parameter.copy_(merged[name])
    # Folders can carry the path that they were loaded from.
    module.config.name_or_path = ""
    try:
        module.save_pretrained(directory)
    except OSError as error:
        raise CheckpointError(f"cannot write {directory.name}: {error}") from error


def write_adapter(student: HFStudent, directory: Path) -> None:
    """Write the actor's adapter as the ``peft`` package does.

    Raises:
        ConfigError: the student has none.
        CheckpointError: a file could not be written.
    """
    if student.adapters is None:
        raise ConfigError(
            "export --format adapter: the student of this run was trained without LoRA; "
            "use --format hf"
        )
    make_directory(directory)
    factors = student.adapters.factors(ACTOR)
    tensors = {peft_name(name): as_numpy(factor) for name, factor in factors.items()}
    write_tensors(directory / ADAPTER_WEIGHTS_FILE, tensors)
    write_json(directory / ADAPTER_CONFIG_FILE, peft_config(student.adapters))
