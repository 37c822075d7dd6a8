"""Tiny transformers models as folders and snapshots, and what they say without any cache."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3Config, Qwen3MoeConfig

from miniverl_dist.backends.vocabulary import AnyVocabulary, Vocabulary
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.hf import HFEngine
from rollout_server.engines.sampling import sample, uniforms

torch.set_num_threads(1)

ARCHITECTURES = ("qwen3", "qwen3_moe", "qwen3_5_moe")
VOCABULARY = Vocabulary(range(10, 10 + 7 * 290, 7))
"""290 real ids with gaps; the models have 304 rows, so that 14 of them are padding."""

_SIZES: dict[str, Any] = {
    "vocab_size": 304,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 200,
    # Loud enough that the next token depends on the context; louder ones (0.12) amplify rounding in
    # the linear-attention layers beyond the 1e-5 that the comparisons allow.
    "initializer_range": 0.08,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_CONFIGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (Qwen3Config, {"intermediate_size": 48, "tie_word_embeddings": True}),
    "qwen3_moe": (Qwen3MoeConfig, _MOE),
    "qwen3_5_moe": (
        Qwen3_5MoeTextConfig,
        _MOE
        | {
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 16,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
        },
    ),
}
_ROOT = TemporaryDirectory(prefix="tiny-hf-")


TOLERANCE = 3e-5
"""Nats. Step by step and at once, a recurrence of drawn weights sums in another order: 1.5e-5 was
seen for qwen3_5_moe."""


@cache
def model_folder(architecture: str, seed: int = 0, dtype: str = "float32") -> Path:
    """A folder that transformers itself has written, the padding rows louder than all others."""
    made, changes = _CONFIGS[architecture]
    config = made(**_SIZES | changes)
    folder = Path(_ROOT.name) / f"{architecture}-{seed}-{dtype}"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:  # ones or zeros otherwise: a swap of two would go unnoticed
                parameter.data += torch.randn(parameter.shape) * 0.1
    with torch.no_grad():
        model.get_output_embeddings().weight[len(VOCABULARY) :] *= 10
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@cache
def snapshot(
    architecture: str, version: int = 1, seed: int = 0, dtype: str = "float32"
) -> WeightSnapshot:
    tensors = load_file(model_folder(architecture, seed, dtype) / "model.safetensors")
    return WeightSnapshot(version, tensors, weights_checksum(tensors))


@cache
def plain_model(architecture: str, seed: int = 0) -> Any:
    """As transformers loads the folder, by names and code of its own."""
    return AutoModelForCausalLM.from_pretrained(model_folder(architecture, seed)).eval()


def hf_engine(architecture: str = "qwen3", **changes: Any) -> HFEngine:
    sizes: dict[str, Any] = {"batch_slots": 4, "max_context_tokens": 150}
    return HFEngine(model_folder(architecture), VOCABULARY, **sizes | changes)


async def loaded_engine(architecture: str = "qwen3", **changes: Any) -> HFEngine:
    made = hf_engine(architecture, **changes)
    await made.load_weights(snapshot(architecture))
    return made


def hf_prompts(seed: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [tuple(rng.choice(VOCABULARY.ids, length).tolist()) for length in lengths]


def plain_logits(
    model: Any, ids: Sequence[int], vocabulary: AnyVocabulary = VOCABULARY
) -> NDArray[np.float32]:
    """[T, V]: the whole text in one pass, no cache, no padding, no company."""
    with torch.no_grad():
        rows = torch.from_numpy(vocabulary.rows(ids))[None]
        logits = model(input_ids=rows, use_cache=False).logits[0, :, : len(vocabulary)]
    found: NDArray[np.float32] = logits.float().numpy()
    return found


def check_reply(model: Any, request: GenerateRequest, reply: GenerateReply) -> None:
    """Tokens and logprobs are those that the plain model gives for the same seed."""
    params, ids = request.sampling_params, reply.output_ids
    logits = plain_logits(model, (*request.input_ids, *ids))
    before = logits[len(request.input_ids) - 1 : -1]
    draws = uniforms(params.sampling_seed, len(ids))
    rows, logprobs = sample(before, [params] * len(ids), draws)
    assert tuple(VOCABULARY.ids[rows].tolist()) == ids
    entries = reply.meta_info.output_token_logprobs
    assert entries is not None
    np.testing.assert_allclose([entry[0] for entry in entries], logprobs, rtol=0, atol=TOLERANCE)


async def decoded(made: HFEngine, num_tokens: int) -> None:
    """Let the engine go on until it has decoded that many tokens."""
    for _ in range(2000):
        if made.counters.num_decoded_tokens >= num_tokens:
            return
        await asyncio.sleep(0.001)
    pytest.fail(f"the engine did not decode {num_tokens} tokens")
