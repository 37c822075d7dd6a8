"""Slow divergence oracle: one token at a time, plain floats, probabilities instead of logarithms.

Written from the definitions. Mixtures are mixed, tails are what is left of the sum, gradients are
differences of values. No array, no helper of the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from miniverl_dist.config.lab import DistillConfig

FLOOR = math.exp(-50)


@dataclass(frozen=True)
class OracleTeacher:
    """One row: probabilities of all tokens (``tail`` None), or of the kept ones and all others."""

    probabilities: dict[int, float]
    tail: float | None
    entropy: float


def full_teacher(probabilities: Sequence[float]) -> OracleTeacher:
    """Every token is an outcome."""
    return OracleTeacher(dict(enumerate(probabilities)), None, entropy(probabilities))


def kept_teacher(probabilities: Sequence[float], kept: Sequence[int]) -> OracleTeacher:
    """``kept`` tokens are outcomes, the rest is one."""
    rest = [p for token, p in enumerate(probabilities) if token not in kept]
    return OracleTeacher(
        {token: probabilities[token] for token in kept}, math.fsum(rest), entropy(probabilities)
    )


def entropy(probabilities: Sequence[float]) -> float:
    """Nats."""
    return -math.fsum(p * math.log(p) for p in probabilities if p > 0)


def student_probabilities(logits: Sequence[float], temperature: float) -> list[float]:
    """Softmax."""
    highest = max(logits)
    parts = [math.exp((logit - highest) / temperature) for logit in logits]
    total = math.fsum(parts)
    return [part / total for part in parts]


def slow_divergence(
    logits: Sequence[float], teacher: OracleTeacher | None, sampled: int, config: DistillConfig
) -> float:
    """Nats of one row."""
    student = student_probabilities(logits, config.temperature)
    if config.divergence == "sampled_nll":
        return -math.log(student[sampled])
    assert teacher is not None
    pairs = [(teacher.probabilities[token], student[token]) for token in teacher.probabilities]
    if teacher.tail is not None:
        others = [q for token, q in enumerate(student) if token not in teacher.probabilities]
        pairs.append((teacher.tail, math.fsum(others)))
    value = _value(config.divergence, pairs, config.beta)
    aware = config.entropy_aware
    if aware is not None and teacher.entropy > aware.threshold_nats:
        forward = _value("forward_kl", pairs, config.beta)
        value = aware.forward_weight * forward + (1 - aware.forward_weight) * value
    return value


def _value(name: str, pairs: Sequence[tuple[float, float]], beta: float) -> float:
    """``pairs``: (teacher, student) probability of every outcome."""
    if name == "cross_entropy":
        return -math.fsum(p * math.log(max(q, FLOOR)) for p, q in pairs if p > 0)
    if name == "forward_kl":
        return math.fsum(p * math.log(p / max(q, FLOOR)) for p, q in pairs if p > 0)
    if name == "reverse_kl":
        return math.fsum(q * math.log(q / max(p, FLOOR)) for p, q in pairs if q > 0)
    mixed = [(p, q, beta * p + (1 - beta) * q) for p, q in pairs]
    of_teacher = math.fsum(p * math.log(p / m) for p, q, m in mixed if p > 0)
    of_student = math.fsum(q * math.log(q / m) for p, q, m in mixed if q > 0)
    return beta * of_teacher + (1 - beta) * of_student


def slow_gradient(
    function: Callable[[list[float]], float], point: Sequence[float], step: float = 1e-3
) -> list[float]:
    """Differences of fourth order in every coordinate; off by about 1e-11 for smooth functions."""
    slopes = []
    for place in range(len(point)):

        def at(shift: float, place: int = place) -> float:
            moved = list(point)
            moved[place] += shift
            return function(moved)

        near, far = at(step) - at(-step), at(2 * step) - at(-2 * step)
        slopes.append((8 * near - far) / (12 * step))
    return slopes
