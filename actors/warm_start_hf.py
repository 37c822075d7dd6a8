"""The warm start of an hf student: a checkpoint's weights or adapter, or an adapter from a folder.

What can be compared without the model is compared before a run directory is made; the rest when the
student is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from actors.hf_files import folder_sha256
from miniverl_dist.backends.weights_io import read_json
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import CheckpointError, ConfigError, TokenizerMismatchError
from miniverl_dist.tokens.load import load_tokenizer

if TYPE_CHECKING:
    from miniverl_dist.backends.hf import HFBackend

_STUDENT_FILE: Final = "student.json"
HF_WEIGHTS: Final = ("weights.safetensors", "adapter.safetensors")
"""Of a checkpoint: all of a student, or its adapter."""
ADAPTER_CONFIG: Final = "adapter_config.json"
ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_HINT: Final = "; to start from whole weights, name their folder as student.model.path"


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter in the layout of ``peft``."""
    return (folder / ADAPTER_CONFIG).is_file()


def start_files(config: RunConfig, model: HFStudentConfig, folder: Path) -> tuple[str, ...]:
    """Names of the files in a checkpoint or adapter folder that a student is started from.

    Raises:
        ConfigError, CheckpointError: they are of another kind of student, base or form.
        TokenizerMismatchError: trained on ids of another tokenizer.
    """
    if is_adapter(folder):
        _check_adapter(model, folder)
        return ADAPTER_CONFIG, ADAPTER_WEIGHTS
    weights = [name for name in HF_WEIGHTS if (folder / name).is_file()]
    if len(weights) != 1 or not (folder / _STUDENT_FILE).is_file():
        raise ConfigError(
            f"student.warm_start: {folder.name} is no checkpoint of an hf student and no folder of "
            f"an adapter{_HINT}"
        )
    _check_description(config, model, read_json(folder / _STUDENT_FILE))
    return _STUDENT_FILE, weights[0]


def start_hf(student: HFBackend, folder: Path) -> None:
    """Give a new student what `start_files` named, from the run's own copy.

    Raises:
        CheckpointError, TokenizerMismatchError: it does not fit the model.
    """
    if is_adapter(folder):
        from miniverl_dist.backends.hf_peft import read_adapter

        student.start_from_adapter(read_adapter(folder)[1])
        return
    student.start_from(folder, int(read_json(folder / _STUDENT_FILE)["policy_version"]))


def _check_adapter(model: HFStudentConfig, folder: Path) -> None:
    from miniverl_dist.backends.hf_peft import read_adapter_config

    found = read_adapter_config(folder)
    if model.lora is None:
        raise ConfigError(
            f"student.warm_start: {folder.name} is an adapter, but student.model has no `lora`"
        )
    for name in ("rank", "alpha"):
        has, wants = getattr(found, name), getattr(model.lora, name)
        if has != wants:
            raise ConfigError(
                f"student.warm_start: the adapter has {name} {has}, student.model.lora has {wants}"
            )
    if set(found.target_modules) != set(model.lora.target_modules):
        raise ConfigError(
            f"student.warm_start: the adapter is on {', '.join(sorted(found.target_modules))}, "
            f"student.model.lora names {', '.join(sorted(model.lora.target_modules))}"
        )


def _check_description(config: RunConfig, model: HFStudentConfig, found: Mapping[str, Any]) -> None:
    fingerprint = load_tokenizer(config.student.tokenizer).fingerprint
    lora = None if model.lora is None else model.lora.model_dump(mode="json")
    wanted = {
        "lora": lora,
        "dtype": model.dtype,
        "base_sha256": None if lora is None else folder_sha256(model.path),
    }
    try:
        trained_on = found["tokenizer"]["fingerprint"]
        there = {name: found[name] for name in wanted}
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"student.warm_start: {_STUDENT_FILE} describes no hf student: no {error}"
        ) from error
    if trained_on != fingerprint:
        raise TokenizerMismatchError(
            f"student.warm_start: the weights were trained on ids of another tokenizer "
            f"({trained_on[:12]}), student.tokenizer is {fingerprint[:12]}"
        )
    for name, wants in wanted.items():
        if there[name] != wants:
            raise CheckpointError(
                f"student.warm_start: the weights have {name} {there[name]}, student.model has "
                f"{wants}: a warm start needs the same"
            )
