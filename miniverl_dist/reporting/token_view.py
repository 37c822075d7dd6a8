"""The tokens that a student wrote in one turn, with what was made of each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from miniverl_dist.reporting.token_text import TokenTexts
from miniverl_dist.schemas.token_analysis import TokenAnalysis
from miniverl_dist.schemas.trajectory import Trajectory

TokenStrip = dict[str, list[Any]]
"""Columns of equal length, one entry per token, but for ``ratio`` and ``teacher``.

``text``, ``unit`` (index into ``ratio`` and ``teacher``, None without one), ``logprob`` (nats),
``weight`` (nats, None without a unit), ``advantage``, ``stopped`` (0 or 1), ``kind``; ``ratio`` is
student minus teacher of each unit, ``teacher`` the teacher's log-probability of it (nats).
"""

_DIGITS: Final = 4


def token_strips(
    trajectory: Trajectory, analysis: TokenAnalysis, texts: TokenTexts
) -> dict[int, TokenStrip]:
    """One strip for each message that the student wrote, by the message's index."""
    message_of = {
        place: span.message_index
        for span in trajectory.sampled_spans
        for place in range(span.start, span.end)
        if span.message_index is not None
    }
    student = _unit_logprobs(analysis)
    strips: dict[int, TokenStrip] = {}
    for index, place in enumerate(analysis.positions):
        message = message_of.get(place)
        if message is None:
            continue
        strip = strips.setdefault(message, {name: [] for name in _COLUMNS})
        _append(strip, analysis, index, texts, student)
    return strips


_COLUMNS: Final = (
    "text",
    "unit",
    "logprob",
    "weight",
    "advantage",
    "stopped",
    "kind",
    "ratio",
    "teacher",
    "units",
)


def _append(
    strip: TokenStrip,
    analysis: TokenAnalysis,
    index: int,
    texts: TokenTexts,
    student: Mapping[int, float],
) -> None:
    unit = analysis.units[index]
    if unit is not None and strip["units"][-1:] != [unit]:
        ratio = analysis.unit_reverse_kl[unit]
        strip["units"].append(unit)
        strip["ratio"].append(_short(ratio))
        strip["teacher"].append(_short(student[unit] - ratio))
    strip["unit"].append(None if unit is None else len(strip["units"]) - 1)
    strip["text"].append(texts.show(analysis.token_ids[index]))
    strip["logprob"].append(_short(analysis.rollout_logprobs[index]))
    strip["weight"].append(_short(analysis.opd_weights[index]))
    strip["advantage"].append(_short(analysis.advantages[index]))
    strip["stopped"].append(int(analysis.is_stopped[index]))
    strip["kind"].append(analysis.kinds[index].value)


def _unit_logprobs(analysis: TokenAnalysis) -> dict[int, float]:
    """The student's log-probability of each unit, nats."""
    sums: dict[int, float] = {}
    for unit, logprob in zip(analysis.units, analysis.rollout_logprobs, strict=True):
        if unit is not None:
            sums[unit] = sums.get(unit, 0.0) + logprob
    return sums


def _short(value: float | None) -> float | None:
    """Rounded for the page; None for what JSON cannot hold."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{_DIGITS}g}")
