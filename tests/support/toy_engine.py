"""Toy engines with weights, and what tests ask of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import pytest

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.generate_api.wire import GenerateReply
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.toy import ToyEngine
from tests.support.toy import VOCABULARY_IDS, random_ids, tiny_config


def weights(version: int = 1, seed: int = 0) -> WeightSnapshot:
    tensors = ToyModel(tiny_config(), VOCABULARY_IDS, seed).arrays()
    # A fresh model hardly looks back: louder layers make the next token depend on the context.
    for name in tensors:
        if name.endswith(("attn_out", "down", "qkv")):
            tensors[name] = tensors[name] * np.float32(4)
    return WeightSnapshot(version, tensors, weights_checksum(tensors))


async def engine(**sizes: int) -> ToyEngine:
    made = ToyEngine(tiny_config(**sizes), VOCABULARY_IDS)
    await made.load_weights(weights())
    return made


async def steps(made: ToyEngine, num_steps: int) -> None:
    """Let the engine go on until it has taken that many steps."""
    for _ in range(1000):
        if made.counters.num_steps >= num_steps:
            return
        await asyncio.sleep(0)
    pytest.fail(f"the engine did not reach step {num_steps}")


def prompts(seed: int, lengths: Sequence[int]) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    return [random_ids(rng, length) for length in lengths]


def sampled(reply: GenerateReply) -> tuple[object, ...]:
    """All of a reply that must not depend on the company."""
    meta = reply.meta_info
    return (reply.output_ids, meta.output_token_logprobs, meta.finish_reason, meta.prompt_tokens)
