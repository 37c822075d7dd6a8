"""What did not reach an update, by reason and step: counted from the events of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Final

from miniverl_dist.observability.events import Event

_NAMES: Final[Mapping[str, tuple[str, str | None]]] = {
    Event.GROUP_DROPPED: ("group dropped", "reason"),
    Event.TEACHER_REFUSED: ("teacher refused", "reason"),
    Event.TARGETS_REFUSED: ("teacher targets refused", "reason"),
    Event.HARNESS_FAULT: ("harness fault", "termination"),
    Event.BATCH_EMPTY: ("empty batch", None),
    Event.ENGINE_LOST: ("engine lost", None),
    Event.ENGINE_QUARANTINED: ("engine quarantined", None),
    Event.TEACHER_LEFT_ALONE: ("teacher left alone", None),
    Event.STUDENT_LOST: ("student lost", None),
    Event.CHUNK_HALVED: ("memory ran out in an update", None),
    Event.EVALUATION_FAILED: ("evaluation failed", None),
    Event.BASELINE_FAILED: ("baseline failed", None),
    Event.ALARM: ("alarm", None),
    Event.ENGINE_MISMATCH: ("engine mismatch", None),
}
_MAX_REASON_CHARS: Final = 40
_MAX_KINDS: Final = 12
"""A reason may be free text; beyond as many kinds the rest counts as one."""


class LossCounts:
    """Counts by kind and step; fed the events in their order."""

    def __init__(self) -> None:
        self.by_kind: dict[str, Counter[int]] = {}
        """Kind -> step during which it happened -> number."""
        self._step = 1

    def add(self, event: Mapping[str, Any]) -> None:
        """Count one event of the log."""
        name, found = event.get("event"), event.get("step")
        step = found if isinstance(found, int) else self._step
        if name in (Event.STEP_FINISHED, Event.RESUMED):
            self._step = step + 1
        if name not in _NAMES:
            return
        label, field = _NAMES[str(name)]
        kind = label if field is None else f"{label}: {_short(event.get(field))}"
        if kind not in self.by_kind and len(self.by_kind) >= _MAX_KINDS:
            kind = "other"
        self.by_kind.setdefault(kind, Counter())[step] += 1


def _short(reason: object) -> str:
    text = " ".join(str(reason).split())
    return text if len(text) <= _MAX_REASON_CHARS else f"{text[: _MAX_REASON_CHARS - 1]}…"
