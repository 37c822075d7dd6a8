"""Tiny random causal LMs of several families, and hf students of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, Qwen3Config
from transformers.utils import logging as transformers_logging

from miniverl_dist.backends.distilled import RowLoss
from miniverl_dist.backends.hf import HFBackend
from miniverl_dist.backends.weights_io import TokenizerIdentity
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.config.roles import HFStudentConfig, LoraConfig
from miniverl_dist.schemas.batch import SftBatch, TrainBatch
from tests.support.toy import random_batch

transformers_logging.disable_progress_bar()
torch.set_num_threads(1)

NUM_IDS = 97
"""Ids of the tokenizer; the models have 3 more rows, which no softmax may cover."""
FAMILIES = ("qwen3", "llama", "gpt2")
TOKENIZER = TokenizerIdentity("test", "f" * 64)
SMOOTH = OptimConfig(lr=0.5, eps=1.0, weight_decay=0.01)
"""A step nearly proportional to the gradient: rounding of tiny gradients decides no sign."""
TARGETS = {"gpt2": ("c_attn", "c_proj", "c_fc")}

_DECODER: dict[str, Any] = {
    "vocab_size": NUM_IDS + 3,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 160,
    "initializer_range": 0.15,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ROOT = TemporaryDirectory(prefix="tiny-students-")


def _config(family: str, *, tied: bool) -> Any:
    if family == "qwen3":
        return Qwen3Config(**_DECODER, head_dim=8, tie_word_embeddings=tied)
    if family == "llama":
        return LlamaConfig(**_DECODER, tie_word_embeddings=tied)
    return GPT2Config(
        vocab_size=NUM_IDS + 3,
        n_embd=24,
        n_layer=2,
        n_head=4,
        n_positions=160,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=tied,
    )


@cache
def student_folder(family: str = "qwen3", *, tied: bool = True, dtype: str = "float32") -> Path:
    """A folder that transformers has written; the rows behind the ids are louder than others."""
    folder = Path(_ROOT.name) / f"{family}-{tied}-{dtype}"
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(_config(family, tied=tied))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 and "norm" in name:
                parameter.add_(torch.linspace(-0.2, 0.2, len(parameter)))
        model.get_output_embeddings().weight[NUM_IDS:] *= 5
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


def plain_student(family: str = "qwen3", *, tied: bool = True) -> Any:
    """As transformers loads the folder."""
    return AutoModelForCausalLM.from_pretrained(student_folder(family, tied=tied)).eval()


def lora(family: str = "qwen3", **changes: Any) -> LoraConfig:
    targets = TARGETS.get(family, ("q_proj", "v_proj", "down_proj"))
    return LoraConfig(**{"rank": 4, "alpha": 8.0, "target_modules": targets} | changes)


def student_config(family: str = "qwen3", *, tied: bool = True, **changes: Any) -> HFStudentConfig:
    dtype = changes.get("dtype", "float32")
    settings: dict[str, Any] = {
        "kind": "hf",
        "path": student_folder(family, tied=tied, dtype=dtype),
        "device": "cpu",
        "max_context_tokens": 150,
        "max_microbatch_tokens": 128,
    }
    return HFStudentConfig(**settings | changes)


def hf_student(
    family: str = "qwen3",
    *,
    tied: bool = True,
    loss: LossConfig | None = None,
    optim: OptimConfig | None = None,
    num_steps: int = 10,
    seed: int = 0,
    base_sha256: str = "b" * 64,
    rows: RowLoss | None = None,
    **changes: Any,
) -> HFBackend:
    return HFBackend(
        student_config(family, tied=tied, **changes),
        NUM_IDS,
        TOKENIZER,
        loss=loss or LossConfig(),
        optim=optim or OptimConfig(lr=5e-3),
        num_steps=num_steps,
        seed=seed,
        base_sha256=base_sha256,
        rows=rows,
    )


def hf_batch(seed: int, **changes: Any) -> TrainBatch:
    """``support.toy.random_batch`` with ids of these models."""
    batch = random_batch(seed, **changes)
    ids = np.random.default_rng(seed).integers(0, NUM_IDS, len(batch.token_ids))
    return replace(batch, token_ids=ids)


def hf_sft_batch(seed: int) -> SftBatch:
    batch = hf_batch(seed)
    return SftBatch(batch.token_ids, batch.sequence_starts, batch.loss_mask)


def full_logprobs(model: Any, ids: np.ndarray[Any, Any], temperature: float = 1.0) -> torch.Tensor:
    """[T - 1] nats of every token but the first: whole logits, one sequence at a time."""
    rows = torch.from_numpy(ids)
    logits = model(input_ids=rows[None], use_cache=False).logits[0, :-1, :NUM_IDS].double()
    return torch.log_softmax(logits / temperature, -1).gather(1, rows[1:, None]).squeeze(1)


def student_state(backend: HFBackend, folder: Path) -> dict[str, bytes]:
    """Everything a student is, as bytes."""
    backend.save(folder)
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def sequences(batch: TrainBatch) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(batch.sequence_starts.tolist())]
