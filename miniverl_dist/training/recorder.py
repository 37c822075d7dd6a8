"""What the loop leaves behind: events, metrics, trajectories, counters, progress."""

from __future__ import annotations

import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from typing import Any

from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.observability.events import Event, EventLog
from miniverl_dist.observability.metrics import MetricsWriter, MetricValue
from miniverl_dist.observability.progress import Progress
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory
from miniverl_dist.ports import Clock, ScoredGroup
from miniverl_dist.schemas.token_analysis import TokenAnalysis, TokenAnalysisLine
from miniverl_dist.schemas.trajectory import Trajectory

COMMITTED_FILES = (RecordFile.METRICS, RecordFile.TRAJECTORIES, RecordFile.TOKEN_ANALYSIS)
"""Records that belong to a commit: resuming cuts them back to it and writes on from there."""


class Recorder:
    """The one place that writes a run's records."""

    def __init__(self, run: RunDirectory, progress: Progress, clock: Clock) -> None:
        self.run, self.progress, self._clock = run, progress, clock
        self._events, self._metrics = EventLog(run), MetricsWriter(run)
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self.counters: Counter[str] = Counter()
        self.sinks: list[Callable[[dict[str, float | int]], None]] = []
        """Told every step's record, besides the run directory (a metrics server)."""
        self.listeners: list[Callable[[Event, dict[str, Any]], None]] = []
        """Told every event, once it is written."""

    def event(self, event: Event, **fields: Any) -> None:  # noqa: ANN401 - any JSON value
        """Write an event line."""
        self._events.emit(event, **fields)
        for listener in self.listeners:
            listener(event, fields)

    def count(self, name: str, by: int = 1) -> None:
        """Raise a counter that lives in RunState."""
        self.counters[name] += by

    def add_seconds(self, name: str, seconds: float) -> None:
        """Add to a time that the next step record reports."""
        self._seconds[name] += seconds

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the block's seconds to a time that the next step record reports."""
        started = self._clock.now()
        try:
            yield
        finally:
            self.add_seconds(name, self._clock.now() - started)

    def step(self, metrics: dict[str, float | int]) -> None:
        """Write the step's line with the times added up since the last one."""
        line = metrics | self._seconds | {"peak_rss_bytes": peak_rss_bytes()}
        self._seconds.clear()
        self._metrics.write(folded(line))
        numbers = {name: value for name, value in line.items() if ":" not in name}
        for sink in self.sinks:
            sink(numbers)
        self.progress.step(numbers)

    def check_mismatch(self, metrics: Mapping[str, float], loss: LossConfig) -> None:
        """Write an event where trainer and engine are further apart than the config tolerates."""
        limits = {
            "mismatch_mean_abs": loss.mismatch_alarm_mean,
            "mismatch_max_ratio": loss.mismatch_alarm_ratio,
        }
        found = {name: metrics[name] for name in limits if name in metrics}
        above = {
            name: limit
            for name, limit in limits.items()
            # Not `>`: what is not a number is an alarm too.
            if limit is not None and name in found and not found[name] <= limit
        }
        if above:
            self.event(
                Event.ENGINE_MISMATCH,
                step=metrics["step"],
                policy_lag_max=metrics["policy_lag_max"],
                limits=above,
                **{name: value if isfinite(value) else None for name, value in found.items()},
            )

    def chunk_halvings(self, step: int, halvings: Sequence[tuple[int, int]]) -> None:
        """Write an event for each time that memory ran out in an update."""
        for found, left in halvings:
            self.event(Event.CHUNK_HALVED, step=step, rows=found, rows_now=left)

    def groups(self, groups: Sequence[ScoredGroup]) -> None:
        """Write the trajectories of a trained batch."""
        for group in groups:
            for member in group.members:
                self.run.append(RecordFile.TRAJECTORIES, member)

    def tokens(self, step: int, analysis: Sequence[TokenAnalysis]) -> None:
        """Write what a step made of some of its tokens."""
        for one in analysis:
            line = TokenAnalysisLine(step=step, **dict(one))
            self.run.append(RecordFile.TOKEN_ANALYSIS, line)

    def evaluation_trajectory(
        self, tag: str, policy: str, trajectory: Trajectory, job: str | None = None
    ) -> None:
        """Write one evaluation episode; ``job`` names what it belongs to when that is resumed."""
        told = {"tag": tag, "policy": policy, "trajectory": trajectory.model_dump(mode="json")}
        self.run.append(RecordFile.EVAL_TRAJECTORIES, told | ({} if job is None else {"job": job}))

    def positions(self) -> dict[str, int]:
        """Bytes of the committed records so far."""
        return self.run.positions(COMMITTED_FILES)


def folded(line: Mapping[str, float | int]) -> dict[str, MetricValue]:
    """``name:key`` fields of a step as one mapping ``name``."""
    record: dict[str, MetricValue] = {}
    mappings: dict[str, dict[str, float]] = {}
    for name, value in line.items():
        field, colon, key = name.partition(":")
        if colon:
            mappings.setdefault(field, {})[key] = value
        else:
            record[name] = value
    return record | mappings


def peak_rss_bytes() -> int:
    """Largest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts KiB
