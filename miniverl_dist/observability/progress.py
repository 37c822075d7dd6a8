"""What a person (or a script) sees while a run works."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, Protocol, TextIO

from miniverl_dist.observability.metrics import NOT_A_NUMBER, MetricValue

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress as RichBar
    from rich.progress import TaskID

_STEP_FIELDS: Final = (
    ("pass", "pass_rate", ".2f"),
    ("reward", "reward_mean", ".3f"),
    ("reverse KL", "reverse_kl_mean", ".3f"),
    ("loss", "loss", ".4f"),
    ("divergence", "divergence_mean", ".4f"),
    ("calls", "calls_per_trajectory", ".1f"),
    ("entropy", "entropy_mean", ".2f"),
    ("T", "tail_calls_mean", ".1f"),
    ("lag", "policy_lag_max", ".0f"),
    ("grad", "grad_norm", ".2f"),
    ("s", "seconds_step", ".1f"),
)
_LOSSES: Final = (
    ("unscored", "teacher_dropped", ".0f"),
    ("faults", "num_harness_faults", ".0f"),
    ("refilled", "num_refilled_groups", ".0f"),
)
"""Shown only where something was lost."""
_OF_ROWS: Final = "num_target_rows"
"""In the record of a step that compares distributions or learns written tokens: there the loss is
what falls. A policy-gradient loss need not, and is left out of the line."""


class Progress(Protocol):
    """Told what happens; never asked anything, and no result depends on it."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase of ``total`` parts begins (None: unknown); the former one is over."""

    def advance(self, amount: int = 1, detail: str = "") -> None:
        """``amount`` parts of the phase are done; ``detail`` says how it goes."""

    def step(self, metrics: Mapping[str, MetricValue]) -> None:
        """A training step was committed; ``metrics`` holds ``step``."""

    def message(self, text: str) -> None:
        """Something that a person should read."""

    def close(self) -> None:
        """Nothing more comes; safe to call twice."""


class SilentProgress:
    """Shows nothing."""

    def phase(self, name: str, total: int | None = None) -> None:
        """Show nothing."""

    def advance(self, amount: int = 1, detail: str = "") -> None:
        """Show nothing."""

    def step(self, metrics: Mapping[str, MetricValue]) -> None:
        """Show nothing."""

    def message(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Nothing to close."""


class LineProgress:
    """Plain lines for a log file; within a phase a line at each tenth."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._name = ""
        self._total: int | None = None
        self._done = 0

    def phase(self, name: str, total: int | None = None) -> None:
        """Print the phase's name."""
        self._name, self._total, self._done = name, total, 0
        self.message(f"{name} ({total})" if total else name)

    def advance(self, amount: int = 1, detail: str = "") -> None:
        """Print a line when another tenth of the phase is done."""
        before, self._done = self._done, self._done + amount
        if self._total and 10 * before // self._total < 10 * self._done // self._total:
            self.message(f"{self._name} {self._done}/{self._total} {detail}".rstrip())

    def step(self, metrics: Mapping[str, MetricValue]) -> None:
        """Print the step's main numbers."""
        self.message(step_line(metrics))

    def message(self, text: str) -> None:
        """Print a line."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to close."""


class JsonProgress:
    """One JSON object a line, for scripts."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def phase(self, name: str, total: int | None = None) -> None:
        """Write a ``phase`` line."""
        self._write("phase", {"name": name, "total": total})

    def advance(self, amount: int = 1, detail: str = "") -> None:
        """Write an ``advance`` line."""
        self._write("advance", {"amount": amount, "detail": detail})

    def step(self, metrics: Mapping[str, MetricValue]) -> None:
        """Write a ``step`` line with all metrics."""
        self._write("step", {"metrics": {name: _json(value) for name, value in metrics.items()}})

    def message(self, text: str) -> None:
        """Write a ``message`` line."""
        self._write("message", {"text": text})

    def close(self) -> None:
        """Nothing to close."""

    def _write(self, kind: str, fields: Mapping[str, object]) -> None:
        self._stream.write(json.dumps({"progress": kind, **fields}, allow_nan=False) + "\n")
        self._stream.flush()


class TerminalProgress:
    """A live bar for the phase, a line for each step and message."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: RichBar | None = None
        self._task: TaskID | None = None

    def phase(self, name: str, total: int | None = None) -> None:
        """Show a new bar."""
        bar = self._started_bar()
        if self._task is not None:
            bar.remove_task(self._task)
        self._task = bar.add_task(name, total=total, detail="")

    def advance(self, amount: int = 1, detail: str = "") -> None:
        """Move the bar."""
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, advance=amount, detail=detail)

    def step(self, metrics: Mapping[str, MetricValue]) -> None:
        """Print the step's main numbers above the bar."""
        self.message(step_line(metrics))

    def message(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._task = None

    def _started_bar(self) -> RichBar:
        if self._bar is None:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as RichBar

            self._bar = RichBar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
                console=self._console,
                transient=True,
            )
            self._bar.start()
        return self._bar


def progress_for(stream: TextIO) -> LineProgress | TerminalProgress:
    """Live display on a terminal, plain lines elsewhere."""
    if not stream.isatty():
        return LineProgress(stream)
    from rich.console import Console

    return TerminalProgress(Console(file=stream))


def step_line(metrics: Mapping[str, MetricValue]) -> str:
    """The main numbers of a step on one line; what was not measured is left out."""
    parts = [f"step {metrics.get('step', '?')}"]
    losses = (field for field in _LOSSES if metrics.get(field[1]))
    for label, name, form in (*_STEP_FIELDS, *losses):
        if name in metrics and (name != "loss" or _OF_ROWS in metrics):
            value = metrics[name]
            is_number = isinstance(value, int | float) and math.isfinite(value)
            parts.append(f"{label} {value:{form}}" if is_number else f"{label} {NOT_A_NUMBER}")
    return "  ".join(parts)


def _json(value: MetricValue) -> object:
    """The same with null for what JSON cannot hold."""
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
