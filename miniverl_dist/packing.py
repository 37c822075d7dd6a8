"""Sequences laid end to end, and split into optimizer steps.

Shapes: N packed tokens, B sequences.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.batch import IntArray


def sequence_starts(lengths: Sequence[int]) -> IntArray:
    """[B + 1] offsets of sequences laid end to end, from 0 to N."""
    if any(length <= 0 for length in lengths):
        raise BatchError("every sequence needs at least one token")
    return np.concatenate([[0], np.cumsum(np.asarray(lengths, dtype=np.int64))]).astype(np.int64)


def sequence_ids(starts: IntArray) -> IntArray:
    """[N] index of the sequence that each packed token belongs to."""
    return np.repeat(np.arange(len(starts) - 1, dtype=np.int64), np.diff(starts))


def split_minibatches(num_sequences: int, num_minibatches: int) -> IntArray:
    """[B] optimizer step of each sequence, dealt in turn so that siblings spread over the steps.

    Sizes differ by at most one, and no step is empty: fewer sequences make fewer steps.
    """
    steps = min(num_minibatches, num_sequences)
    return np.arange(num_sequences, dtype=np.int64) % max(steps, 1)
