"""Toy decoding: a batch of episodes against the same episodes one at a time.

Claim: the engine's fixed-shape batch makes at least 8 times the tokens per CPU second of a plain
KV-cached loop over single sequences, for 32 sequences and more, with the same weights.

Baselines: ``loop`` is the usual single-sequence decoder (prompt in one pass, a growing KV cache,
one row per step, nothing shared); ``no cache`` runs the whole sequence again for every token.
All arms use one thread and the same sampler; order is rotated between repetitions.

Run: ``python benchmarks/bench_toy_decoding.py [--repeats 5]``
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - the name every torch reader expects

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.generate_api.wire import GenerateRequest, SamplingParams
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.sampling import sample, uniforms
from rollout_server.engines.toy import ToyEngine

VOCAB_ROWS, PROMPT_TOKENS, NEW_TOKENS, GROUP_SIZE = 658, 37, 40, 8

Prompts = list[tuple[int, ...]]


def loop_decode(model: ToyModel, prompt: tuple[int, ...], seed: int, *, cached: bool) -> list[int]:
    """One sequence by itself, with a growing KV cache or without any."""
    cache: list[tuple[torch.Tensor, torch.Tensor]] = []

    def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        if layer < len(cache):
            k, v = (torch.cat(pair) for pair in zip(cache[layer], (k, v), strict=True))
            cache[layer] = (k, v)
        elif cached:
            cache.append((k, v))
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)
        return out[0].transpose(0, 1)

    sequence, draws, params = list(prompt), uniforms(seed, NEW_TOKENS), [SamplingParams()]
    with torch.no_grad():
        for draw in draws:
            start = len(sequence) - 1 if cache else 0
            rows = torch.tensor(sequence[start:])
            hidden = model.run(rows, torch.arange(start, len(sequence)), attend)
            logits = F.linear(hidden[-1:], model.head).numpy()
            sequence.append(int(sample(logits, params, np.array([draw]))[0][0]))
    return sequence[len(prompt) :]


async def engine_decode(engine: ToyEngine, prompts: Prompts) -> list[tuple[int, ...]]:
    """All prompts at once; seed i for prompt i."""
    requests = [
        GenerateRequest(prompt, SamplingParams(max_new_tokens=NEW_TOKENS, sampling_seed=seed))
        for seed, prompt in enumerate(prompts)
    ]
    replies = await asyncio.gather(*(engine.generate(request) for request in requests))
    return [reply.output_ids for reply in replies]


class Arms:
    """The three ways, each decoding some of the prompts and timing itself."""

    def __init__(self, model: ToyModel, prompts: Prompts, loop_size: int) -> None:
        tensors = model.arrays()
        self.model = model
        self.prompts = prompts
        self.loop_size = loop_size
        self.snapshot = WeightSnapshot(1, tensors, weights_checksum(tensors))
        config = model.config.model_copy(update={"batch_slots": len(prompts)})
        self.engine = ToyEngine(config, range(VOCAB_ROWS))

    def batch(self) -> float:
        """Tokens per CPU second of the engine; its caches are emptied before."""

        async def serve() -> float:
            await self.engine.load_weights(self.snapshot)
            started = time.process_time()
            num_tokens = sum(map(len, await engine_decode(self.engine, self.prompts)))
            return num_tokens / (time.process_time() - started)

        return asyncio.run(serve())

    def loop(self, *, cached: bool) -> float:
        """Tokens per CPU second of one sequence after the other."""
        chosen = list(enumerate(self.prompts[: self.loop_size]))
        started = time.process_time()
        num_tokens = sum(len(loop_decode(self.model, p, i, cached=cached)) for i, p in chosen)
        return num_tokens / (time.process_time() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    model = ToyModel(ToyModelConfig(kind="toy"), range(VOCAB_ROWS))
    print(
        f"{model.num_parameters} parameters, prompts of {PROMPT_TOKENS} tokens shared by "
        f"{GROUP_SIZE}, {NEW_TOKENS} new tokens, one thread, medians of {repeats}"
    )
    rng = np.random.default_rng(0)
    for num_sequences in (32, 64, 128):
        prompts: Prompts = []
        for _ in range(num_sequences // GROUP_SIZE):
            prompt = tuple(rng.integers(0, VOCAB_ROWS, PROMPT_TOKENS).tolist())
            prompts += [prompt] * GROUP_SIZE
        arms = Arms(model, prompts, loop_size=8)
        runs: dict[str, Callable[[], float]] = {
            "batch": arms.batch,
            "loop": partial(arms.loop, cached=True),
            "no cache": partial(arms.loop, cached=False),
        }
        speeds: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(repeats + 1):
            names = list(runs)[repeat % 3 :] + list(runs)[: repeat % 3]
            for name in names:
                speed = runs[name]()
                if repeat:  # the first round warms up
                    speeds[name].append(speed)
        ratios = {
            name: [b / s for b, s in zip(speeds["batch"], values, strict=True)]
            for name, values in speeds.items()
        }
        print(
            f"{num_sequences:4d} sequences: {statistics.median(speeds['batch']):6.0f} tokens per "
            f"CPU second; {statistics.median(ratios['loop']):.1f}x the loop "
            f"({min(ratios['loop']):.1f} to {max(ratios['loop']):.1f}), "
            f"{statistics.median(ratios['no cache']):.1f}x without a cache"
        )


if __name__ == "__main__":
    main()
