from __future__ import annotations

from pathlib import Path

import pytest

from miniverl_dist.errors import RecordError
from miniverl_dist.observability.events import Event, EventLog
from miniverl_dist.observability.run_dir import RunDirectory


def test_events_are_written_with_time_and_name(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run") as run:
        log = EventLog(run, now=lambda: 12.5)
        log.emit(Event.GROUP_DROPPED, ticket=3, reason="lag")
        log.emit("run_finished")
        assert run.read_jsonl("events.jsonl") == [
            {"time_s": 12.5, "event": "group_dropped", "ticket": 3, "reason": "lag"},
            {"time_s": 12.5, "event": "run_finished"},
        ]


def test_undeclared_names_and_fixed_fields_are_refused(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run") as run:
        log = EventLog(run)
        with pytest.raises(RecordError, match="event 'group_lost' is not declared"):
            log.emit("group_lost")
        with pytest.raises(RecordError, match="`time_s` is written by the log"):
            log.emit(Event.ALARM, time_s=3)
        assert run.read_jsonl("events.jsonl") == []
