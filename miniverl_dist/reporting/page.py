"""report.html: one file that needs no network and runs nothing that a model wrote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from miniverl_dist.observability.environment import without_paths
from miniverl_dist.reporting.charts import chart_figures, evaluation_figure
from miniverl_dist.reporting.episode_text import Turn, call_lines, facts, shortened, turns
from miniverl_dist.reporting.evaluation import TABLE_HEAD, caveats, table_rows
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.reporting.summary import (
    EVENT_HEAD,
    TRAINING_HEAD,
    identity,
    notable_events,
    title,
    total_rows,
    training_rows,
)
from miniverl_dist.schemas.trajectory import Trajectory

_MAX_TURN_CHARS = 4000


@dataclass(frozen=True)
class Table:
    """One table of the page."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class RunSection:
    """What the page says about one run before the curves."""

    label: str
    identity: list[tuple[str, str]]
    caveats: list[str]
    notes: list[str]
    tables: list[Table]


@dataclass(frozen=True)
class EpisodeSection:
    """One sample episode."""

    headline: str
    facts: list[tuple[str, str]]
    turns: list[Turn]
    calls: list[str]


def html_page(runs: Sequence[RunData]) -> str:
    """The page for one run, or for a run and those it is compared with."""
    figures, empty = chart_figures(runs)
    evaluated = evaluation_figure(runs)
    if evaluated is not None:
        figures.insert(0, evaluated)
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True
    ).from_string(files("miniverl_dist.reporting").joinpath("report.html.j2").read_text("utf-8"))
    return template.render(
        title=title(runs[0]),
        runs=[_section(run) for run in runs],
        figures=figures,
        figures_json=_script_json(figures),
        empty_charts=empty,
        episodes=[_episode(sample) for sample in runs[0].samples],
        plotly_js=_plotly_js() if figures else "",
    )


def _section(run: RunData) -> RunSection:
    evaluated = [] if run.evaluation is None else table_rows(run.evaluation)
    tables = (
        Table("Evaluation", TABLE_HEAD, evaluated),
        Table("Training", TRAINING_HEAD, training_rows(run)),
        Table("Totals", ("Field", "Sum over all steps"), total_rows(run)),
        Table("Notable events", EVENT_HEAD, notable_events(run)),
    )
    return RunSection(
        label=run.label,
        identity=identity(run),
        caveats=caveats(run),
        notes=[without_paths(note) for note in run.notes],
        tables=[table for table in tables if table.rows],
    )


def _episode(trajectory: Trajectory) -> EpisodeSection:
    verdict = "passed" if trajectory.passed else "failed"
    return EpisodeSection(
        headline=(
            f"{trajectory.task_id}, {verdict}, reward {trajectory.reward:.2f}, "
            f"{len(trajectory.tool_calls)} calls, {trajectory.termination.value}"
        ),
        facts=facts(trajectory),
        turns=turns(trajectory, max_chars=_MAX_TURN_CHARS),
        calls=[shortened(line, _MAX_TURN_CHARS) for line in call_lines(trajectory)],
    )


def _script_json(value: list[dict[str, Any]]) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _plotly_js() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())
