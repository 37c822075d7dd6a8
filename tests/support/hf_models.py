"""Tiny models of the three architectures, made and run by transformers: the oracle of the tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from miniverl_dist.backends.megatron.architecture import Architecture, read_architecture

transformers_logging.disable_progress_bar()

CONFIGS = Path(__file__).parents[2] / "configs" / "models"
MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen3_5_moe")
ODD_VOCAB = 97
"""Does not divide by two tensor ranks: one of them has a row of padding."""


def tiny_architecture(model_type: str, vocab_size: int = ODD_VOCAB) -> Architecture:
    """The model of ``configs/models/tiny_<type>.json`` over another vocabulary."""
    architecture = read_architecture(CONFIGS / f"tiny_{model_type}.json")
    return architecture.with_vocab_size(vocab_size)


def write_hf_model(
    arch: Architecture,
    directory: Path,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    shard_size: str = "5GB",
) -> Path:
    """A random model written by transformers; norm weights and other vectors random as well."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(arch.hf_config()))
    config = AutoConfig.from_pretrained(directory)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
                else:
                    # At the usual 0.02 a wrong layer would hardly move the logits.
                    parameter.mul_(3)
    model.to(dtype).save_pretrained(directory, max_shard_size=shard_size)
    return directory


def load_hf_model(directory: Path) -> Any:
    """The folder's model as transformers loads it, for inference."""
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def hf_logits(directory: Path, token_ids: NDArray[np.int64]) -> NDArray[np.float32]:
    """[B, S, V] in float32."""
    with torch.no_grad():
        logits: torch.Tensor = load_hf_model(directory)(torch.from_numpy(token_ids)).logits
    return logits.float().numpy()


def hf_tensors(directory: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    from safetensors.torch import load_file

    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        found |= load_file(path)
    return found
