from __future__ import annotations

import json
from collections import Counter

import plotly.graph_objects as go
import pytest

from miniverl_dist.observability.metrics import METRICS
from miniverl_dist.reporting.charts import CHARTS, Chart
from miniverl_dist.reporting.figures import (
    all_figures,
    chart_figure,
    evaluation_figure,
    losses_figure,
    pass_rate_figure,
    phase_total_figure,
    span_kind_figure,
)
from miniverl_dist.reporting.run_data import RunData
from tests.support.sample_run import report, row


def full_run(name: str = "a", num_steps: int = 3) -> RunData:
    """Every declared field at every step, losses, evaluations."""
    numbers = {name for name, metric in METRICS.items() if not metric.is_by_key}
    return RunData(
        label=name,
        metrics=[
            dict.fromkeys(numbers, 0.5)
            | {"step": step, "num_trajectories": 8, "loss_by_span_type": {"assistant_text": 0.1}}
            for step in range(1, num_steps + 1)
        ],
        losses={"group dropped: old": Counter({2: 3})},
        evaluation=report(row("null", "before", 0.0), row("student", "after", 0.5)),
    )


def test_charts_show_declared_fields_only() -> None:
    for chart in CHARTS:
        assert set(chart.fields) <= set(METRICS), chart.title


def test_steps_that_did_not_measure_it_are_left_out_and_what_is_no_number_is_a_gap() -> None:
    run = RunData(
        label="a",
        metrics=[
            {"step": 1, "entropy_mean": 2.0, "grad_norm": None},
            {"step": 2, "entropy_mean": None},
            {"step": 3},
            {"step": 4, "entropy_mean": 1.0},
        ],
    )
    figures = all_figures([run])
    assert [figure["title"] for figure in figures] == ["Entropy"]
    assert figures[0]["data"][0]["x"] == [1, 2, 4]
    assert figures[0]["data"][0]["y"] == [2.0, None, 1.0]
    assert figures[0]["hint"].endswith(
        "Gaps are values that are not a number: entropy_mean in 1 steps."
    )


def test_a_long_run_that_diverged_does_not_look_flat() -> None:
    metrics = [{"step": s, "loss": 1.0 if s <= 5000 else None} for s in range(1, 10_001)]
    [figure] = all_figures([RunData(label="a", metrics=metrics)])
    for trace in figure["data"]:
        assert len(trace["x"]) <= 400
        halves = [
            [y for x, y in zip(trace["x"], trace["y"], strict=True) if (x > 5000) is late]
            for late in (False, True)
        ]
        assert set(halves[0]) == {1.0}
        assert set(halves[1]) == {None}


@pytest.mark.parametrize("rate", [5.0, -1.0])
def test_a_batch_that_cannot_be_has_no_interval(rate: float) -> None:
    metrics = [{"step": 1, "pass_rate": rate, "num_trajectories": 8}]
    metrics += [{"step": 2, "pass_rate": 0.5, "num_trajectories": 10**18}]
    figure = pass_rate_figure([RunData(label="a", metrics=metrics)])
    assert figure is not None
    assert [trace["name"] for trace in figure["data"]] == ["pass_rate"]


def test_sums_beyond_what_a_float_holds_are_gaps() -> None:
    metrics = [{"step": step, "seconds_take": 1.7e308} for step in range(1, 601)]
    for figure in all_figures([RunData(label="a", metrics=metrics)]):
        json.dumps(figure, allow_nan=False)


def test_a_full_run_has_every_chart_grouped_by_topic() -> None:
    figures = all_figures([full_run()])
    assert len(figures) == len(CHARTS) + 5
    topics = [figure["topic"] for figure in figures]
    assert topics == sorted(topics, key=list(dict.fromkeys(topics)).index)
    assert len(set(topics)) == 5
    assert all_figures([RunData(label="a")]) == []


def test_a_compared_run_is_dashed_and_named() -> None:
    runs = [RunData(label=name, metrics=[{"step": 1, "grad_norm": 0.5}]) for name in ("a", "b")]
    first, second = all_figures(runs)[0]["data"]
    assert (first["name"], first["line"]["dash"]) == ("grad_norm", "solid")
    assert (second["name"], second["line"]["dash"]) == ("grad_norm (b)", "dash")


def test_every_chart_shows_both_runs_of_a_comparison() -> None:
    for figure in all_figures([full_run("a"), full_run("b")]):
        labels = [trace["name"] for trace in figure["data"]]
        bars = [label for trace in figure["data"] for label in trace["y"]]
        assert any("(b)" in label for label in labels) or "b" in bars, figure["title"]


def test_evaluations_stand_where_they_were_made_with_their_intervals() -> None:
    run = RunData(
        label="a",
        metrics=[{"step": step} for step in (1, 2, 3)],
        evaluation=report(
            row("null", "before", 0.05),
            row("student", "after", 0.7),
            row("student", "warm", 0.3),
            row("student", "step-000002", 0.5),
        ),
    )
    figure = evaluation_figure([run])
    assert figure is not None
    null, student = figure["data"]
    assert (null["x"], null["y"], null["line"]["dash"]) == ([0, 3], [0.05, 0.05], "dot")
    assert (student["x"], student["y"]) == ([0, 2, 3], [0.3, 0.5, 0.7])
    assert [round(value, 3) for value in student["error_y"]["array"]] == [0.1, 0.1, 0.1]
    assert evaluation_figure([RunData(label="b")]) is None


def test_the_training_pass_rate_has_its_interval_and_the_null_line() -> None:
    figure = pass_rate_figure([full_run()])
    assert figure is not None
    low, high, rate, null = figure["data"]
    assert rate["y"] == [0.5, 0.5, 0.5]
    assert low["y"][0] == pytest.approx(0.2152, abs=1e-3)  # Wilson, 4 of 8
    assert high["y"][0] == pytest.approx(0.7848, abs=1e-3)
    assert high["fill"] == "tonexty"
    assert (null["name"], null["y"]) == ("null policy, T = 1", [0.0, 0.0])


def test_phases_add_up_to_one_bar_per_run() -> None:
    figure = phase_total_figure([full_run("a", 3), full_run("b", 4)])
    assert figure is not None
    assert [trace["x"] for trace in figure["data"]] == [[1.5, 2.0]] * 5
    assert figure["data"][0]["y"] == ["a", "b"]


def test_losses_stand_at_their_step_on_the_axis_of_the_whole_run() -> None:
    figure = losses_figure([full_run()])
    assert figure is not None
    assert (figure["data"][0]["x"], figure["data"][0]["y"]) == ([2], [3])
    assert figure["layout"]["xaxis"]["range"] == [0.5, 3.5]


def test_the_loss_of_each_kind_of_span() -> None:
    run = RunData(
        label="a",
        metrics=[
            {"step": 1, "loss_by_span_type": {"b": 1.0}},
            {"step": 2, "loss_by_span_type": {"a": 2.0, "b": 3.0}},
            {"step": 3, "loss_by_span_type": None},
        ],
    )
    figure = span_kind_figure([run])
    assert figure is not None
    assert [(t["name"], t["x"], t["y"]) for t in figure["data"]] == [
        ("a", [2], [2.0]),
        ("b", [1, 2], [1.0, 3.0]),
    ]


def test_a_flat_zero_line_does_not_blow_up_its_axis() -> None:
    run = RunData(label="a", metrics=[{"step": 1, "policy_lag_max": 0}])
    [figure] = all_figures([run])
    assert figure["layout"]["yaxis"]["range"] == [0, 1]


def test_long_runs_are_thinned() -> None:
    for figure in all_figures([full_run(num_steps=3000)]):
        for trace in figure["data"]:
            assert len(trace["x"]) <= 400, figure["title"]


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_no_field_of_a_chart_is_missing_from_it(chart: Chart) -> None:
    figure = chart_figure(chart, [full_run()])
    assert figure is not None
    assert [trace["name"] for trace in figure["data"]] == list(chart.fields)


def test_plotly_knows_every_property_of_a_figure() -> None:
    for figure in all_figures([full_run("a"), full_run("b", 300)]):
        go.Figure({"data": figure["data"], "layout": figure["layout"]})
    with pytest.raises(ValueError, match="Invalid property"):
        go.Figure({"layout": {"hight": 3}})
