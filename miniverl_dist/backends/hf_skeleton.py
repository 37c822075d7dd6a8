"""What a Hugging Face folder's model would be, found out before its weights are read."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from miniverl_dist.errors import ConfigError, MissingDependencyError, install_hint


def _unloadable() -> tuple[type[Exception], ...]:
    known: tuple[type[Exception], ...] = (
        AttributeError,
        ImportError,
        IndexError,
        KeyError,
        OSError,
        RuntimeError,
        SafetensorError,
        TypeError,
        ValueError,
    )
    try:  # of what transformers checks its configs with; installed with it
        from huggingface_hub.errors import StrictDataclassError
    except ImportError:
        return known
    return (*known, StrictDataclassError)


UNLOADABLE = _unloadable()
"""What transformers makes of a folder with a part that is missing, damaged or unknown to it."""
_LAYER = re.compile(r"\.\d+(?=\.)")


def first_sentence(error: BaseException) -> str:
    """What a library says is wrong, in one line; what it advises on top is about itself."""
    lines = str(error).strip().splitlines()
    if lines and lines[0].endswith(":") and error.__cause__ is not None:
        return first_sentence(error.__cause__)  # it only says who found it
    said = re.split(r"(?<=[.!?])\s", lines[0], maxsplit=1)[0] if lines else ""
    return said.rstrip(".") or type(error).__name__


def skeleton(folder: Path, where: str) -> Any:  # noqa: ANN401 - untyped library
    """The folder's causal LM without its numbers: layers, names and shapes by ``config.json``.

    Args:
        folder: Of the model; nothing in it is executed.
        where: What errors begin with.

    Raises:
        MissingDependencyError: transformers is not installed.
        ConfigError: a ``config.json`` that transformers makes no causal LM of.
    """
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise MissingDependencyError(
            f"reading a Hugging Face model needs transformers: {install_hint('local')}"
        ) from error
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):  # which has no numbers, and draws none
            return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except UNLOADABLE as error:
        raise ConfigError(
            f"{where}: config.json describes no causal LM that transformers can load: "
            f"{first_sentence(error)}"
        ) from error


def require_described(
    module: Any,  # noqa: ANN401 - untyped library
    stored: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    """Raise unless the stored tensors are those that ``config.json`` describes.

    A tensor under a name of its own is left to the loader, which knows how old folders spell
    theirs; one that other layers have under the same name is missing.

    Args:
        module: From ``skeleton``.
        stored: Shapes by name.
        where: What errors begin with.

    Raises:
        ConfigError: a tensor of another shape, or a layer without one.
    """
    kinds = {_LAYER.sub(".N", name) for name in stored}
    for name, weight in module.named_parameters():
        found, expected = stored.get(name), tuple(weight.shape)
        if found is None and _LAYER.sub(".N", name) in kinds:
            raise ConfigError(
                f"{where}: config.json describes a tensor {name!r}, which the weights lack: it is "
                "another model's config.json, or a file of the weights is missing"
            )
        if found is not None and found != expected:
            raise ConfigError(
                f"{where}: {name!r} is stored as {_size(found)}, config.json describes "
                f"{_size(expected)}: it is another model's config.json"
            )


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
