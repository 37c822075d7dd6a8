"""Claim: scored turn by turn, an episode's last call prefills at most a third of the tokens.

An episode of 8 turns and about 4,000 teacher tokens is replayed with a pause for each turn, as if a
model wrote it, against the real service: HTTP, queue, prefix cache, and a small transformers model.
``whole``: one call at the end. ``by turns``: `teacher_server.prefix_scoring` follows the episode.
``warmed``: it does as well, but its scores are thrown away, so that only the server's cache helps.
Before each repetition the services are new: nothing is remembered.

Tokens prefilled are those of the server's own counters, between the episode's end and its score,
and over the whole episode; seconds are what the teacher's ``score`` takes at the end; medians of
ratios within a repetition. All ways must give the same scores to 1e-5. One thread. Exit status 1
when the claim does not hold. About 30 seconds.

    python -m benchmarks.bench_prefix_scoring
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.bench_teacher_prefix import metrics_of, prefilled, small_model
from miniverl_dist.generate_api.app import serving
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.schemas.running_episode import RunningEpisode, TokenRecord
from miniverl_dist.schemas.teacher import TeacherScore
from miniverl_dist.schemas.trajectory import (
    SamplingRecord,
    Span,
    SpanKind,
    Termination,
    Trajectory,
    mask_from_spans,
)
from teacher_server.app import build_teacher_app
from teacher_server.batching import BatchLimits
from teacher_server.client import HttpTeacher, TeacherIdentity
from teacher_server.prefix_scoring import PrefixScorer
from teacher_server.rendering import RenderedSpan, TeacherRendering
from teacher_server.scorer import PrefillScorer
from teacher_server.scorer_batches import PrefixBatcher
from teacher_server.scorer_hf import HFCausalLM

MIN_RATIO = 3.0
TOLERANCE = 1e-5
NUM_TURNS, OPENING_TOKENS, TURN_TOKENS, OBSERVATION_TOKENS, VOCAB_ROWS = 8, 1600, 180, 130, 1000
LIMITS = ClientLimits(max_retries=0, deadline_s=300, request_deadline_s=300)


def episode(seed: int) -> Trajectory:
    """Context and sampled turns by turns, the last span sampled."""
    rng = np.random.default_rng(seed)
    sizes = [OPENING_TOKENS] + [
        size
        for _ in range(NUM_TURNS)
        for size in (
            int(rng.integers(TURN_TOKENS - 40, TURN_TOKENS + 41)),
            int(rng.integers(OBSERVATION_TOKENS - 40, OBSERVATION_TOKENS + 41)),
        )
    ]
    spans, start = [], 0
    for index, size in enumerate(sizes[:-1]):
        is_sampled = index % 2 == 1
        spans.append(
            Span(
                kind=SpanKind.ASSISTANT_TEXT if is_sampled else SpanKind.USER,
                start=start,
                end=start + size,
                segment_key=f"{'assistant' if is_sampled else 'user'}:{index // 2}",
                sampled=is_sampled,
                weight_versions=(0,) if is_sampled else (),
            )
        )
        start += size
    mask = tuple(mask_from_spans(tuple(spans), start))
    return Trajectory(
        trajectory_id=f"episode-{seed}",
        group_id=f"group-{seed}",
        task_id="replayed",
        environment="none",
        prefix_calls=0,
        tail_calls=NUM_TURNS,
        tokenizer_fingerprint="f" * 64,
        token_ids=tuple(rng.integers(0, VOCAB_ROWS, start).tolist()),
        spans=tuple(spans),
        loss_mask=mask,
        rollout_logprobs=np.where(mask, -1.0, np.nan),
        messages=(),
        tool_calls=(),
        exec_successes=(),
        reward=0.0,
        reward_parts={},
        passed=False,
        verdict={},
        termination=Termination.FINAL_ANSWER,
        sampling=SamplingRecord(temperature=1.0, max_new_tokens=TURN_TOKENS),
        seed=seed,
    )


def render(record: TokenRecord) -> TeacherRendering:
    """Teacher and student read the same tokens here."""
    return TeacherRendering(
        tuple(record.token_ids),
        tuple(
            RenderedSpan(
                index, span.start, span.end, tuple(range(1, span.end - span.start + 1)), ()
            )
            for index, span in enumerate(record.spans)
            if span.sampled
        ),
    )


def until_turn(played: Trajectory, turn: int) -> RunningEpisode:
    """The episode when its turn of this number is about to be written."""
    spans = played.spans[: 2 * turn + 1]
    return RunningEpisode(
        trajectory_id=played.trajectory_id,
        group_id=played.group_id,
        task_id=played.task_id,
        tokenizer_fingerprint=played.tokenizer_fingerprint,
        token_ids=played.token_ids[: spans[-1].end],
        spans=spans,
        messages=(),
    )


@dataclass(frozen=True)
class LastCall:
    """What scoring took once the episode was over."""

    seconds: float
    prefilled_tokens: float
    prefilled_tokens_before: float
    """While the episode ran."""
    logprobs: NDArray[np.float64]


async def last_call(
    model: HFCausalLM,
    played: Trajectory,
    *,
    pause_s: float,
    is_followed: bool = True,
    are_kept: bool = True,
) -> LastCall:
    """Replay the episode against a new service, and have it scored at its end."""
    scorer = PrefillScorer(model, name="bench", batcher=PrefixBatcher(model, BatchLimits()))
    async with (
        serving(build_teacher_app(scorer)) as url,
        GenerateClient(url, limits=LIMITS) as client,
    ):
        identity = TeacherIdentity("bench", played.tokenizer_fingerprint)
        teacher = HttpTeacher(client, render, identity, max_prefill_tokens=10_000, deadline_s=300)
        prefixes = PrefixScorer(
            GenerateClient(url, limits=LIMITS), render, max_prefill_tokens=10_000
        )
        teacher.reuse(prefixes)
        await client.health()
        if is_followed:
            for turn in range(1, NUM_TURNS):
                prefixes.turn(until_turn(played, turn))
                await asyncio.sleep(pause_s)  # the next turn is being written
        prefixes.end(played.trajectory_id, will_be_scored=are_kept)
        before, started = prefilled(await metrics_of(url)), time.perf_counter()
        score = await teacher.score(played)
        seconds = time.perf_counter() - started
        tokens = prefilled(await metrics_of(url)) - before
        await prefixes.close()
    if not isinstance(score, TeacherScore):
        raise SystemExit(f"no score: {score}")
    logprobs = np.concatenate([span.logprobs for span in score.spans])
    return LastCall(seconds, tokens, before, logprobs)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--pause-s", type=float, default=0.3, help="for each turn")
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=3)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    model = HFCausalLM(small_model(options.hidden_size, options.num_layers))
    found: dict[str, list[tuple[float, float, float, float]]] = {"warmed": [], "by turns": []}
    for repeat in range(options.repeats + 1):
        played = episode(repeat)
        whole = asyncio.run(last_call(model, played, pause_s=0, is_followed=False))
        for name, rows in found.items():
            kept = name == "by turns"
            other = asyncio.run(last_call(model, played, pause_s=options.pause_s, are_kept=kept))
            if repeat > 0:  # first calls fill torch's own caches
                rows.append(compared(whole, other))
    print(f"{len(played.token_ids)} tokens in {NUM_TURNS} turns; the last call is shorter by")
    for name, rows in found.items():
        fewer, faster, overhead, _ = (
            statistics.median(column) for column in zip(*rows, strict=True)
        )
        print(
            f"{name:<9} {fewer:5.1f} x in tokens prefilled, {faster:5.1f} x in seconds "
            f"(episode and last call together: {overhead:.2f} x the tokens of whole)"
        )
    worst = max(row[-1] for rows in found.values() for row in rows)
    print(f"largest difference between two scores of a token: {worst:.1e} nats")
    holds = min(row[0] for row in found["by turns"]) >= MIN_RATIO and worst <= TOLERANCE
    print(f"claim: at least {MIN_RATIO} x fewer tokens by turns: {'holds' if holds else 'FAILS'}")
    return 0 if holds else 1


def compared(whole: LastCall, other: LastCall) -> tuple[float, float, float, float]:
    """Ratios of the last calls' tokens and seconds, of all tokens, and how far scores differ."""
    return (
        whole.prefilled_tokens / other.prefilled_tokens,
        whole.seconds / other.seconds,
        (other.prefilled_tokens + other.prefilled_tokens_before) / whole.prefilled_tokens,
        float(np.abs(whole.logprobs - other.logprobs).max()),
    )


if __name__ == "__main__":
    sys.exit(main())
