from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.observability.run_dir import RunDirectory
from miniverl_dist.observability.tracking.base import RunEnd, TrackedRun
from miniverl_dist.observability.tracking.follower import Follower, FollowerState


class FakeTracker:
    """Keeps what it is told; fails at a step, or waits at one for ``gate``."""

    def __init__(self, *, fails_at: object = None, waits_at: object = None) -> None:
        self.told: list[Any] = []
        self.gate = threading.Event()
        self._fails_at, self._waits_at = fails_at, waits_at

    def open(self, run: TrackedRun) -> str:
        self._do("open", ("open", run.known_id))
        return run.known_id or "id-1"

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        self._do(step, (step, dict(numbers)))

    def alarm(self, text: str, step: int) -> None:
        self._do("alarm", (step, text))

    def close(self, end: RunEnd) -> None:
        self._do("close", end)

    def _do(self, key: object, record: object) -> None:
        if key == self._waits_at:
            self.gate.wait()
        if key == self._fails_at:
            raise ZeroDivisionError(f"at {key} in /home/ada/secret/place.db")
        self.told.append(record)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.create(tmp_path / "run") as run:
        yield run


def follow(run: RunDirectory, tracker: FakeTracker, **options: Any) -> Follower:
    state = FollowerState(run, "0-fake")
    tracked = TrackedRun("run", run.path, {"seed": 1}, "d" * 64, state.id)
    return Follower("0-fake", tracker, tracked, state, **{"deadline_s": 20.0} | options)


def end(follower: Follower) -> str | None:
    follower.close("finished")
    follower.wait()
    return follower.failure


def sent_step(run: RunDirectory) -> int:
    return int(run.read_json("tracking/0-fake.json")["sent_step"])


def test_everything_arrives_in_order(run: RunDirectory) -> None:
    tracker = FakeTracker()
    follower = follow(run, tracker)
    follower.step({"reward": 0.5}, 1)
    follower.alarm("no call", 1)
    follower.evaluation({"eval/student/pass_rate": 1.0}, 1)
    assert end(follower) is None
    assert tracker.told == [
        ("open", None),
        (1, {"reward": 0.5}),
        (1, "no call"),
        (1, {"eval/student/pass_rate": 1.0}),
        "finished",
    ]


def test_a_resumed_run_goes_on_and_repeats_nothing(run: RunDirectory) -> None:
    first = follow(run, FakeTracker())
    for step in (1, 2, 3):
        first.step({}, step)
    assert end(first) is None
    tracker = FakeTracker()
    again = follow(run, tracker)
    for step in (2, 3, 4):
        again.step({}, step)
        again.alarm("no call", step)
    assert end(again) is None
    assert tracker.told == [("open", "id-1"), (4, {}), (4, "no call"), "finished"]


@pytest.mark.parametrize(("fails_at", "sent"), [("open", 0), (2, 1), ("alarm", 2), ("close", 3)])
def test_a_failure_ends_the_tracker_only(run: RunDirectory, fails_at: object, sent: int) -> None:
    tracker = FakeTracker(fails_at=fails_at)
    follower = follow(run, tracker)
    for step in (1, 2, 3):
        follower.step({}, step)
        if step == 2:
            follower.alarm("no call", step)
    assert end(follower) == f"ZeroDivisionError: at {fails_at} in …/place.db"
    follower.step({}, 4)
    assert "close" not in tracker.told
    assert "finished" not in tracker.told
    if fails_at != "open":
        assert sent_step(run) == sent
    # The next start of the run asks for the rest.
    later = FakeTracker()
    again = follow(run, later)
    for step in (1, 2, 3):
        again.step({}, step)
    assert end(again) is None
    assert [record[0] for record in later.told[1:-1]] == [s for s in (1, 2, 3) if s > sent]


def test_a_crash_while_a_step_is_sent_leaves_a_gap(run: RunDirectory) -> None:
    tracker = FakeTracker(waits_at=2)
    follower = follow(run, tracker)
    follower.step({}, 1)
    follower.step({}, 2)
    while sent_step_or_zero(run) < 2:
        pass
    assert [record[0] for record in tracker.told] == ["open", 1]
    again = FollowerState(run, "0-fake")
    tracker.gate.set()
    assert (again.id, again.sent_step) == ("id-1", 2)
    assert end(follower) is None


def sent_step_or_zero(run: RunDirectory) -> int:
    return sent_step(run) if (run.path / "tracking" / "0-fake.json").exists() else 0


def test_who_does_not_keep_up_is_left_alone(run: RunDirectory) -> None:
    tracker = FakeTracker(waits_at="open")
    follower = follow(run, tracker, max_waiting=3)
    for step in range(1, 9):
        follower.step({}, step)
    assert follower.failure == "does not keep up: 3 records are waiting"
    tracker.gate.set()
    follower.wait()
    assert "finished" not in tracker.told


def test_the_end_is_waited_for_until_the_deadline(run: RunDirectory) -> None:
    tracker = FakeTracker(waits_at="close")
    follower = follow(run, tracker, deadline_s=0.02)
    assert end(follower) == "not done 0.02 s after the end of the run"
    tracker.gate.set()
