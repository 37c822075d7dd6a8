"""report.html: one file that needs no network and runs nothing that a model wrote."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import groupby
from typing import Any, Final

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from miniverl_dist.observability.environment import without_paths
from miniverl_dist.reporting.episode_text import Turn, call_lines, facts, shortened, turns
from miniverl_dist.reporting.eval_tables import evaluation_tables
from miniverl_dist.reporting.evaluation import caveats
from miniverl_dist.reporting.figures import all_figures
from miniverl_dist.reporting.run_compare import Table, comparison
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.reporting.series import MAX_POINTS
from miniverl_dist.reporting.summary import (
    EVENT_HEAD,
    identity,
    notable_events,
    title,
    total_rows,
    training_head,
    training_rows,
)
from miniverl_dist.reporting.token_view import TokenStrip, token_strips
from miniverl_dist.reporting.windows import is_number
from miniverl_dist.schemas.trajectory import Trajectory

_MAX_TURN_CHARS: Final = 4000
_MAX_TOKENS: Final = 20_000
"""Coloured tokens on a page; episodes beyond it are shown as plain text."""


@dataclass(frozen=True)
class RunSection:
    """What the page says about one run before the curves."""

    label: str
    identity: list[tuple[str, str]]
    caveats: list[str]
    notes: list[str]
    tables: list[Table]


@dataclass(frozen=True)
class PageTurn:
    """A message, and where its tokens are among the strips of the page (None: not analysed)."""

    author: str
    text: str
    strip: int | None


@dataclass(frozen=True)
class EpisodeSection:
    """One sample episode."""

    headline: str
    facts: list[tuple[str, str]]
    turns: list[PageTurn]
    calls: list[str]
    has_tokens: bool


def html_page(runs: Sequence[RunData]) -> str:
    """The page for one run, or for a run and those it is compared with."""
    figures = all_figures(runs)
    strips: list[TokenStrip] = []
    episodes = [_episode(runs[0], sample, strips) for sample in runs[0].samples]
    numbered = list(enumerate(figures))
    template = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    ).from_string(_resource("report.html.j2"))
    return template.render(
        title=title(runs[0]),
        runs=[_section(run) for run in runs],
        comparison=comparison(runs),
        topics=[
            (topic, list(group))
            for topic, group in groupby(numbered, key=lambda pair: pair[1]["topic"])
        ],
        max_points=MAX_POINTS if any(len(run.metrics) > MAX_POINTS for run in runs) else None,
        data_json=_script_json({"figures": figures, "strips": strips, "limit": _limit(runs[0])}),
        episodes=episodes,
        style=Markup(_resource("report.css")),
        script=Markup(_resource("report.js")),
        plotly_js=_plotly_js() if figures else "",
    )


def _section(run: RunData) -> RunSection:
    evaluated = [] if run.evaluation is None else evaluation_tables(run.evaluation)
    tables = (
        *(Table(table.title, table.head, table.rows) for table in evaluated),
        Table("Training", training_head(run), training_rows(run)),
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


def _episode(run: RunData, trajectory: Trajectory, strips: list[TokenStrip]) -> EpisodeSection:
    """The section of an episode; the tokens of its turns are added to ``strips``."""
    verdict = "passed" if trajectory.passed else "failed"
    places = _place_strips(run, trajectory, strips)
    return EpisodeSection(
        headline=(
            f"{trajectory.task_id}, T = {trajectory.tail_calls}, {verdict}, "
            f"reward {trajectory.reward:.2f}, {len(trajectory.tool_calls)} calls, "
            f"{trajectory.termination.value}"
        ),
        facts=facts(trajectory),
        turns=[
            PageTurn(turn.author, turn.text, places.get(index))
            for index, turn in enumerate(_shown_turns(trajectory))
        ],
        calls=[shortened(line, _MAX_TURN_CHARS) for line in call_lines(trajectory)],
        has_tokens=bool(places),
    )


def _shown_turns(trajectory: Trajectory) -> list[Turn]:
    return turns(trajectory, max_chars=_MAX_TURN_CHARS)


def _place_strips(run: RunData, trajectory: Trajectory, strips: list[TokenStrip]) -> dict[int, int]:
    """Index of each analysed message -> place of its tokens in ``strips``."""
    analysis = run.analyses.get(trajectory.trajectory_id)
    shown = sum(len(strip["text"]) for strip in strips)
    if analysis is None or shown + len(analysis.positions) > _MAX_TOKENS:
        return {}
    places = {}
    for message, strip in token_strips(trajectory, analysis, run.texts).items():
        places[message] = len(strips)
        strips.append(strip)
    return places


def _limit(run: RunData) -> float:
    """Nats at which the colours of a difference are full: where the weights are clipped."""
    opd = run.config.get("opd")
    clip = opd.get("clip") if isinstance(opd, Mapping) else None
    return float(clip) if is_number(clip) and clip > 0 else 3.0


def _script_json(value: dict[str, Any]) -> Markup:
    """JSON that cannot end the script element it stands in."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def _resource(name: str) -> str:
    return files("miniverl_dist.reporting").joinpath(name).read_text("utf-8")


def _plotly_js() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())
