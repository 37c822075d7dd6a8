"""What differs between a run and those it is compared with: recipe, last numbers, losses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from miniverl_dist.observability.environment import without_paths
from miniverl_dist.reporting.evaluation import share
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.reporting.windows import Mean, label, last_mean, shown_fields, window_text

_COMPARED: Final = (
    "pass_rate",
    "reward_mean",
    "partial_mean",
    "first_call_mean",
    "exec_mean",
    "reverse_kl_mean",
    "loss",
    "divergence_mean",
    "teacher_tail_mass_mean",
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
_MAX_VALUE_CHARS: Final = 200
_ABSENT: Final = "not there"

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Table:
    """One table of a report."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


def comparison(runs: Sequence[RunData]) -> list[Table]:
    """What differs between the runs, as tables; none for a run alone."""
    if len(runs) == 1:
        return []
    labels = [run.label for run in runs]
    windows = [f"{run.label}: {window_text('last', len(run.metrics))}" for run in runs]
    tables = (
        Table(
            "Runs compared: evaluated pass rates (intervals: miniverl-dist eval compare A B)",
            ("Policy", "When", "T", *labels),
            pass_rate_rows(runs),
        ),
        Table("Runs compared: last steps", ("", *windows), number_rows(runs)),
        Table("Runs compared: where the recipes differ", ("", *labels), recipe_rows(runs)),
    )
    return [table for table in tables if table.rows]


def pass_rate_rows(runs: Sequence[RunData]) -> Rows:
    """Pass rate of each policy, moment and horizon that some run has evaluated, side by side.

    Of rows that share all three the newest counts.
    """
    rates = [
        {
            (row.policy, row.tag, str(row.tail_calls)): share(row.pass_rate)
            for row in (() if run.evaluation is None else run.evaluation.rows)
        }
        for run in runs
    ]
    keys = dict.fromkeys(key for found in rates for key in found)
    return [(*key, *(found.get(key, "not evaluated") for found in rates)) for key in keys]


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
    """Means over the last steps of each run, then what was lost, by reason."""
    rows: Rows = [
        (label(name), *_with_differences([last_mean(run.metrics, name) for run in runs]))
        for name in shown_fields(_COMPARED, *(run.metrics for run in runs))
    ]
    kinds = sorted({kind for run in runs for kind in run.losses})
    rows += [
        (kind, *(str(run.losses[kind].total() if kind in run.losses else 0) for run in runs))
        for kind in kinds
    ]
    return rows


def _with_differences(means: Sequence[Mean]) -> Iterator[str]:
    """Each mean as text; all but the first with their difference to it."""
    first = means[0].value
    for index, mean in enumerate(means):
        if index and first is not None and mean.value is not None:
            yield f"{mean} ({mean.value - first:+.3g})"
        else:
            yield str(mean)


def _flat(value: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", item


def _shown(value: object) -> str:
    text = without_paths(str(value))
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 1]}…"
