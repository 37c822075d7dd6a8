from __future__ import annotations

import plotly.graph_objects as go
import pytest

from miniverl_dist.observability.metrics import METRICS
from miniverl_dist.reporting.charts import CHARTS, Chart, chart_figures, evaluation_figure
from miniverl_dist.reporting.run_data import RunData
from tests.support.sample_run import report, row


def test_charts_show_declared_fields_only() -> None:
    for chart in CHARTS:
        assert set(chart.fields) <= set(METRICS), chart.title


def test_points_that_were_not_measured_are_left_out() -> None:
    run = RunData(
        label="a",
        metrics=[
            {"step": 1, "entropy_mean": 2.0},
            {"step": 2, "entropy_mean": None},
            {"step": 3, "entropy_mean": 1.0},
        ],
    )
    figures, empty = chart_figures([run])
    assert [figure["title"] for figure in figures] == ["Entropy"]
    assert figures[0]["data"][0]["x"] == [1, 3]
    assert figures[0]["data"][0]["y"] == [2.0, 1.0]
    assert len(empty) == len(CHARTS) - 1


def test_a_compared_run_is_dashed_and_named() -> None:
    runs = [RunData(label=name, metrics=[{"step": 1, "pass_rate": 0.5}]) for name in ("a", "b")]
    first, second = chart_figures(runs)[0][0]["data"]
    assert (first["name"], first["line"]["dash"]) == ("pass_rate", "solid")
    assert (second["name"], second["line"]["dash"]) == ("pass_rate (b)", "dash")


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


@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: chart.title)
def test_plotly_knows_every_property_of_a_figure(chart: Chart) -> None:
    runs = [
        RunData(
            label=name,
            metrics=[{"step": step} | dict.fromkeys(chart.fields, 0.5) for step in (1, 2)],
            evaluation=report(row("null", "before", 0.0), row("student", "after", 0.5)),
        )
        for name in ("a", "b")
    ]
    figures, _ = chart_figures(runs)
    evaluated = evaluation_figure(runs)
    assert evaluated is not None
    for figure in (*figures, evaluated):
        go.Figure({"data": figure["data"], "layout": figure["layout"]})
    with pytest.raises(ValueError, match="Invalid property"):
        go.Figure({"layout": {"hight": 3}})
