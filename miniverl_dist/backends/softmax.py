"""The float64 log-softmax that toy sampling and toy scoring share; torch-free.

Shapes: n rows, V vocabulary rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.schemas.batch import FloatArray


def shifted(logits: NDArray[np.float32], temperatures: FloatArray | float = 1.0) -> FloatArray:
    """[n, V] logits after the temperature (one for all rows or [n]), less the row's largest."""
    scaled: FloatArray = logits / np.reshape(np.asarray(temperatures, np.float64), (-1, 1))
    scaled -= scaled.max(axis=-1, keepdims=True)
    return scaled


def running_sums(values: FloatArray) -> FloatArray:
    """[n, V] sums of each row up to and including each entry, left to right.

    The last one is the total: unlike ``sum``, its bits do not depend on how many rows there are.
    """
    return np.cumsum(values, axis=-1)


def log_softmax(logits: NDArray[np.float32], temperatures: FloatArray | float = 1.0) -> FloatArray:
    """[n, V] nats after the temperature, one for all rows or [n]."""
    scaled = shifted(logits, temperatures)
    scaled -= np.log(running_sums(np.exp(scaled))[:, -1:])
    return scaled
