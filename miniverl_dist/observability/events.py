"""Event names, declared once, and the log that writes them to events.jsonl."""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import StrEnum
from typing import Any

from miniverl_dist.errors import RecordError
from miniverl_dist.observability.environment import without_paths
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory


class Event(StrEnum):
    """Everything that a run may report; a name that is not here cannot be written."""

    RUN_STARTED = "run_started"
    RESUMED = "resumed"
    """A run continues from its last commit."""
    REPLAYED_STEP = "replayed_step"
    """A step behind the last commit was done again from the journal, without sampling."""
    STOP_REQUESTED = "stop_requested"
    STOPPED = "stopped"
    """The run ended early and in order (SIGTERM, job stop), its checkpoint written."""
    RUN_FINISHED = "run_finished"
    RUN_FAILED = "run_failed"
    ALARM = "alarm"
    """A number that no healthy run shows, for instance no tool call in a whole step."""
    TRACKING_FAILED = "tracking_failed"
    """A tracker failed, or does not keep up; it is left alone, and the run goes on."""
    ENGINE_MISMATCH = "engine_mismatch"
    """Trainer and engine disagree on a step's tokens by more than ``loss.mismatch_alarm_*``."""

    TEACHER_FITTED = "teacher_fitted"
    WARMUP_STEP = "warmup_step"
    WARMUP_FINISHED = "warmup_finished"
    BASELINE_EVALUATED = "baseline_evaluated"
    BASELINE_FAILED = "baseline_failed"
    """A baseline could not be measured; training goes on."""
    EVALUATION_FINISHED = "evaluation_finished"
    EVALUATION_FAILED = "evaluation_failed"

    GROUP_STARTED = "group_started"
    GROUP_FINISHED = "group_finished"
    GROUP_DROPPED = "group_dropped"
    """A group left the FIFO (too old, no variance, nothing trainable); its place is refilled."""
    HARNESS_FAULT = "harness_fault"
    """An episode ended by deadline, environment or engine; it is not trained on."""
    TEACHER_REFUSED = "teacher_refused"
    """A trajectory without a teacher score, with the typed reason."""
    TEACHER_LEFT_ALONE = "teacher_left_alone"
    """A teacher server hangs or cannot be reached; its breaker opened, and calls to it wait for a
    trial, or fail at once (``teacher.on_failure: fail``)."""
    TEACHER_TRIED = "teacher_tried"
    """One call was let through to a teacher server that had been left alone."""
    TEACHER_BACK = "teacher_back"
    """A teacher server that had been left alone answers again."""
    TEACHER_CONTEXT_SHORT = "teacher_context_short"
    """A teacher server takes fewer tokens than ``teacher.max_prefill_tokens``."""
    PREFIXES_SCORED = "prefixes_scored"
    """At the end of a run: what scoring episodes while they ran has come to, in counts."""

    MEMORY_CHOSEN = "memory_chosen"
    """Whether student and teacher are in memory at once, and why."""
    TARGETS_REFUSED = "targets_refused"
    """A trajectory without teacher targets, with the reason."""
    CHUNK_HALVED = "chunk_halved"
    """Memory ran out in an update; it went on with half the rows of the projection at a time."""

    STEP_FINISHED = "step_finished"
    BATCH_EMPTY = "batch_empty"
    """A step's groups held nothing to train on."""
    WEIGHTS_PUBLISHED = "weights_published"
    ENGINE_QUARANTINED = "engine_quarantined"
    """An engine did not confirm a version and left the rotation."""
    ENGINE_LOST = "engine_lost"
    """A rollout actor died; its episodes are played again elsewhere."""
    ENGINE_RESTARTED = "engine_restarted"
    """A rollout actor came back, confirmed the current version and is in rotation again."""
    STUDENT_LOST = "student_lost"
    """A rank of the student died, or an update stopped half way."""
    STUDENT_REBUILT = "student_rebuilt"
    """The student stands again where it was: last commit, later batches trained on again."""
    POOLS_PLACED = "pools_placed"
    """Where the actors of a cluster run were placed."""
    CHECKPOINT_COMMITTED = "checkpoint_committed"
    CHECKPOINT_REMOVED = "checkpoint_removed"


class EventLog:
    """Writes ``{"time_s", "event", ...}`` lines; ``time_s`` is seconds since the epoch."""

    def __init__(self, run: RunDirectory, *, now: Callable[[], float] = time.time) -> None:
        self._run = run
        self._now = now

    def emit(self, event: Event | str, **fields: Any) -> None:  # noqa: ANN401 - any JSON value
        """Append one event; ``fields`` are JSON values, absolute paths in texts are cut short.

        Raises:
            RecordError: the name is not declared, or a field is named like a fixed one.
        """
        try:
            name = Event(event)
        except ValueError:
            raise RecordError(
                f"event {event!r} is not declared in miniverl_dist.observability.events.Event"
            ) from None
        if "time_s" in fields:
            raise RecordError(f"event {name}: `time_s` is written by the log itself")
        shown = {k: without_paths(v) if isinstance(v, str) else v for k, v in fields.items()}
        self._run.append(RecordFile.EVENTS, {"time_s": self._now(), "event": name.value, **shown})
