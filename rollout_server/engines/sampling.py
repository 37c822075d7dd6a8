"""Drawing tokens from logits, one uniform number per token.

Randomness belongs to the request: its seed alone makes the numbers, the k-th of them decides the
k-th new token, and every operation here works row by row. So a request samples the same tokens
whatever is sampled beside it.

Shapes: n rows, V vocabulary rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import EngineError, GenerateApiError
from miniverl_dist.generate_api.wire import SamplingParams
from miniverl_dist.schemas.batch import FloatArray, IntArray


def uniforms(seed: int | None, count: int) -> FloatArray:
    """[count] numbers in [0, 1); the first k do not depend on ``count``. None: a fresh seed."""
    key = np.random.SeedSequence().generate_state(1, np.uint64)[0] if seed is None else seed % 2**64
    return np.random.Generator(np.random.Philox(key=int(key))).random(count)


def check_sampling(params: SamplingParams) -> None:
    """Refuse parameters that no sampler can follow.

    Raises:
        GenerateApiError: names the parameter, its value and its range.
    """
    ranges = {
        "temperature": (params.temperature, 0 <= params.temperature < np.inf, ">= 0"),
        "top_p": (params.top_p, 0 < params.top_p <= 1, "in (0, 1]"),
        "top_k": (params.top_k, params.top_k == -1 or params.top_k > 0, "-1 (all) or > 0"),
        "min_p": (params.min_p, 0 <= params.min_p <= 1, "in [0, 1]"),
        "max_new_tokens": (params.max_new_tokens, params.max_new_tokens > 0, "> 0"),
    }
    for name, (value, fits, expected) in ranges.items():
        if not fits:
            raise GenerateApiError(f"sampling_params.{name} is {value}, expected {expected}")


def sample(
    logits: NDArray[np.float32], params: Sequence[SamplingParams], draws: FloatArray
) -> tuple[IntArray, FloatArray]:
    """Choose one vocabulary row per row of logits.

    Args:
        logits: [n, V].
        params: [n]; temperature 0 takes the largest logit.
        draws: [n] numbers in [0, 1).

    Returns:
        ``(rows, logprobs)``, both [n]; nats under the softmax after temperature (temperature 1
        where it is 0), before top-k, top-p and min-p, as SGLang reports them.

    Raises:
        EngineError: logits that are not finite.
    """
    if not np.isfinite(logits).all():
        raise EngineError("the model's logits are not finite: its weights must have diverged")
    temperatures = np.array([p.temperature if p.temperature > 0 else 1.0 for p in params])
    scaled = logits.astype(np.float64) / temperatures[:, None]
    scaled -= scaled.max(axis=-1, keepdims=True)
    weights = np.exp(scaled)
    # Running sums give the totals too: left to right, so that their bits do not depend on how
    # many rows there are, as those of ``sum`` might.
    sums = np.cumsum(weights, axis=-1)
    totals = sums[:, -1].copy()
    truncated = [i for i, p in enumerate(params) if p.top_k > 0 or p.top_p < 1 or p.min_p > 0]
    for row in truncated:
        sums[row] = np.cumsum(_truncated(weights[row], params[row]))
    # A draw below 1 keeps the threshold below the total: there always is a first larger sum.
    chosen = (sums > draws[:, None] * sums[:, -1:]).argmax(axis=-1)
    greedy = np.array([p.temperature == 0 for p in params])
    chosen = np.where(greedy, logits.argmax(axis=-1), chosen)
    return chosen, scaled[np.arange(len(chosen)), chosen] - np.log(totals)


def _truncated(weights: FloatArray, params: SamplingParams) -> FloatArray:
    """[V] with the tokens set to 0 that top-k, then top-p, then min-p leave out."""
    order = np.argsort(-weights, kind="stable")
    if params.top_k > 0:
        order = order[: params.top_k]
    kept = weights[order]
    # A token stays while what stands before it holds less than top_p of the kept mass.
    before = np.cumsum(kept) - kept
    inside = before < params.top_p * kept.sum()
    inside &= kept >= params.min_p * kept[0]
    result = np.zeros_like(weights)
    result[order[inside]] = kept[inside]
    return result
