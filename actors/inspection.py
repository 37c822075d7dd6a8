"""`miniverl-dist inspect`: a run's state, one of its steps, or one of its episodes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from miniverl_dist.errors import ConfigError, MiniverlError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.metrics import METRICS, NOT_A_NUMBER
from miniverl_dist.observability.progress import step_line
from miniverl_dist.observability.run_dir import CHECKPOINTS, RecordFile, RunDirectory
from miniverl_dist.reporting.episode_text import episode_text
from miniverl_dist.reporting.eval_notes import report_notes
from miniverl_dist.reporting.eval_tables import evaluation_tables
from miniverl_dist.reporting.run_data import RunData, load_run_data, parse_trajectory
from miniverl_dist.reporting.summary import identity, notable_events, title
from miniverl_dist.schemas.evaluation import EvaluationReport
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.training import checkpoint

_EPISODE_FILES = (RecordFile.TRAJECTORIES, RecordFile.EVAL_TRAJECTORIES)


@dataclass(frozen=True)
class View:
    """One answer in two forms."""

    text: str
    data: Any
    """JSON value."""


def run_view(run_dir: Path) -> View:
    """State of a run: how far it is, its commits, its last step, its evaluations."""
    run = load_run_data(run_dir, num_samples=0)
    commits = list(_checkpoints(run_dir))
    evaluation = run.evaluation
    lines = [title(run), *(f"{label:<15}{text}" for label, text in identity(run))]
    if not run.is_evaluation:
        lines.append(f"{'Checkpoints':<15}{', '.join(c['name'] for c in commits) or 'none'}")
    if run.metrics:
        lines.append(f"{'Last':<15}{step_line(run.metrics[-1])}")
    if evaluation is not None:
        lines += evaluation_text(evaluation)
    lines += [f"{name}: {details}" for name, details in notable_events(run)]
    lines += [f"note: {note}" for note in run.notes]
    data = {
        "status": run.status,
        "is_evaluation": run.is_evaluation,
        "manifest": run.manifest,
        "checkpoints": commits,
        "last_step": run.metrics[-1] if run.metrics else None,
        "evaluation": None if evaluation is None else evaluation.model_dump(mode="json"),
        "notes": run.notes,
    }
    return View("\n".join(lines), data)


def step_view(run_dir: Path, step: int) -> View:
    """Every metric and event of one step.

    Raises:
        ConfigError: the run has no such step.
    """
    run = load_run_data(run_dir, num_samples=0)
    record = next((record for record in run.metrics if record["step"] == step), None)
    if record is None:
        raise ConfigError(f"{run_dir}: no step {step} in metrics.jsonl; it has {_span(run)}")
    events = [
        event
        for event in run.events
        if event.get("step") == step and event.get("event") != Event.WARMUP_STEP
    ]
    lines = aligned([(name, _shown(value), _unit(name)) for name, value in record.items()])
    lines += [json.dumps(event, ensure_ascii=False) for event in events]
    return View("\n".join(lines), {"metrics": record, "events": events})


def trajectory_view(run_dir: Path, trajectory_id: str) -> View:
    """Every episode with that id, from training and evaluation.

    Raises:
        ConfigError: the run has no such episode.
        RecordError: its line is damaged.
    """
    run = RunDirectory.open(run_dir)
    found = [hit for name in _EPISODE_FILES for hit in _episodes(run.path / name, trajectory_id)]
    if not found:
        known = ", ".join(sample.trajectory_id for sample in load_run_data(run_dir).samples)
        raise ConfigError(
            f"{run_dir}: no trajectory {trajectory_id!r}"
            + (f"; some it has: {known}" if known else "")
        )
    texts = [f"=== {where} ===\n{episode_text(episode)}" for where, episode in found]
    return View("\n\n".join(texts), [episode.model_dump(mode="json") for _, episode in found])


def evaluation_text(report: EvaluationReport) -> list[str]:
    """All tables of an evaluation as lines, a title before each, and what is to be known first.

    The settings come before what was found: in a terminal, what is said first scrolls away.
    """
    tables = sorted(evaluation_tables(report), key=lambda table: not table.is_setting)
    return [
        *(f"note: {note}" for note in report_notes(report)),
        *(
            line
            for table in tables
            for line in ("", table.title, *aligned([table.head, *table.rows]))
        ),
    ]


def aligned(rows: list[tuple[str, ...]]) -> list[str]:
    """Cells in columns of equal width."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def _episodes(path: Path, trajectory_id: str) -> Iterator[tuple[str, Trajectory]]:
    if not path.exists():
        return
    needle = json.dumps(trajectory_id, ensure_ascii=False).encode()
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if needle in line:  # reading every line as JSON would take minutes on a long run
                episode = parse_trajectory(line, f"{path}, line {number}")
                if episode.trajectory_id == trajectory_id:
                    yield f"{path.name}, line {number}{_occasion(line)}", episode


def _occasion(line: bytes) -> str:
    """Who played an evaluation episode, and when; empty for a training episode."""
    record = json.loads(line)
    return f" ({record['policy']}, {record['tag']})" if "policy" in record else ""


def _checkpoints(run_dir: Path) -> Iterator[dict[str, Any]]:
    for folder in sorted((run_dir / CHECKPOINTS).glob("[!.]*")):
        try:
            state = checkpoint.read_manifest(folder).state
        except MiniverlError as error:
            yield {"name": folder.name, "problem": str(error)}
        else:
            yield {
                "name": folder.name,
                "step": state.step,
                "policy_version": state.policy_version,
                "counters": state.counters,
            }


def _span(run: RunData) -> str:
    if not run.metrics:
        return "none"
    return f"steps {run.metrics[0]['step']} to {run.metrics[-1]['step']}"


def _unit(name: str) -> str:
    return METRICS[name].unit_text if name in METRICS else ""


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(item)}" for key, item in value.items())
    if isinstance(value, float):
        return f"{value:.6g}"
    return NOT_A_NUMBER if value is None else str(value)
