"""What a benchmark keeps about the processes of its runs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from miniverl_dist.errors import RecordError
from miniverl_dist.lab.arms import Measured, PlannedRun, RunOutcome


@dataclass(frozen=True)
class Noted:
    """What is known of a run's processes: ``runs/NAME.json``."""

    cpu_seconds: float = 0.0
    """Of all tries that were counted."""
    exit_status: int = 0
    """Of the last one; 0 before the first."""
    is_open: bool = False
    """One was started, and its end was not seen."""
    is_cpu_known: bool = True

    @classmethod
    def read(cls, path: Path) -> Self:
        """A stored one. Raises ``RecordError``."""
        try:
            return cls(**read_record(path))
        except TypeError as error:
            raise RecordError(f"{path} is damaged ({error}): restore it, or remove it") from None

    @property
    def counts_all(self) -> bool:
        """Whether every try was counted."""
        return self.is_cpu_known and not self.is_open

    def outcome(
        self,
        run: PlannedRun,
        status: Literal["finished", "failed", "not_run"],
        *,
        reason: str = "",
        measured: Measured | None = None,
    ) -> RunOutcome:
        """With what is known of the processes."""
        return RunOutcome(
            run=run,
            status=status,
            reason=reason,
            cpu_seconds=self.cpu_seconds,
            is_cpu_known=self.counts_all,
            measured=measured,
        )


def read_record(path: Path) -> dict[str, Any]:
    """A small file of this module's. Raises ``RecordError``."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RecordError(f"{path} is damaged ({error}): restore it, or remove it") from None
    if not isinstance(found, dict):
        raise RecordError(f"{path} is damaged (no JSON object): restore it, or remove it")
    return found


def last_error(log: Path) -> str:
    """What a failed run said last: its error, or whatever stands there."""
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    said = [line for line in lines if line.strip()]
    errors = [line for line in said if line.startswith("error: ")]
    return (errors or said or [""])[-1][:500]
