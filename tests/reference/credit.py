"""Slow credit oracle: plain loops from byte ends to weights; no array, no helper of the product."""

from __future__ import annotations

from collections.abc import Sequence

from tests.reference.alignment import slow_align


def slow_deltas(
    student_ends: Sequence[int],
    teacher_ends: Sequence[int],
    student_logprobs: Sequence[float],
    teacher_logprobs: Sequence[float],
) -> list[float]:
    """Summed student minus summed teacher logprobs of each unit."""
    student_unit, teacher_unit, num_units = slow_align(student_ends, teacher_ends)
    deltas = [0.0] * num_units
    for logprob, unit in zip(student_logprobs, student_unit, strict=True):
        if unit >= 0:
            deltas[unit] += logprob
    for logprob, unit in zip(teacher_logprobs, teacher_unit, strict=True):
        if unit >= 0:
            deltas[unit] -= logprob
    return deltas


def slow_credit(
    deltas: Sequence[float], lookahead: int | str, discount: float, clip: float | None
) -> list[float]:
    """Each unit's delta with those ahead of it, clipped."""
    credits = []
    for unit in range(len(deltas)):
        total = 0.0
        for ahead in range(unit, len(deltas)):
            if lookahead == "return_to_go":
                total += discount ** (ahead - unit) * deltas[ahead]
            elif isinstance(lookahead, int) and ahead - unit <= lookahead:
                total += deltas[ahead]
        if clip is not None:
            total = max(-clip, min(clip, total))
        credits.append(total)
    return credits


def slow_weights(
    student_ends: Sequence[int],
    teacher_ends: Sequence[int],
    student_logprobs: Sequence[float],
    teacher_logprobs: Sequence[float],
    *,
    rule: str,
    clip: float | None,
    lookahead: int | str = 1,
    stop_after: float | None = None,
    discount: float = 1.0,
) -> list[float | None]:
    """One weight per student token; None where no unit covers it."""
    student_unit, _, num_units = slow_align(student_ends, teacher_ends)
    deltas = slow_deltas(student_ends, teacher_ends, student_logprobs, teacher_logprobs)
    credits = slow_credit(deltas, lookahead, discount, clip)
    weights: list[float | None] = []
    for token, unit in enumerate(student_unit):
        if unit < 0:
            weights.append(None)
            continue
        members = [other for other, its_unit in enumerate(student_unit) if its_unit == unit]
        student_sum = sum(student_logprobs[other] for other in members)
        if stop_after is not None and any(deltas[before] > stop_after for before in range(unit)):
            weights.append(0.0)
        elif rule == "unit":
            weights.append(credits[unit])
        elif rule == "mean":
            weights.append(credits[unit] / len(members))
        elif rule == "proportional":
            own = student_logprobs[token] / student_sum if student_sum else 1 / len(members)
            weights.append(credits[unit] * own)
        else:
            teacher_sum = student_sum - deltas[unit]
            added = credits[unit] - deltas[unit]
            weights.append(
                student_logprobs[token] - teacher_sum / len(members) + added / len(members)
            )
    assert len(deltas) == num_units
    return weights
