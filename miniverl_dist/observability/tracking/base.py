"""What a tracker is told, and what it has to do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

RunEnd = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """A run, as a tracker is introduced to it: nothing that the run directory does not say."""

    name: str
    folder: Path
    """The run directory."""
    config: Mapping[str, Any]
    """The resolved recipe."""
    config_digest: str
    known_id: str | None
    """What `Tracker.open` returned when the run was started; None for a run that is new to it."""


class Tracker(Protocol):
    """One tracker's side of one run. Called from one thread, in order; may raise anything."""

    def open(self, run: TrackedRun) -> str:
        """Begin, or go on with ``run.known_id``. Returns the id to go on with another time."""
        ...

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """Take finite numbers of a step; steps never go down."""
        ...

    def alarm(self, text: str, step: int) -> None:
        """Take something that a person should read."""
        ...

    def close(self, end: RunEnd) -> None:
        """Hand over everything; nothing comes after."""
        ...


def flat(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """``("student.model.kind", "toy")`` for every leaf of nested mappings."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
