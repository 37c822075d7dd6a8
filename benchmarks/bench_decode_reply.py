"""Claim: a 16k-token score reply decodes 5x faster than ``json.loads`` reads its text form.

The text form is what a server sends with ``return_text_in_logprobs``: each token's text beside its
id and logprob. The client never asks for it, and decodes straight into the type that it needs. Both
ways are also timed up to the end: ids compared, values finite and <= 0, an array. CPU time of this
process, medians. Real tokenizer where it is installed, short words elsewhere. Exit status 1 when
the claim does not hold.

    python -m benchmarks.bench_decode_reply
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from miniverl_dist.errors import MissingDependencyError
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    ScoringReply,
    decode_input_logprobs,
    decode_json,
)
from miniverl_dist.tokens.load import load_tokenizer

SIZES = (1024, 4096, 16384)
MIN_RATIO = 5.0
RATIOS = {"ratio": ("json", "typed"), "ratio checked": ("json checked", "typed checked")}


def tokens() -> tuple[list[int], list[str], str]:
    """16k token ids, the text of each as a server prints it, and where they come from."""
    text = "".join(
        f"Turn {n}: I'll move {n * 37} files, naïve façade, 整理する {n} 😀 and then check.\n"
        f'{{"name": "mv", "arguments": {{"source": "report_{n * n}.txt", "destination": "a"}}}}\n'
        f"<tool_call>\n<function=mv>\n<parameter=source>\nreport_{n * n}.txt\n</parameter>\n"
        for n in range(400)
    )
    try:
        tokenizer = load_tokenizer("deepseek-v4")
    except MissingDependencyError as error:
        words = [" the", '{"', "_name", "\n    ", "\ufffd", " value", "0", "é", " return", '":']
        ids = [n % 1000 for n in range(SIZES[-1])]
        return ids, [words[i % len(words)] for i in ids], f"short words ({error})"
    ids = list(tokenizer.encode(text))[: SIZES[-1]]
    texts = [tokenizer.byte_table.join([i]).decode("utf-8", errors="replace") for i in ids]
    return ids, texts, "the DeepSeek-V4 tokenizer"


def reply_of(ids: Sequence[int], texts: Sequence[str] | None) -> bytes:
    """A reply in the fields, and with the float32 values, that SGLang sends."""
    rng = random.Random(0)
    values = [float(np.float32(-rng.expovariate(0.6))) for _ in ids]
    entries = [
        [None if i == 0 else values[i], token, texts[i] if texts else None]
        for i, token in enumerate(ids)
    ]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(ids),
        "weight_version": "default",
        "num_retractions": 0,
        "input_token_logprobs": entries,
        "output_token_logprobs": [],
        "output_token_logprobs_length": 0,
        "reasoning_tokens": 0,
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_versions": [{"version": "default", "start": 0, "end": 0}],
        "e2e_latency": 0.043,
    }
    return msgspec.json.encode({"text": "", "output_ids": [], "meta_info": meta})


def by_hand(reply: dict[str, Any], ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Checked scores out of ``json.loads``, with the checks of ``decode_input_logprobs``."""
    entries = reply["meta_info"]["input_token_logprobs"]
    if [entry[1] for entry in entries] != ids or entries[0][0] is not None:
        raise AssertionError("another text")
    values = np.array([entry[0] for entry in entries[1:]], dtype=np.float64)
    if not (np.isfinite(values) & (values <= 0)).all():
        raise AssertionError("no logprobs")
    return values


def measure(ids: Sequence[int], texts: Sequence[str]) -> dict[str, float]:
    """Median CPU milliseconds of each way, measured in turn, and medians of two ratios."""
    plain, with_text = reply_of(ids, None), reply_of(ids, texts)

    def checked(body: bytes) -> np.ndarray[Any, np.dtype[np.float64]]:
        return decode_input_logprobs(decode_json(body, ScoringReply), input_ids=ids, start=1)

    np.testing.assert_array_equal(checked(plain), by_hand(json.loads(with_text), ids))
    np.testing.assert_array_equal(checked(plain), checked(with_text))
    ways: dict[str, Callable[[], object]] = {
        "json": lambda: json.loads(with_text),
        "typed": lambda: decode_json(plain, ScoringReply),
        "whole": lambda: decode_json(plain, GenerateReply),
        "typed text": lambda: decode_json(with_text, ScoringReply),
        "json checked": lambda: by_hand(json.loads(with_text), ids),
        "typed checked": lambda: checked(plain),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(max(25, 200_000 // len(ids))):
        for name, run in ways.items():
            start = time.process_time_ns()
            run()
            times[name].append((time.process_time_ns() - start) / 1e6)
    found = {name: statistics.median(values) for name, values in times.items()}
    # Of each round, so that whatever else the machine does meets both ways.
    for name, (slow, fast) in RATIOS.items():
        pairs = zip(times[slow], times[fast], strict=True)
        found[name] = statistics.median(a / b for a, b in pairs)
    return found


def main() -> int:
    ids, texts, source = tokens()
    print(f"tokens from {source}")
    print(f"{'tokens':>7} {'json.loads':>11} {'typed':>7} {'ratio':>6}   with checks, to an array:")
    ratio = 0.0
    for size in SIZES:
        ms = measure(ids[:size], texts[:size])
        ratio = ms["ratio"]
        print(
            f"{size:7d} {ms['json']:8.2f} ms {ms['typed']:7.2f} {ratio:5.1f}x   "
            f"{ms['json checked']:.2f} / {ms['typed checked']:.2f} = "
            f"{ms['ratio checked']:.1f}x; whole reply {ms['whole']:.2f}, "
            f"text form into the type {ms['typed text']:.2f}"
        )
    holds = ratio >= MIN_RATIO
    print(f"claim (>= {MIN_RATIO:.0f}x at {SIZES[-1]} tokens): {'holds' if holds else 'FAILS'}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
