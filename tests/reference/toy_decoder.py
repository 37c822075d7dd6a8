"""The toy decoder once more, one position at a time in float64: the oracle of its fast paths.

Written from the equations, with loops where the real one has shapes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def rms_norm(x: Floats, weight: Floats) -> Floats:
    return x / np.sqrt(np.mean(x * x) + 1e-6) * weight


def rotate(vector: Floats, position: int) -> Floats:
    """Pairs (i, i + d / 2) as complex numbers, turned by position * base ** (-2 i / d)."""
    half = len(vector) // 2
    angles = position * 10_000.0 ** (-2 * np.arange(half) / len(vector))
    turned = (vector[:half] + 1j * vector[half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag])


def decoder_logprobs(
    weights: Mapping[str, NDArray[np.float32]], rows: list[int], *, num_layers: int, num_heads: int
) -> Floats:
    """[T, V] nats for the token that follows each position."""
    w = {name: array.astype(np.float64) for name, array in weights.items()}
    x = [w["embed"][row] for row in rows]
    for layer in range(num_layers):
        p = f"layers.{layer}."
        queries, keys, values = [], [], []
        for position, state in enumerate(x):
            qkv = w[p + "qkv"] @ rms_norm(state, w[p + "attn_norm"])
            q, k, v = (part.reshape(num_heads, -1) for part in np.split(qkv, 3))
            queries.append([rotate(head, position) for head in q])
            keys.append([rotate(head, position) for head in k])
            values.append(v)
        for position in range(len(x)):
            heads = []
            for head in range(num_heads):
                q = queries[position][head]
                scores = np.array([q @ keys[s][head] for s in range(position + 1)])
                scores = np.exp(scores / np.sqrt(len(q)))
                mixed = sum(score * values[s][head] for s, score in enumerate(scores))
                heads.append(mixed / scores.sum())
            state = x[position] + w[p + "attn_out"] @ np.concatenate(heads)
            gate, up = np.split(w[p + "gate_up"] @ rms_norm(state, w[p + "ffn_norm"]), 2)
            x[position] = state + w[p + "down"] @ (gate / (1 + np.exp(-gate)) * up)
    logits = np.array([w["embed"] @ rms_norm(state, w["final_norm"]) for state in x])
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))
