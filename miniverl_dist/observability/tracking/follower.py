"""A tracker in a thread of its own: training never waits for it, and never falls with it.

    run's thread   consumes: step records, alarms  produces: jobs in a queue (bounded)
    follower       consumes: jobs, one by one      produces: calls of the tracker, its state file

A tracker that raises, or whose queue is full, is left alone; ``failure`` then says why. The state
file (id, newest step that was handed over) lets a resumed run go on where this one ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

from miniverl_dist.errors import RecordError
from miniverl_dist.observability.environment import without_paths
from miniverl_dist.observability.run_dir import RunDirectory
from miniverl_dist.observability.tracking.base import RunEnd, TrackedRun, Tracker

FOLDER: Final = "tracking"
"""Of the state files, in the run directory."""
MAX_WAITING: Final = 1000
"""Records; a tracker so far behind does not keep up."""

Job = Callable[[], None]


class FollowerState:
    """``{"id", "sent_step"}`` of one tracker in the run directory."""

    def __init__(self, run: RunDirectory, name: str) -> None:
        self._run, self._file = run, f"{FOLDER}/{name}.json"
        (run.path / FOLDER).mkdir(exist_ok=True)
        known = (run.path / self._file).exists()
        found: Mapping[str, Any] = run.read_json(self._file) if known else {}
        self.id: str | None = found.get("id")
        self.sent_step = int(found.get("sent_step", 0))
        """Newest step that the tracker has, as far as we can know."""

    def save(self) -> None:
        """Write the file anew."""
        self._run.write_json(self._file, {"id": self.id, "sent_step": self.sent_step})


class Follower:
    """One tracker of one run, seen from the run.

    Args:
        name: In events, and of the state file.
        tracker: What is told.
        run: Introduced to it; its ``known_id`` is what ``state`` says.
        state: Of this tracker, in this run.
        deadline_s: For `wait`.
        max_waiting: Records that may wait.
    """

    def __init__(
        self,
        name: str,
        tracker: Tracker,
        run: TrackedRun,
        state: FollowerState,
        *,
        deadline_s: float,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        self.name = name
        self.failure: str | None = None
        """Why it was left alone; None while it works."""
        self._tracker, self._state, self._deadline_s = tracker, state, deadline_s
        self._told_step = state.sent_step
        self._is_repeated = False
        self._jobs: queue.Queue[Job | None] = queue.Queue(max_waiting)
        self._put(lambda: self._open(run))
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def step(self, numbers: Mapping[str, float], step: int) -> None:
        """Hand over a step; one that the tracker has already is left out."""
        self._is_repeated = step <= self._told_step
        if not self._is_repeated:
            self._told_step = step
            self._put(lambda: self._send(dict(numbers), step))

    def evaluation(self, numbers: Mapping[str, float], step: int) -> None:
        """Hand over an evaluation's row; each is measured once."""
        self._put(lambda: self._tracker.log(numbers, step))

    def alarm(self, text: str, step: int) -> None:
        """Hand over an alarm, unless it is about a step that was done again."""
        if not self._is_repeated:
            self._put(lambda: self._tracker.alarm(text, step))

    def close(self, end: RunEnd) -> None:
        """Nothing comes after; returns at once."""
        self._put(lambda: self._tracker.close(end))
        self._put(None)

    def wait(self) -> None:
        """Block until the tracker has taken everything, at most for the deadline."""
        self._thread.join(self._deadline_s if self.failure is None else 0)
        if self._thread.is_alive():
            self._fail(f"not done {self._deadline_s:g} s after the end of the run")

    def _put(self, job: Job | None) -> None:
        if self.failure is not None:
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._fail(f"does not keep up: {self._jobs.maxsize} records are waiting")

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and self.failure is None:
                job()
        except Exception as error:  # noqa: BLE001 - trackers raise anything: network, database, own
            self._fail(without_paths(f"{type(error).__name__}: {error}")[:500])

    def _open(self, run: TrackedRun) -> None:
        self._state.id = self._tracker.open(run)
        self._state.save()

    def _send(self, numbers: Mapping[str, float], step: int) -> None:
        """Say first that the step is there: a crash in between leaves a gap, not a step twice."""
        before, self._state.sent_step = self._state.sent_step, step
        self._state.save()
        try:
            self._tracker.log(numbers, step)
        except BaseException:
            self._state.sent_step = before
            with suppress(RecordError):
                self._state.save()
            raise

    def _fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason
