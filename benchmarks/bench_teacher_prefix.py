"""Claim: eight siblings of a group that share 4,096 tokens cost at most 1.3 times one of them.

The texts go through the real service: HTTP, admission, queue, and a small transformers
model. Each is the shared prefix and an ending of its own of 24 to
40 tokens, and only the ending is asked for. Before each repetition the service is new: nothing is
remembered. ``one`` is one text; ``siblings`` are eight sent at once; ``strangers`` are two texts
that share nothing, to show that the clock sees work.

Two ratios to ``one``: tokens prefilled, as the server's own counters have them, and seconds; the
latter as medians of ratios within a repetition. One thread. Exit status 1 when either exceeds the
claim. About 40 seconds.

    python -m benchmarks.bench_teacher_prefix
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from miniverl_dist.generate_api.app import serving
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.wire import decode_input_logprobs, scoring_request
from teacher_server.app import build_teacher_app
from teacher_server.batching import BatchLimits
from teacher_server.scorer import PrefillScorer
from teacher_server.scorer_batches import PrefixBatcher
from teacher_server.scorer_hf import HFCausalLM
from teacher_server.service_metrics import PREFIX

MAX_RATIO = 1.3
PREFIX_TOKENS, NUM_SIBLINGS, VOCAB_ROWS = 4096, 8, 1000

Text = tuple[int, ...]


@dataclass(frozen=True)
class Cost:
    """What some texts took."""

    seconds: float
    prefilled_tokens: float


def small_model(hidden_size: int, num_layers: int) -> Any:  # noqa: ANN401 - transformers is untyped
    """A random Qwen3 model."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_ROWS,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden_size // 4,
        max_position_embeddings=2 * PREFIX_TOKENS,
    )
    return Qwen3ForCausalLM(config).eval()


def prefilled(metrics: str) -> float:
    """The server's count of tokens computed."""
    name = f"{PREFIX}prefilled_tokens_total "
    return next(
        float(line.removeprefix(name)) for line in metrics.splitlines() if line.startswith(name)
    )


async def cost(model: HFCausalLM, texts: Sequence[tuple[Text, int]]) -> Cost:
    """Score texts at once through a new service; each from its own start on."""
    scorer = PrefillScorer(model, name="bench", batcher=PrefixBatcher(model, BatchLimits()))
    limits = ClientLimits(max_retries=0, deadline_s=300, request_deadline_s=300)
    async with (
        serving(build_teacher_app(scorer)) as url,
        GenerateClient(url, limits=limits) as client,
    ):

        async def score(ids: Text, start: int) -> None:
            reply = await client.generate(scoring_request(ids, start))
            decode_input_logprobs(reply, input_ids=ids, start=start)

        await client.health()
        started = time.perf_counter()
        await asyncio.gather(*(score(*each) for each in texts))
        seconds = time.perf_counter() - started
        return Cost(seconds, prefilled(await metrics_of(url)))


async def metrics_of(url: str) -> str:
    """What the server counts."""
    import aiohttp

    async with aiohttp.ClientSession() as session, session.get(url + "/metrics") as response:
        return await response.text()


def texts(seed: int) -> tuple[list[tuple[Text, int]], list[tuple[Text, int]]]:
    """Eight siblings, and two strangers."""
    rng = np.random.default_rng(seed)

    def drawn(length: int) -> Text:
        return tuple(rng.integers(0, VOCAB_ROWS, length).tolist())

    prefix = drawn(PREFIX_TOKENS)
    siblings = [
        (prefix + drawn(int(rng.integers(24, 41))), len(prefix)) for _ in range(NUM_SIBLINGS)
    ]
    return siblings, [(drawn(PREFIX_TOKENS + 32), PREFIX_TOKENS) for _ in range(2)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = HFCausalLM(small_model(options.hidden_size, options.num_layers))
    asyncio.run(cost(model, texts(0)[1][:1]))  # first calls fill torch's own caches
    seconds: dict[str, list[float]] = {"siblings": [], "strangers": []}
    tokens: dict[str, list[float]] = {"siblings": [], "strangers": []}
    for repeat in range(options.repeats):
        siblings, strangers = texts(repeat + 1)
        one = asyncio.run(cost(model, siblings[:1]))
        for name, group in (("siblings", siblings), ("strangers", strangers)):
            found = asyncio.run(cost(model, group))
            seconds[name].append(found.seconds / one.seconds)
            tokens[name].append(found.prefilled_tokens / one.prefilled_tokens)
    for name in seconds:
        print(
            f"{name:<10} tokens prefilled {statistics.median(tokens[name]):.3f} x one, "
            f"seconds {statistics.median(seconds[name]):.3f} x one"
        )
    worst = max(statistics.median(tokens["siblings"]), statistics.median(seconds["siblings"]))
    holds = worst <= MAX_RATIO
    verdict = "holds" if holds else "FAILS"
    print(f"claim: {NUM_SIBLINGS} siblings cost at most {MAX_RATIO} x one: {verdict}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
