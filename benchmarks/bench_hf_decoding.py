"""Claim: 16 requests at once make at least 4 times the tokens per CPU second of one by one.

The transformers engine with a tiny model of each architecture, random weights, one thread.
``alone`` asks for one reply after the other, ``batch`` for all 16 at once; every prompt is another
one, so that nothing but the batch is shared, and weights are loaded again before each run, which
empties all caches. ``no cache`` runs the whole text again for every token.

CPU time of this process, medians of ratios within a repetition, the three ways taking turns. Exit
status 1 when the claim does not hold.

    python -m benchmarks.bench_hf_decoding
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file
from transformers import AutoModelForCausalLM, Qwen3_5MoeTextConfig, Qwen3Config, Qwen3MoeConfig

from miniverl_dist.backends.vocabulary import FullVocabulary
from miniverl_dist.generate_api.wire import GenerateRequest, SamplingParams
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.hf import HFEngine
from rollout_server.engines.sampling import sample, uniforms

MIN_RATIO = 4.0
VOCAB_ROWS, PROMPT_TOKENS, NEW_TOKENS, NUM_REQUESTS = 512, 40, 32, 16

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_ROWS,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LINEAR: dict[str, Any] = {
    "shared_expert_intermediate_size": 32,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**_SIZES, intermediate_size=128),
    "qwen3_moe": Qwen3MoeConfig(**_SIZES, **_MOE),
    "qwen3_5_moe": Qwen3_5MoeTextConfig(**_SIZES, **_MOE, **_LINEAR),
}


class Arms:
    """The three ways, each timing itself and giving tokens per CPU second."""

    def __init__(self, config: Any, folder: Path) -> None:  # noqa: ANN401 - untyped library
        torch.manual_seed(0)
        self.model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        self.model.save_pretrained(folder)
        tensors = load_file(folder / "model.safetensors")
        self.snapshot = WeightSnapshot(1, tensors, weights_checksum(tensors))
        self.engine = HFEngine(folder, FullVocabulary(VOCAB_ROWS), batch_slots=NUM_REQUESTS)
        rng = np.random.default_rng(0)
        self.requests = [
            GenerateRequest(
                tuple(rng.integers(0, VOCAB_ROWS, PROMPT_TOKENS).tolist()),
                SamplingParams(max_new_tokens=NEW_TOKENS, sampling_seed=seed),
            )
            for seed in range(NUM_REQUESTS)
        ]

    async def measured(self, work: Callable[[], Awaitable[int]]) -> float:
        """Tokens per CPU second, caches empty at the start."""
        await self.engine.load_weights(self.snapshot)
        started = time.process_time()
        num_tokens = await work()
        return num_tokens / (time.process_time() - started)

    async def batch(self) -> int:
        """All at once; returns tokens made."""
        replies = await asyncio.gather(*map(self.engine.generate, self.requests))
        return sum(len(reply.output_ids) for reply in replies)

    async def alone(self) -> int:
        """One after the other; returns tokens made."""
        replies = [await self.engine.generate(request) for request in self.requests]
        return sum(len(reply.output_ids) for reply in replies)

    async def no_cache(self) -> int:
        """Two of the requests are enough to see its speed."""
        for request in self.requests[:2]:
            ids = list(request.input_ids)
            for draw in uniforms(request.sampling_params.sampling_seed, NEW_TOKENS):
                with torch.inference_mode():
                    output = self.model(input_ids=torch.tensor([ids]), use_cache=False)
                logits = output.logits[0, -1:].numpy()
                ids.append(int(sample(logits, [SamplingParams()], np.array([draw]))[0][0]))
        return 2 * NEW_TOKENS


async def measure(arms: Arms, repeats: int) -> dict[str, list[float]]:
    """Arm -> tokens per CPU second of each repetition."""
    ways = {"batch": arms.batch, "alone": arms.alone, "no cache": arms.no_cache}
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name in [*list(ways)[repeat % 3 :], *list(ways)[: repeat % 3]]:
            speed = await arms.measured(ways[name])
            if repeat:  # the first round warms up
                speeds[name].append(speed)
    await arms.engine.close()
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    print(
        f"{NUM_REQUESTS} prompts of {PROMPT_TOKENS} tokens, {NEW_TOKENS} new tokens, one thread, "
        f"medians of {repeats}"
    )
    holds = True
    for name, config in CONFIGS.items():
        with tempfile.TemporaryDirectory() as folder:
            speeds = asyncio.run(measure(Arms(config, Path(folder)), repeats))
        alone, no_cache = (
            [batch / other for batch, other in zip(speeds["batch"], speeds[arm], strict=True)]
            for arm in ("alone", "no cache")
        )
        print(
            f"{name:12s} {statistics.median(speeds['batch']):6.0f} tokens per CPU second in a "
            f"batch, {statistics.median(speeds['alone']):5.0f} alone: "
            f"{statistics.median(alone):.1f}x ({min(alone):.1f} to {max(alone):.1f}); "
            f"{statistics.median(no_cache):.1f}x without a cache"
        )
        holds &= statistics.median(alone) >= MIN_RATIO
    if not holds:
        print(f"claim broken: less than {MIN_RATIO:g}x one request after the other")
        sys.exit(1)


if __name__ == "__main__":
    main()
