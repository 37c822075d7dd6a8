"""What differs between a run and those it is compared with: recipe, last numbers, losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from miniverl_dist.observability.environment import without_paths
from miniverl_dist.observability.metrics import METRICS
from miniverl_dist.reporting.run_data import RunData

_COMPARED: Final = (
    "pass_rate",
    "reward_mean",
    "partial_mean",
    "first_call_mean",
    "exec_mean",
    "reverse_kl_mean",
    "divergence_mean",
    "group_advantage_abs_mean",
    "opd_weight_abs_mean",
    "entropy_mean",
    "calls_per_trajectory",
    "response_tokens_mean",
    "tail_calls_mean",
    "clip_low_fraction",
    "clip_high_fraction",
    "mismatch_mean_abs",
    "policy_lag_mean",
    "grad_norm",
    "seconds_step",
    "peak_rss_bytes",
)
_WINDOW: Final = 5
"""Last steps that a number is the mean of."""
_MAX_VALUE_CHARS: Final = 200
_ABSENT: Final = "not there"

Rows = list[tuple[str, ...]]


def compare_head(runs: Sequence[RunData]) -> tuple[str, ...]:
    """Columns of both tables."""
    return ("", *(run.label for run in runs))


def recipe_rows(runs: Sequence[RunData]) -> Rows:
    """Keys of the resolved configs whose values are not the same in all runs."""
    flat = [dict(_flat(run.config, "")) for run in runs]
    keys = dict.fromkeys(key for config in flat for key in config)
    return [
        (key, *(_shown(config.get(key, _ABSENT)) for config in flat))
        for key in keys
        if len({str(config.get(key, _ABSENT)) for config in flat}) > 1
    ]


def number_rows(runs: Sequence[RunData]) -> Rows:
    """Steps, then means over the last steps of each run, then what was lost, by reason."""
    rows: Rows = [("steps", *(str(len(run.metrics)) for run in runs))]
    for name in _COMPARED:
        found = [_last_mean(run, name) for run in runs]
        if any(value is not None for value in found):
            rows.append((f"{name} ({METRICS[name].unit})", *_with_differences(found)))
    kinds = sorted({kind for run in runs for kind in run.losses})
    rows += [
        (kind, *(str(run.losses[kind].total() if kind in run.losses else 0) for run in runs))
        for kind in kinds
    ]
    return rows


def _with_differences(values: Sequence[float | None]) -> Iterator[str]:
    """Each value as text; all but the first with their difference to it."""
    for index, value in enumerate(values):
        first = values[0]
        if value is None:
            yield "not measured"
        elif index and first is not None:
            yield f"{value:.4g} ({value - first:+.3g})"
        else:
            yield f"{value:.4g}"


def _last_mean(run: RunData, name: str) -> float | None:
    values = [r[name] for r in run.metrics if isinstance(r.get(name), int | float)][-_WINDOW:]
    return sum(values) / len(values) if values else None


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _shown(value: object) -> str:
    text = without_paths(str(value))
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 1]}…"
