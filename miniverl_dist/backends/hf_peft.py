"""Adapters as files in the layout of the ``peft`` package: written, and read back.

What is read is safetensors and JSON only, and an adapter whose settings mean another computation
than W x + (alpha / rank) B A x is refused by the setting's name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as parse_safetensors
from torch import Tensor

from miniverl_dist.backends.hf_adapters import LoraAdapters, is_transposed
from miniverl_dist.backends.weights_io import read_bytes, read_json
from miniverl_dist.config.problems import explain_in_line
from miniverl_dist.config.roles import LoraConfig
from miniverl_dist.errors import CheckpointError, ConfigError

ADAPTER_CONFIG_FILE = "adapter_config.json"
ADAPTER_WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX, _SUFFIX = "base_model.model.", ".weight"
_PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": ([], None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layers_to_transform": ([], None),
    "target_parameters": ([], None),
}
"""Settings under which an adapter is W x + (alpha / rank) B A x on all layers of a name."""


def peft_name(factor: str) -> str:
    """What a factor is called in the files of ``peft``."""
    return f"{_PREFIX}{factor}{_SUFFIX}"


def peft_config(adapters: LoraAdapters) -> dict[str, Any]:
    """``adapter_config.json``; the base model is left out, which would be a path."""
    layers = adapters.layers.values()
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": adapters.config.rank,
        "lora_alpha": adapters.config.alpha,
        "lora_dropout": adapters.config.dropout,
        "target_modules": sorted(adapters.config.target_modules),
        "bias": "none",
        "fan_in_fan_out": any(is_transposed(layer) for layer in layers),
        "inference_mode": True,
    }


def read_adapter_config(folder: Path) -> LoraConfig:
    """Sizes and layers of a stored adapter; torch-free work, so that a recipe can be checked.

    Raises:
        ConfigError: there is no adapter, or one that computes something else.
    """
    file = folder / ADAPTER_CONFIG_FILE
    if not file.is_file():
        raise ConfigError(
            f"{folder} holds no adapter (no {ADAPTER_CONFIG_FILE}); `miniverl-dist export RUN "
            "--format adapter` writes one"
        )
    try:
        found: Any = read_json(file)
        if not isinstance(found, dict):
            raise ConfigError(f"{file} describes no LoRA adapter: it holds no JSON object")
        for name, allowed in _PLAIN.items():
            if found.get(name) not in allowed:
                raise ConfigError(
                    f"{file}: {name} is {found.get(name)!r}; only plain LoRA can be loaded, with "
                    f"{name} {allowed[0]!r}"
                )
        if lacking := [n for n in ("r", "lora_alpha", "target_modules") if n not in found]:
            raise ConfigError(f"{file} describes no LoRA adapter: it has no {lacking[0]!r}")
        targets = found["target_modules"]
        if not isinstance(targets, list):
            raise ConfigError(
                f"{file}: target_modules is {targets!r}, expected a list of layers' last names"
            )
        return LoraConfig(rank=found["r"], alpha=found["lora_alpha"], target_modules=tuple(targets))
    except CheckpointError as error:
        raise ConfigError(f"{file} describes no LoRA adapter: {error}") from error
    except ValidationError as error:
        told = explain_in_line(error, LoraConfig)
        raise ConfigError(f"{file} describes no LoRA adapter: {told}") from error


def read_adapter(folder: Path) -> tuple[LoraConfig, dict[str, Tensor]]:
    """A stored adapter: its sizes, and ``<layer>.lora_A``, ``<layer>.lora_B`` in float32.

    Raises:
        ConfigError: see ``read_adapter_config``; or weights that are missing or damaged.
    """
    config, file = read_adapter_config(folder), folder / ADAPTER_WEIGHTS_FILE
    try:
        stored: dict[str, Tensor] = parse_safetensors(read_bytes(file))
    except (CheckpointError, SafetensorError, KeyError) as error:  # KeyError: a dtype unknown here
        raise ConfigError(f"{file} cannot be read: {error}") from error
    unlike = [n for n in stored if not (n.startswith(_PREFIX) and n.endswith(_SUFFIX))]
    if unlike or not stored:
        raise ConfigError(
            f"{file}: expected tensors {peft_name('LAYER.lora_A')}, found "
            f"{unlike[0] if unlike else 'none'}"
        )
    values = {n.removeprefix(_PREFIX).removesuffix(_SUFFIX): t.float() for n, t in stored.items()}
    return config, values
