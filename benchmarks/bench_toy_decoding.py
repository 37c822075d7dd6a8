"""Claim: from 128 episodes on, the toy engine makes 8 times the tokens per CPU second of a loop.

The engine decodes all episodes in one fixed-shape batch, prompts shared by groups included; its
caches are emptied before each run. ``loop`` is the usual decoder of a single sequence: the prompt
in one pass, a growing KV cache, one row per token. ``no cache`` runs the whole sequence again for
every token. Same weights, same sampler, one thread.

CPU time of this process, medians of ratios within a repetition, the three ways taking turns. 32 and
64 episodes are printed too: their ratios move around 7 and 8. Exit status 1 when the claim does not
hold. About 20 CPU seconds.

    python -m benchmarks.bench_toy_decoding
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
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

MIN_RATIO, CLAIMED_FROM = 8.0, 128
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


def measure(model: ToyModel, num_sequences: int, repeats: int) -> dict[str, list[float]]:
    """Arm -> tokens per CPU second of each repetition."""
    rng = np.random.default_rng(0)
    prompts: Prompts = []
    for _ in range(num_sequences // GROUP_SIZE):
        prompts += [tuple(rng.integers(0, VOCAB_ROWS, PROMPT_TOKENS).tolist())] * GROUP_SIZE
    arms = Arms(model, prompts, loop_size=8)
    runs: dict[str, Callable[[], float]] = {
        "batch": arms.batch,
        "loop": partial(arms.loop, cached=True),
        "no cache": partial(arms.loop, cached=False),
    }
    speeds: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name in [*list(runs)[repeat % 3 :], *list(runs)[: repeat % 3]]:
            speed = runs[name]()
            if repeat:  # the first round warms up
                speeds[name].append(speed)
    return speeds


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
    holds = True
    for num_sequences in (32, 64, 128):
        speeds = measure(model, num_sequences, repeats)
        loop, no_cache = (
            [batch / other for batch, other in zip(speeds["batch"], speeds[name], strict=True)]
            for name in ("loop", "no cache")
        )
        print(
            f"{num_sequences:4d} sequences: {statistics.median(speeds['batch']):6.0f} tokens per "
            f"CPU second; {statistics.median(loop):.1f}x the loop ({min(loop):.1f} to "
            f"{max(loop):.1f}), {statistics.median(no_cache):.1f}x without a cache"
        )
        holds &= statistics.median(loop) >= MIN_RATIO or num_sequences < CLAIMED_FROM
    if not holds:
        print(f"claim broken: less than {MIN_RATIO:g}x the loop from {CLAIMED_FROM} sequences on")
        sys.exit(1)


if __name__ == "__main__":
    main()
