"""Small toy models, batches and requests for tests of backend and engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from miniverl_dist.backends.toy import ToyBackend
from miniverl_dist.backends.weights_io import TokenizerIdentity
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.generate_api.wire import GenerateRequest, SamplingParams
from miniverl_dist.schemas.batch import SftBatch, TrainBatch

# Bit-for-bit promises hold for one thread, and the tests share two cores with others.
torch.set_num_threads(1)

VOCABULARY_IDS = tuple(range(10, 10 + 7 * 53, 7))
"""53 real ids with gaps: rows and ids never coincide."""
TOKENIZER = TokenizerIdentity("test", "f" * 64)


def tiny_config(**changes: int) -> ToyModelConfig:
    sizes = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 2,
        "ffn_size": 40,
        "max_context_tokens": 150,
        "batch_slots": 6,
    }
    return ToyModelConfig.model_validate({"kind": "toy"} | sizes | changes)


def tiny_backend(
    *,
    loss: LossConfig | None = None,
    optim: OptimConfig | None = None,
    num_steps: int = 10,
    seed: int = 0,
) -> ToyBackend:
    return ToyBackend(
        tiny_config(),
        VOCABULARY_IDS,
        TOKENIZER,
        loss=loss or LossConfig(),
        optim=optim or OptimConfig(lr=5e-3),
        num_steps=num_steps,
        seed=seed,
    )


def random_ids(rng: np.random.Generator, length: int) -> tuple[int, ...]:
    return tuple(int(i) for i in rng.choice(VOCABULARY_IDS, length))


def random_batch(
    seed: int,
    *,
    lengths: Sequence[int] = (9, 30, 14, 22, 9, 41),
    num_minibatches: int = 1,
    temperature: float = 1.0,
) -> TrainBatch:
    """Sequences whose last two thirds are sampled; logprobs near those of a fresh model."""
    rng = np.random.default_rng(seed)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = np.array(random_ids(rng, starts[-1]))
    mask = np.concatenate([np.arange(n) >= max(n // 3, 1) for n in lengths])
    minibatches = np.arange(len(lengths)) % num_minibatches
    of_token = np.repeat(minibatches, lengths)
    return TrainBatch(
        token_ids=ids,
        sequence_starts=starts,
        loss_mask=mask,
        advantages=np.where(mask, rng.normal(size=len(ids)), 0.0),
        rollout_logprobs=np.where(mask, -4 + 0.5 * rng.normal(size=len(ids)), np.nan),
        group_ids=tuple(f"g{i // 2}" for i in range(len(lengths))),
        minibatch_ids=minibatches,
        num_loss_tokens=tuple(int(mask[of_token == m].sum()) for m in range(num_minibatches)),
        num_sequences=tuple(int((minibatches == m).sum()) for m in range(num_minibatches)),
        policy_version=0,
        temperature=temperature,
    )


def sft_batch(seed: int) -> SftBatch:
    batch = random_batch(seed)
    return SftBatch(batch.token_ids, batch.sequence_starts, batch.loss_mask)


def state_of(backend: ToyBackend, tmp_path: Path) -> dict[str, bytes]:
    """Everything a student is, as bytes."""
    backend.save(tmp_path)
    return {path.name: path.read_bytes() for path in sorted(tmp_path.iterdir())}


def request(
    prompt: Sequence[int],
    seed: int | None = 0,
    *,
    temperature: float = 1.0,
    max_new_tokens: int = 12,
    stop: Sequence[int] = (),
) -> GenerateRequest:
    params = SamplingParams(
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        stop_token_ids=tuple(stop),
        sampling_seed=seed,
    )
    return GenerateRequest(tuple(prompt), params, return_logprob=True)
