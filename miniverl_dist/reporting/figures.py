"""Plotly's JSON of a report's charts: curves with their runs, and the charts that are more."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import isfinite
from typing import Any, Final

from miniverl_dist.observability.metrics import METRICS, NOT_A_NUMBER
from miniverl_dist.observability.step_names import named_step
from miniverl_dist.reporting.charts import CHARTS, PHASES, Chart, Topic
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.reporting.series import (
    MAX_BARS,
    MAX_POINTS,
    GapPoint,
    mean_line,
    means,
    sums,
    thinned,
)
from miniverl_dist.reporting.windows import is_number
from miniverl_dist.schemas.evaluation import EvaluationRow
from miniverl_dist.training.eval_stats import wilson_interval

Figure = dict[str, Any]
"""``topic, title, hint, data, layout``; the last two are plotly's."""

Measured = tuple[EvaluationRow, tuple[float, float, float]]
"""A row with an episode that counts, its pass rate and the ends of its interval."""

COLORS: Final = (
    "#0072b2",
    "#d55e00",
    "#009e73",
    "#cc79a7",
    "#e69f00",
    "#56b4e9",
    "#444444",
    "#8c6d31",
)
"""Told apart by colour-blind readers, too. Source: Okabe and Ito (2008), all but the last."""
_MAX_BATCH: Final = 10**9
"""Trajectories; a file that says more of a batch is damaged."""
_MAX_MARKERS: Final = 60
"""Points of a curve up to which each is marked."""


def all_figures(runs: Sequence[RunData]) -> list[Figure]:
    """Every chart with data, by topic; further runs are dashed."""
    makers: list[tuple[Topic, Callable[[Sequence[RunData]], Figure | None]]] = [
        (Topic.OUTCOME, evaluation_figure),
        (Topic.OUTCOME, pass_rate_figure),
        *((chart.topic, lambda runs, chart=chart: chart_figure(chart, runs)) for chart in CHARTS),
        (Topic.UPDATE, span_kind_figure),
        (Topic.TIME, phase_total_figure),
        (Topic.LOSSES, losses_figure),
    ]
    return [
        figure | {"topic": topic.value}
        for topic in Topic
        for of, make in makers
        if of is topic and (figure := make(runs)) is not None
    ]


def chart_figure(chart: Chart, runs: Sequence[RunData]) -> Figure | None:
    """Curves of a chart's fields; None without a single number."""
    make = _stacked if chart.is_stacked else _curves
    traces, gaps = [], []
    for position, run in enumerate(runs):
        for index, name in enumerate(chart.fields):
            points, curve = _points(run, name), _named(name, run, position)
            if bad := sum(y is None for _, y in points):
                gaps.append(f"{curve} in {bad} steps")
            made = make(curve, points, index, position)
            made[-1:] = [
                t | {"hovertemplate": _hover(METRICS[name].description)} for t in made[-1:]
            ]
            traces += made
    told = f" Gaps are values that are {NOT_A_NUMBER}: {', '.join(gaps)}." if gaps else ""
    return _figure(chart.title, chart.hint + told, chart.unit, traces)


def span_kind_figure(runs: Sequence[RunData]) -> Figure | None:
    """The loss of each kind of span."""
    name = "loss_by_span_type"
    traces = []
    for position, run in enumerate(runs):
        records = [(r["step"], r[name]) for r in run.metrics if isinstance(r.get(name), dict)]
        for index, kind in enumerate(sorted({kind for _, by_kind in records for kind in by_kind})):
            points = [(step, _value(of[kind])) for step, of in records if kind in of]
            traces += _curves(_named(kind, run, position), points, index, position)
    hint = "Which of the student's words the loss comes from."
    return _figure("Loss by kind of span", hint, "loss", traces)


def pass_rate_figure(runs: Sequence[RunData]) -> Figure | None:
    """Pass rate of the training batches with the interval of each, and the null policy's level."""
    traces = []
    for position, run in enumerate(runs):
        points = _points(run, "pass_rate")
        if not points:
            continue
        if not position:
            traces += _band(run)
        traces += _curves(_named("pass_rate", run, position), points, position, position)
        null = [pair for pair in _measured(run) if pair[0].policy == "null"]
        if null and not position:
            row, (rate, *_) = null[-1]
            level = [(points[0][0], rate), (points[-1][0], rate)]
            traces.append(_level(f"null policy, T = {row.tail_calls}", level, COLORS[6]))
    hint = (
        "Training episodes of each batch at its own horizon; the band is the 95 % interval of a "
        "batch of its size (episodes taken as independent)."
    )
    return _figure("Pass rate in training", hint, "fraction", traces)


def _band(run: RunData) -> list[dict[str, Any]]:
    """Lower and upper ends of the Wilson interval, the area between them filled."""
    ends = [
        (record["step"], wilson_interval(round(record["pass_rate"] * size), size))
        for record in run.metrics
        if is_number(rate := record.get("pass_rate"))
        and 0 <= rate <= 1
        and is_number(record.get("num_trajectories"))
        and 0 < (size := int(record["num_trajectories"])) < _MAX_BATCH
    ]
    traces = []
    for index in (0, 1):
        points = means([(step, interval[index]) for step, interval in ends], 200)
        trace = _xy(points) | {
            "type": "scatter",
            "mode": "lines",
            "line": {"width": 0},
            "hoverinfo": "skip",
            "showlegend": index == 1,
            "name": "95 % interval",
        }
        fill = {"fill": "tonexty", "fillcolor": "rgba(0,114,178,0.15)"} if index else {}
        traces.append(trace | fill)
    return traces if ends else []


def evaluation_figure(runs: Sequence[RunData]) -> Figure | None:
    """Student's pass rate over the run with its intervals; other policies as level lines."""
    traces = [
        trace for position, run in enumerate(runs) for trace in _evaluation_traces(run, position)
    ]
    hint = "Evaluation tasks, 95 % intervals; level lines are policies that do not train."
    return _figure("Evaluated pass rate", hint, "pass rate", traces)


def _evaluation_traces(run: RunData, position: int) -> Iterator[dict[str, Any]]:
    last = max([record["step"] for record in run.metrics], default=1)
    series: dict[tuple[str, str], list[Measured]] = {}
    for row, interval in _measured(run):
        series.setdefault((row.policy, str(row.tail_calls)), []).append((row, interval))
    for index, ((policy, tail_calls), rows) in enumerate(series.items()):
        name = _named(f"{policy}, T = {tail_calls}", run, position)
        if policy != "student":
            rate = rows[-1][1][0]
            level = [(0, rate), (last, rate)]
            yield _level(name, level, COLORS[index % len(COLORS)])
            continue
        placed = _placed(rows, last)
        points = [(step, rate) for step, (rate, _, _) in placed]
        [curve] = _curves(name, points, index, position)
        yield curve | {
            "error_y": {
                "type": "data",
                "array": [_rounded(high - rate) for _, (rate, _, high) in placed],
                "arrayminus": [_rounded(rate - low) for _, (rate, low, _) in placed],
                "thickness": 1,
            }
        }


def _placed(
    rows: Sequence[Measured], last_step: int
) -> list[tuple[int, tuple[float, float, float]]]:
    """Rates and intervals with the step a row's tag stands for; jobs of their own at the end."""
    placed = []
    for row, interval in rows:
        step = 0 if row.tag in ("before", "warm") else named_step(row.tag)
        placed.append((last_step if step is None else step, interval))
    return sorted(placed, key=lambda pair: pair[0])


def phase_total_figure(runs: Sequence[RunData]) -> Figure | None:
    """One bar per run: the seconds of each phase, summed over all steps."""
    traces = []
    for index, name in enumerate(PHASES):
        totals = [sum(y for _, y in _points(run, name) if y is not None) for run in runs]
        if any(totals):
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "x": [_rounded(total) for total in totals],
                    "y": [run.label for run in runs],
                    "marker": {"color": COLORS[index]},
                    "hovertemplate": _hover(METRICS[name].description, "x"),
                }
            )
    hint = "Summed over all steps: what to make faster first."
    figure = _figure("Time per phase, total", hint, "", traces)
    if figure is not None:
        figure["layout"] |= {"height": 170 + 40 * len(runs)}
        figure["layout"]["xaxis"] = {"title": {"text": "seconds"}, "automargin": True}
        figure["layout"]["yaxis"] = {"automargin": True, "autorange": "reversed"}
    return figure


def losses_figure(runs: Sequence[RunData]) -> Figure | None:
    """Drops, refusals, faults and alarms by their reason, from the events."""
    traces = []
    for position, run in enumerate(runs):
        steps = [record["step"] for record in run.metrics]
        steps += [step for counts in run.losses.values() for step in counts]
        for index, (kind, counts) in enumerate(sorted(run.losses.items())):
            points = sums(sorted(counts.items()), min(steps), max(steps))
            traces += _stacked(_named(kind, run, position), points, index, position)
    hint = "Counted from events.jsonl at the step in which each happened."
    figure = _figure("By reason", hint, "events", traces)
    if figure is not None:
        steps = [record["step"] for run in runs for record in run.metrics]
        steps += [x for trace in traces for x in trace["x"]]
        figure["layout"]["xaxis"]["range"] = [min(steps) - 0.5, max(steps) + 0.5]
    return figure


def _figure(title: str, hint: str, unit: str, traces: list[dict[str, Any]]) -> Figure | None:
    if not traces:
        return None
    values = [y for trace in traces for y in trace["y"] if is_number(y)]
    y_axis: dict[str, Any] = {
        "title": {"text": unit, "standoff": 8},
        "rangemode": "tozero",
        "exponentformat": "power",
    }
    if values and not any(values):
        y_axis["range"] = [0, 1]
    steps = {x for trace in traces for x in trace["x"]}
    x_axis: dict[str, Any] = {"title": {"text": "step"}}
    if len(steps) <= 1 or max(steps) - min(steps) < 8:
        x_axis["dtick"] = 1
    layout = {
        "height": 320,
        "margin": {"l": 70, "r": 15, "t": 10, "b": 45},
        "xaxis": x_axis,
        "yaxis": y_axis,
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 1.02,
            "yanchor": "bottom",
            "traceorder": "normal",
        },
        "showlegend": True,
        "barmode": "stack",
        "hovermode": "x unified" if len(traces) > 1 else "closest",
    }
    return {"title": title, "hint": hint, "data": traces, "layout": layout}


def _curves(
    name: str, points: Sequence[GapPoint], index: int, position: int
) -> list[dict[str, Any]]:
    """The curve last; before that of a long series its extremes, pale. None without a point."""
    color = COLORS[index % len(COLORS)]
    curve = {
        "name": name,
        "legendgroup": name,
        "type": "scatter",
        "mode": "lines+markers" if len(points) <= _MAX_MARKERS else "lines",
        "line": {"color": color, "dash": "dash" if position else "solid", "width": 2},
        "marker": {"size": 5},
    }
    if len(points) <= MAX_POINTS:
        return [curve | _xy(points)] if points else []
    pale = {
        "line": {"color": color, "width": 1},
        "opacity": 0.25,
        "hoverinfo": "skip",
        "showlegend": False,
    }
    line = mean_line(points, MAX_POINTS // 4)
    return [curve | pale | _xy(thinned(points)), curve | _xy(line)]


def _stacked(
    name: str, points: Sequence[GapPoint], index: int, position: int
) -> list[dict[str, Any]]:
    """Bars that stand on each other; of a further run points, which do not hide them."""
    if not points:
        return []
    color = COLORS[index % len(COLORS)]
    trace = {"name": name, "marker": {"color": color}} | _xy(mean_line(points, MAX_BARS))
    if position:
        return [trace | {"type": "scatter", "mode": "lines+markers", "line": {"dash": "dash"}}]
    return [trace | {"type": "bar"}]


def _level(name: str, points: Sequence[GapPoint], color: str) -> dict[str, Any]:
    line = {"color": color, "dash": "dot", "width": 1.5}
    return _xy(points) | {"name": name, "type": "scatter", "mode": "lines", "line": line}


def _xy(points: Sequence[GapPoint]) -> dict[str, list[float | None]]:
    return {"x": [_rounded(x, 6) for x, _ in points], "y": [_rounded(y) for _, y in points]}


def _rounded(value: float | None, digits: int = 5) -> float | None:
    """Few enough digits for a page of many numbers, more than a chart can show; None is a gap."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{digits}g}") if isfinite(value) else None


def _named(name: str, run: RunData, position: int) -> str:
    return f"{name} ({run.label})" if position else name


def _hover(description: str, axis: str = "y") -> str:
    return f"%{{{axis}:.4g}} · {description}"


def _points(run: RunData, name: str) -> list[GapPoint]:
    """The steps that measured it; none where no step found a number."""
    found = [(r["step"], _value(r[name])) for r in run.metrics if name in r]
    return found if any(y is not None for _, y in found) else []


def _value(value: object) -> float | None:
    return value if is_number(value) else None


def _measured(run: RunData) -> list[Measured]:
    rows = () if run.evaluation is None else run.evaluation.rows
    return [(row, found) for row in rows if (found := row.pass_interval) is not None]
