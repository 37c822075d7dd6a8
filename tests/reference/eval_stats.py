"""Statistics of evaluations the slow way: plain loops over draws, and enumeration of subsets."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

Task = tuple[int, int]
"""(passes, episodes) of one task."""


def pass_at_k(num_episodes: int, num_passed: int, k: int) -> float:
    """Share of all subsets of k episodes that hold at least one pass."""
    episodes = [True] * num_passed + [False] * (num_episodes - num_passed)
    subsets = list(itertools.combinations(episodes, k))
    return sum(any(subset) for subset in subsets) / len(subsets)


def draws(num_tasks: int, num_resamples: int, seed: int) -> list[list[int]]:
    """The tasks of every resample, one draw after the other, in whole numbers."""
    stream = np.random.PCG64(seed)
    return [
        [((int(stream.random_raw()) >> 32) * num_tasks) >> 32 for _ in range(num_tasks)]
        for _ in range(num_resamples)
    ]


def quantile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the two neighbouring order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def rate(tasks: Sequence[Task]) -> float:
    """Passes per episode."""
    return sum(passed for passed, _ in tasks) / sum(played for _, played in tasks)


def interval(tasks: Sequence[Task], num_resamples: int, seed: int) -> tuple[float, float]:
    """95 % percentile interval of the rate, tasks resampled."""
    rates = [rate([tasks[i] for i in drawn]) for drawn in draws(len(tasks), num_resamples, seed)]
    return quantile(rates, 0.025), quantile(rates, 0.975)


def difference_interval(
    a: Sequence[Task], b: Sequence[Task], num_resamples: int, seed: int
) -> tuple[float, float]:
    """95 % percentile interval of rate A minus rate B, the same tasks drawn on both sides."""
    found = [
        rate([a[i] for i in drawn]) - rate([b[i] for i in drawn])
        for drawn in draws(len(a), num_resamples, seed)
    ]
    return quantile(found, 0.025), quantile(found, 0.975)
