"""The charts of a report: which fields, what a healthy curve looks like, and plotly's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from miniverl_dist.observability.metrics import METRICS
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.schemas.evaluation import EvaluationRow

COLORS: Final = (
    "#1f77b4",
    "#d62728",
    "#2ca02c",
    "#9467bd",
    "#ff7f0e",
    "#17becf",
    "#8c564b",
    "#7f7f7f",
)


@dataclass(frozen=True)
class Chart:
    """Metric fields that are read together, over the steps of a run."""

    title: str
    hint: str
    unit: str
    fields: tuple[str, ...]
    is_stacked: bool = False


CHARTS: Final = (
    Chart(
        "Pass rate and reward",
        "Training episodes at the curriculum's current horizon; when the horizon grows, both may "
        "fall although the student learns.",
        "fraction, reward",
        ("pass_rate", "reward_mean", "partial_mean", "first_call_mean", "exec_mean"),
    ),
    Chart(
        "Reverse KL to the teacher",
        "Student minus teacher on the student's own tokens. Distillation lowers it; a rise while "
        "the reward rises means that the reward pulls away from the teacher.",
        "nats per scored token",
        ("reverse_kl_mean", "opd_weight_mean"),
    ),
    Chart(
        "Advantage parts",
        "Size of the two signals. Neither should drown the other.",
        "mean absolute value",
        ("group_advantage_abs_mean", "opd_weight_abs_mean", "advantage_abs_mean"),
    ),
    Chart(
        "Clip fractions",
        "Shares of tokens at a bound. Steadily above a third, the bound makes the gradient.",
        "fraction of tokens",
        (
            "clip_low_fraction",
            "clip_high_fraction",
            "dual_clip_fraction",
            "opd_clip_fraction",
            "opd_stopped_fraction",
            "mismatch_capped_fraction",
        ),
    ),
    Chart(
        "Engine mismatch",
        "Trainer against sampling engine under the same weights: should be flat and near 0.",
        "nats",
        ("mismatch_mean_abs", "mismatch_kl"),
    ),
    Chart(
        "Largest ratios",
        "Policy/proximal: far above the clip bound the batch is old. Trainer against engine: the "
        "token that the two see most differently.",
        "ratio",
        ("ratio_max", "mismatch_max_ratio"),
    ),
    Chart(
        "Entropy",
        "A fall to 0 ends exploration: groups then have no variance.",
        "nats",
        ("entropy_mean", "teacher_entropy_mean"),
    ),
    Chart(
        "Policy lag",
        "Publishes between sampling and use; bounded by loop.max_policy_lag.",
        "publishes",
        ("policy_lag_mean", "policy_lag_max"),
    ),
    Chart(
        "Seconds per phase",
        "Where a step's wall-clock time goes.",
        "seconds",
        ("seconds_take", "seconds_build", "seconds_update", "seconds_publish", "seconds_commit"),
        is_stacked=True,
    ),
    Chart(
        "Drops and faults",
        "What did not reach the update, or reached it without a teacher.",
        "count",
        (
            "teacher_dropped",
            "num_harness_faults",
            "num_refilled_groups",
            "num_zero_variance_groups",
        ),
    ),
    Chart(
        "Curriculum",
        "T, the calls left to the student.",
        "calls",
        ("tail_calls_mean", "tail_calls_max"),
    ),
    Chart(
        "Loss and gradient",
        "A policy-gradient loss need not fall; the gradient norm should not explode.",
        "loss, norm",
        ("loss", "policy_loss", "kl_loss", "grad_norm"),
    ),
    Chart("Learning rate", "As scheduled.", "rate", ("lr",)),
    Chart(
        "Tokens",
        "Length of what the student writes.",
        "tokens",
        ("response_tokens_mean",),
    ),
)


def chart_figures(runs: Sequence[RunData]) -> tuple[list[dict[str, Any]], list[str]]:
    """Plotly figures of all charts with data (further runs dashed), and titles of those without."""
    figures, empty = [], []
    for chart in CHARTS:
        traces = [
            trace for position, run in enumerate(runs) for trace in _traces(chart, run, position)
        ]
        if traces:
            figures.append(_figure(chart.title, chart.hint, chart.unit, "step", traces))
        else:
            empty.append(chart.title)
    return figures, empty


def evaluation_figure(runs: Sequence[RunData]) -> dict[str, Any] | None:
    """Student's pass rate over the run with its intervals; other policies as level lines."""
    traces = [
        trace for position, run in enumerate(runs) for trace in _evaluation_traces(run, position)
    ]
    if not traces:
        return None
    hint = "Evaluation tasks, 95 % intervals; level lines are policies that do not train."
    return _figure("Evaluated pass rate", hint, "pass rate", "step", traces)


def _figure(
    title: str, hint: str, unit: str, x_title: str, traces: list[dict[str, Any]]
) -> dict[str, Any]:
    layout = {
        "height": 320,
        "margin": {"l": 60, "r": 20, "t": 10, "b": 45},
        "xaxis": {"title": {"text": x_title}},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "legend": {"orientation": "h", "y": -0.25},
        "barmode": "stack",
    }
    return {"title": title, "hint": hint, "data": traces, "layout": layout}


def _traces(chart: Chart, run: RunData, position: int) -> list[dict[str, Any]]:
    traces = []
    for index, name in enumerate(chart.fields):
        points = [
            (record["step"], record[name])
            for record in run.metrics
            if isinstance(record.get(name), int | float)
        ]
        if not points:
            continue
        trace: dict[str, Any] = {
            "name": f"{name} ({run.label})" if position else name,
            "x": [step for step, _ in points],
            "y": [value for _, value in points],
            "hovertemplate": f"%{{y:.4g}} · {METRICS[name].description}<extra></extra>",
        }
        traces.append(trace | _style(COLORS[index % len(COLORS)], position, chart.is_stacked))
    return traces


def _style(color: str, position: int, is_stacked: bool) -> dict[str, Any]:
    if is_stacked and not position:
        return {"type": "bar", "marker": {"color": color}}
    dash = "dash" if position else "solid"
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "line": {"color": color, "dash": dash, "width": 2},
        "marker": {"size": 4},
    }


def _evaluation_traces(run: RunData, position: int) -> list[dict[str, Any]]:
    if run.evaluation is None:
        return []
    last = max([record["step"] for record in run.metrics], default=1)
    suffix = f" ({run.label})" if position else ""
    series: dict[tuple[str, int], list[EvaluationRow]] = {}
    for row in run.evaluation.rows:
        series.setdefault((row.policy, row.tail_calls), []).append(row)
    traces = []
    for index, ((policy, tail_calls), rows) in enumerate(series.items()):
        is_level = policy != "student"
        points = [(0, rows[-1]), (last, rows[-1])] if is_level else _placed(rows, last)
        trace: dict[str, Any] = {
            "name": f"{policy}, T = {tail_calls}{suffix}",
            "x": [x for x, _ in points],
            "y": [row.pass_rate for _, row in points],
        } | _style(COLORS[index % len(COLORS)], position, is_stacked=False)
        if is_level:
            trace |= {"mode": "lines"}
            trace["line"] = trace["line"] | {"dash": "dot", "width": 1}
        else:
            trace["error_y"] = {
                "type": "data",
                "array": [row.pass_high - row.pass_rate for _, row in points],
                "arrayminus": [row.pass_rate - row.pass_low for _, row in points],
            }
        traces.append(trace)
    return traces


def _placed(rows: Sequence[EvaluationRow], last_step: int) -> list[tuple[int, EvaluationRow]]:
    """Rows with the step their tag stands for; jobs of their own stand at the end."""
    placed = []
    for row in rows:
        number = row.tag.removeprefix("step-")
        if row.tag in ("before", "warm"):
            step = 0
        else:
            step = int(number) if number.isdigit() else last_step
        placed.append((step, row))
    return sorted(placed, key=lambda pair: pair[0])
