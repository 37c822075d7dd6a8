"""`miniverl-dist watch`: a run as it is now, in a terminal.

Reads the ends of a run's files (an evaluation's episodes it counts) and nothing else: it writes
nothing and never touches the lock, not even to ask for it, since a run that starts at that very
moment would find it taken. A folder that is mounted from another machine is therefore read like any
other.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from miniverl_dist.config.yaml_text import parse_yaml
from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.run_dir import (
    CONFIG_RESOLVED,
    EVALUATION,
    MANIFEST,
    RecordFile,
    RunDirectory,
    parse_json_line,
)
from miniverl_dist.reporting.evaluation_folder import evaluation_status, is_evaluation
from miniverl_dist.reporting.record_tail import lines_from_end, num_lines

MAX_STEPS: Final = 60
"""Last steps that trends are drawn from."""
_MAX_EVENTS: Final = 400
_MAX_BYTES: Final = 1 << 20
"""Of a record file's end that are read for one frame."""
_SILENT_S: Final = 60.0
"""Least time without a written byte after which a run that calls itself running is doubted."""
_SILENT_STEPS: Final = 10
"""The same in lengths of its steps."""
_OVER: Final = frozenset({"finished", "stopped", "failed"})
_SAYINGS: Final[Mapping[str, str]] = {
    Event.RUN_STARTED: "running",
    Event.RESUMED: "running",
    Event.STEP_FINISHED: "running",
    Event.RUN_FINISHED: "finished",
    Event.STOPPED: "stopped",
    Event.RUN_FAILED: "failed",
}
"""What an event says about the run."""


@dataclass
class RunView:
    """What one look at a run directory found."""

    name: str
    status: str = "unknown"
    """The manifest's word (``created``, ``running``, ``finished``, ``stopped``, ``failed``),
    ``silent`` for a running one that has written nothing for long, or ``unknown``."""
    manifest: dict[str, Any] = field(default_factory=dict)
    is_evaluation: bool = False
    """The folder of an evaluation: nothing is trained in it, ``status`` is the evaluation's."""
    num_played: int = 0
    """Evaluation episodes that have ended; counted where ``is_evaluation``."""
    num_steps: int | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    """The last `MAX_STEPS` steps, oldest first."""
    events: list[dict[str, Any]] = field(default_factory=list)
    """The last ones, oldest first, those of single groups left out."""
    evaluation: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Damaged files, each named."""
    age_s: float | None = None
    """Since the last byte was written."""
    seconds_per_step: float | None = None
    eta_s: float | None = None

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come unless somebody resumes the run."""
        return self.status in _OVER

    @property
    def step(self) -> int:
        """Trained batches so far."""
        return int(self.metrics[-1]["step"]) if self.metrics else 0


def look(run_dir: Path, *, now: Callable[[], float] = time.time) -> RunView:
    """Read a run as it is; damage becomes a line of ``problems``.

    Raises:
        ConfigError: ``run_dir`` is not a run directory.
    """
    path = RunDirectory.open(run_dir).path
    view = RunView(run_dir.resolve().name)
    view.manifest = _object(path / MANIFEST, view.problems)
    view.is_evaluation = is_evaluation(view.manifest)
    if view.is_evaluation:
        view.num_played = num_lines(path / RecordFile.EVAL_TRAJECTORIES)
    else:
        view.num_steps = _num_steps(path / CONFIG_RESOLVED, view.problems)
    cut_off: list[str] = []
    found = _records(path / RecordFile.METRICS, MAX_STEPS, view.problems, cut_off, _is_metric)
    by_step = {record["step"]: record for record in found}
    view.metrics = [by_step[step] for step in sorted(by_step)]
    view.events = _records(path / RecordFile.EVENTS, _MAX_EVENTS, view.problems, cut_off, _is_event)
    rows = _object(path / EVALUATION, view.problems).get("rows")
    view.evaluation = (
        [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    )
    view.age_s = _age(path, now())
    view.seconds_per_step = _seconds_per_step(view)
    view.status = _status(view)
    if view.status != "running":  # nobody is in the middle of writing it
        view.problems += [f"{name}: the last line is cut off" for name in cut_off]
    left = None if view.num_steps is None else view.num_steps - view.step
    if left is not None and view.seconds_per_step is not None and not view.is_over:
        view.eta_s = max(0, left) * view.seconds_per_step
    return view


def follow(
    run_dir: Path,
    show: Callable[[RunView], None],
    *,
    interval_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Look and show again and again until the run is over.

    Raises:
        ConfigError: ``run_dir`` is not, or is no longer, a run directory.
    """
    while True:
        view = look(run_dir)
        show(view)
        if view.is_over:
            return
        sleep(interval_s)


def _status(view: RunView) -> str:
    """The manifest's word, or without it the last such event; doubted after a long silence."""
    status = view.manifest.get("status")
    if view.is_evaluation:
        status = evaluation_status(view.manifest, has_rows=bool(view.evaluation))
    for event in reversed(view.events) if status is None else ():
        status = _SAYINGS.get(str(event.get("event")))
        if status is not None:
            break
    limit = max(_SILENT_S, _SILENT_STEPS * (view.seconds_per_step or 0.0))
    if status == "running" and view.age_s is not None and view.age_s > limit:
        return "silent"
    return "unknown" if status is None else str(status)


def _seconds_per_step(view: RunView) -> float | None:
    """Median wall-clock seconds from step to step, evaluations and commits included in the gaps."""
    times = [
        event["time_s"]
        for event in view.events
        if event.get("event") == Event.STEP_FINISHED and _is_number(event.get("time_s"))
    ]
    gaps = [b - a for a, b in pairwise(times) if b > a]
    if not gaps:
        gaps = [r["seconds_step"] for r in view.metrics if _is_number(r.get("seconds_step"))]
    return statistics.median(gaps) if gaps else None


def _object(path: Path, problems: list[str]) -> dict[str, Any]:
    """A JSON object; empty where the file is missing, or damaged, which is told."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        problems.append(f"{path.name} is damaged: {error}")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} is damaged: expected an object, found {type(value).__name__}")
        return {}
    return value


def _num_steps(path: Path, problems: list[str]) -> int | None:
    if not path.exists():
        return None
    try:
        config = parse_yaml(path.read_bytes(), path.name).data
    except (ConfigError, OSError) as error:
        problems.append(f"{path.name} is damaged: {error}")
        return None
    loop = config.get("loop") if isinstance(config, dict) else None
    found = loop.get("num_steps") if isinstance(loop, dict) else None
    return found if isinstance(found, int) else None


def _records(
    path: Path,
    limit: int,
    problems: list[str],
    cut_off: list[str],
    is_wanted: Callable[[dict[str, Any]], bool],
) -> list[dict[str, Any]]:
    """The last ``limit`` wanted records, oldest first.

    A last line without its end is passed over and puts the file's name into ``cut_off``: it may be
    in the middle of being written.
    """
    found: list[dict[str, Any]] = []
    num_bad = 0
    try:
        for line in lines_from_end(path, max_bytes=_MAX_BYTES):
            if not line.endswith(b"\n"):
                cut_off.append(path.name)
                continue
            try:
                record = parse_json_line(line, path.name)
            except (RecordError, RecursionError):
                num_bad += 1
                continue
            if is_wanted(record):
                found.append(record)
            if len(found) >= limit:
                break
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{path.name} cannot be read: {error.strerror}")
    if num_bad:
        problems.append(f"{path.name} is damaged: {num_bad} unreadable line(s) in its last part")
    return found[::-1]


def _is_metric(record: Mapping[str, Any]) -> bool:
    return isinstance(record.get("step"), int)


def _is_event(record: Mapping[str, Any]) -> bool:
    return record.get("event") not in (Event.GROUP_STARTED, Event.GROUP_FINISHED)


def _age(path: Path, now_s: float) -> float | None:
    """Seconds since a record or the manifest was written; never below 0, clocks may differ."""
    written = []
    for name in (MANIFEST, *RecordFile):
        try:
            written.append((path / name).stat().st_mtime)
        except OSError:
            continue
    return max(0.0, now_s - max(written)) if written else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
