"""Everything a report needs from a run directory, as far as it is there and readable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import isfinite
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from miniverl_dist.config.problems import explain_in_line
from miniverl_dist.config.yaml_text import parse_yaml
from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.metrics import NOT_A_NUMBER, step_problem
from miniverl_dist.observability.run_dir import (
    CONFIG_RESOLVED,
    EVALUATION,
    MANIFEST,
    RecordFile,
    RunDirectory,
    parse_json_line,
)
from miniverl_dist.reporting.evaluation_folder import evaluation_status, is_evaluation
from miniverl_dist.reporting.losses import LossCounts
from miniverl_dist.reporting.record_tail import num_lines
from miniverl_dist.reporting.samples import choose_samples, parse_trajectory
from miniverl_dist.reporting.token_text import TokenTexts, load_token_texts
from miniverl_dist.reporting.windows import LARGEST_INT
from miniverl_dist.schemas.evaluation import EvaluationReport
from miniverl_dist.schemas.token_analysis import TokenAnalysis
from miniverl_dist.schemas.trajectory import Trajectory

__all__ = ["RunData", "load_run_data", "parse_evaluation", "parse_trajectory"]

_FREQUENT_EVENTS: Final = tuple(
    f'"event":"{event.value}"'.encode() for event in (Event.GROUP_STARTED, Event.GROUP_FINISHED)
)
"""Several per step and of no use to a report: such lines are not even parsed."""
_EVENT_NAME_ENDS: Final = 120
"""Bytes of a line within which its event's name stands."""


@dataclass
class RunData:
    """A run as found; ``notes`` says what is missing, damaged or unfinished."""

    label: str
    manifest: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """One record per step, by step; a step that was done again counts once."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """In their order; those of single groups are left out."""
    losses: dict[str, Counter[int]] = field(default_factory=dict)
    """Drops, refusals, faults and alarms: kind -> step -> number."""
    evaluation: EvaluationReport | None = None
    samples: list[Trajectory] = field(default_factory=list)
    analyses: dict[str, TokenAnalysis] = field(default_factory=dict)
    """What was made of the tokens of samples, by trajectory id; not every sample has one."""
    texts: TokenTexts = field(default_factory=lambda: TokenTexts(None))
    """What the tokens of ``analyses`` spell."""
    notes: list[str] = field(default_factory=list)
    status: str = "unknown"
    """``running``, ``killed``, ``finished``, ``stopped`` or ``failed``."""
    is_evaluation: bool = False
    """The folder of an evaluation: nothing is trained in it, ``status`` is the evaluation's."""
    num_played: int = 0
    """Evaluation episodes that have ended; counted where ``is_evaluation``."""


def load_run_data(run_dir: Path, *, num_samples: int = 5) -> RunData:
    """Read a run, finished or not; damage becomes a note.

    Raises:
        ConfigError: ``run_dir`` is not a run directory.
    """
    run = RunDirectory.open(run_dir)
    data = RunData(label=run_dir.resolve().name)
    data.manifest = _read_object(run, MANIFEST, data.notes)
    data.is_evaluation = is_evaluation(data.manifest)
    data.config = _read_config(run, data.notes)
    if data.is_evaluation:
        data.num_played = num_lines(run.path / RecordFile.EVAL_TRAJECTORIES)
        if (run.path / RecordFile.EVENTS).exists():  # not before the first row
            _read_events(run, data)
        data.evaluation = _read_evaluation(run, data.notes)
    else:
        _read_training(run, data, num_samples)
    data.status = _status(run, data)
    return data


def _read_training(run: RunDirectory, data: RunData, num_samples: int) -> None:
    told = [
        record
        for record in _salvage(run, RecordFile.METRICS, data.notes)
        if isinstance(record.get("step"), int)
    ]
    by_step = {record["step"]: record for record in told}
    data.metrics = [by_step[step] for step in sorted(by_step)]
    data.notes += _step_notes([record["step"] for record in told])
    _read_events(run, data)
    data.evaluation = _read_evaluation(run, data.notes)
    data.samples, data.analyses = choose_samples(run, num_samples, data.notes)
    if data.analyses:
        fingerprint = data.samples[0].tokenizer_fingerprint
        data.texts = load_token_texts(run.path, data.config, fingerprint, data.notes)


def _step_notes(steps: Sequence[int]) -> Iterator[str]:
    """The first place where the steps do not run on by one."""
    problems = [p for pair in pairwise((0, *steps)) if (p := step_problem(*pair)) is not None]
    if problems:
        yield f"{RecordFile.METRICS}: {problems[0]} ({len(problems)} such places)"


def _status(run: RunDirectory, data: RunData) -> str:
    """The manifest's word, doubted where it says that somebody writes and nobody does."""
    told = data.manifest.get("status", "unknown")
    if data.is_evaluation:
        told = evaluation_status(data.manifest, has_rows=data.evaluation is not None)
    if told in ("created", "running"):
        return "running" if run.is_being_written else "killed"
    return str(told)


def _read_object(run: RunDirectory, name: str, notes: list[str]) -> dict[str, Any]:
    if not (run.path / name).exists():
        notes.append(f"{name} is missing")
        return {}
    try:
        return finite(run.read_json(name))
    except RecordError as error:
        notes.append(_in_run(run, error))
        return {}


def _read_config(run: RunDirectory, notes: list[str]) -> dict[str, Any]:
    if not (run.path / CONFIG_RESOLVED).exists():
        notes.append(f"{CONFIG_RESOLVED} is missing")
        return {}
    try:
        data = parse_yaml(run.read_bytes(CONFIG_RESOLVED), CONFIG_RESOLVED).data
    except (ConfigError, RecordError) as error:
        notes.append(_in_run(run, error))
        return {}
    return finite(data) if isinstance(data, dict) else {}


def _read_evaluation(run: RunDirectory, notes: list[str]) -> EvaluationReport | None:
    if not (run.path / EVALUATION).exists():
        notes.append(f"{EVALUATION} is missing: nothing has been evaluated yet")
        return None
    try:
        return parse_evaluation(run.read_bytes(EVALUATION), EVALUATION)
    except RecordError as error:
        notes.append(_in_run(run, error))
        return None


def parse_evaluation(raw: bytes, where: str) -> EvaluationReport:
    """An evaluation file. Raises ``RecordError`` naming file and field."""
    try:
        report = EvaluationReport.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise RecordError(f"{where}: {explain_in_line(error, EvaluationReport)}") from None
    for row in report.rows:
        bad = [name for name, value in row if isinstance(value, float) and not isfinite(value)]
        if bad:
            raise RecordError(
                f"{where}: {bad[0]} of the row {row.policy} ({row.tag}) is {NOT_A_NUMBER}: restore "
                "the file, or remove it and evaluate again"
            )
    return report


def _read_events(run: RunDirectory, data: RunData) -> None:
    losses = LossCounts()
    for event in _salvage(run, RecordFile.EVENTS, data.notes, _FREQUENT_EVENTS):
        data.events.append(event)
        losses.add(event)
    data.losses = losses.by_kind


def _salvage(
    run: RunDirectory, name: RecordFile, notes: list[str], skipped: tuple[bytes, ...] = ()
) -> Iterator[dict[str, Any]]:
    """The readable records of a file; one note tells the first bad line and how many there are.

    Lines with one of ``skipped`` near their start are passed over unread.
    """
    path = run.path / name
    if not path.exists():
        notes.append(f"{name} is missing")
        return
    bad: list[int] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            start = line[:_EVENT_NAME_ENDS]
            if any(text in start for text in skipped):
                continue
            try:
                yield finite(parse_json_line(line, str(path)))
            except (RecordError, RecursionError):
                bad.append(number)
    if bad:
        notes.append(f"{name}: {len(bad)} unreadable line(s) left out, the first is line {bad[0]}")


def finite(record: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with None for numbers that JSON, or a float, cannot hold."""
    return {key: _finite(item) for key, item in record.items()}


def _finite(value: Any) -> Any:  # noqa: ANN401 - any JSON value
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, dict):
        return finite(value)
    if isinstance(value, list):
        return [_finite(item) for item in value]
    if isinstance(value, int):
        return value if abs(value) <= LARGEST_INT else None
    return value


def _in_run(run: RunDirectory, error: Exception) -> str:
    """The message with paths relative to the run: notes go into files that leave the machine."""
    return str(error).replace(f"{run.path}/", "")
