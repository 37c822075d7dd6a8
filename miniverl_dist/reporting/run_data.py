"""Everything a report needs from a run directory, as far as it is there and readable."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from miniverl_dist.config.problems import explain_in_line
from miniverl_dist.config.yaml_text import parse_yaml
from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.observability.run_dir import (
    CONFIG_RESOLVED,
    EVALUATION,
    MANIFEST,
    RecordFile,
    RunDirectory,
    parse_json_line,
)
from miniverl_dist.ports import ScoredTrajectory
from miniverl_dist.schemas.evaluation import EvaluationReport
from miniverl_dist.schemas.trajectory import Trajectory

_CANDIDATES = 12
"""Newest trajectories that samples are chosen from."""


@dataclass
class RunData:
    """A run as found; ``notes`` says what is missing, damaged or unfinished."""

    label: str
    manifest: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """One record per step, by step; a step that was done again counts once."""
    events: list[dict[str, Any]] = field(default_factory=list)
    evaluation: EvaluationReport | None = None
    samples: list[Trajectory] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    status: str = "unknown"
    """``running``, ``killed``, ``finished``, ``stopped``, ``failed`` or ``evaluation``."""


def load_run_data(run_dir: Path, *, num_samples: int = 5) -> RunData:
    """Read a run, finished or not; damage becomes a note.

    Raises:
        ConfigError: ``run_dir`` is not a run directory.
    """
    run = RunDirectory.open(run_dir)
    data = RunData(label=run_dir.resolve().name)
    data.manifest = _read_object(run, MANIFEST, data.notes)
    data.config = _read_config(run, data.notes)
    by_step = {
        record["step"]: record
        for record in _salvage(run, RecordFile.METRICS, data.notes)
        if isinstance(record.get("step"), int)
    }
    data.metrics = [by_step[step] for step in sorted(by_step)]
    data.events = list(_salvage(run, RecordFile.EVENTS, data.notes))
    data.evaluation = _read_evaluation(run, data.notes)
    data.samples = _sample(run, num_samples, data.notes)
    data.status = str(data.manifest.get("status", "unknown"))
    if data.status in ("created", "running"):
        data.status = "running" if run.is_being_written else "killed"
    return data


def _read_object(run: RunDirectory, name: str, notes: list[str]) -> dict[str, Any]:
    if not (run.path / name).exists():
        notes.append(f"{name} is missing")
        return {}
    try:
        return run.read_json(name)
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
    return data if isinstance(data, dict) else {}


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
        return EvaluationReport.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise RecordError(f"{where}: {explain_in_line(error, EvaluationReport)}") from None


def parse_trajectory(raw: bytes, where: str) -> Trajectory:
    """One line of a trajectory file, its mask derived from its spans again.

    A line is a trajectory, or holds one under ``trajectory`` beside the teacher's score (training)
    or the policy's name (evaluation).

    Raises:
        RecordError: naming the place, the field, what was found and expected.
    """
    record = parse_json_line(raw, where)
    model: type[ScoredTrajectory | Trajectory] = Trajectory
    if "trajectory" in record and "teacher" in record:
        model = ScoredTrajectory
    elif "trajectory" in record:
        raw = json.dumps(record["trajectory"]).encode()
    try:
        parsed = model.model_validate_json(raw, strict=True)
    except ValidationError as error:
        raise RecordError(f"{where}: {explain_in_line(error, model)}") from None
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None
    return parsed.trajectory if isinstance(parsed, ScoredTrajectory) else parsed


def _salvage(run: RunDirectory, name: RecordFile, notes: list[str]) -> Iterator[dict[str, Any]]:
    """The readable records of a file; one note tells the first bad line and how many there are."""
    path = run.path / name
    if not path.exists():
        notes.append(f"{name} is missing")
        return
    bad: list[int] = []
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield parse_json_line(line, str(path))
            except RecordError:
                bad.append(number)
    if bad:
        notes.append(f"{name}: {len(bad)} unreadable line(s) left out, the first is line {bad[0]}")


def _sample(run: RunDirectory, num_samples: int, notes: list[str]) -> list[Trajectory]:
    """A few episodes: the first one, then the newest, passed and failed in turn."""
    path = run.path / RecordFile.TRAJECTORIES
    if not path.exists():
        notes.append(f"{path.name} is missing")
        return []
    with path.open("rb") as file:
        offsets = [0]
        offsets.extend(offsets[-1] + len(line) for line in file)
        found = []
        wanted = sorted({0, *range(len(offsets) - 1)[-_CANDIDATES:]} & set(range(len(offsets) - 1)))
        for index in wanted:
            file.seek(offsets[index])
            line = file.read(offsets[index + 1] - offsets[index])
            try:
                found.append(parse_trajectory(line, f"{path.name}, line {index + 1}"))
            except RecordError as error:
                notes.append(str(error))
    return _varied(found, num_samples)


def _varied(found: list[Trajectory], count: int) -> list[Trajectory]:
    first, rest = found[:1], found[1:]
    passed = [trajectory for trajectory in reversed(rest) if trajectory.passed]
    failed = [trajectory for trajectory in reversed(rest) if not trajectory.passed]
    mixed = first
    while (passed or failed) and len(mixed) < count:
        mixed.extend(pool.pop(0) for pool in (passed, failed) if pool)
    return mixed[:count]


def _in_run(run: RunDirectory, error: Exception) -> str:
    """The message with paths relative to the run: notes go into files that leave the machine."""
    return str(error).replace(f"{run.path}/", "")
