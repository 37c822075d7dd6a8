from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.errors import RecordError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory
from miniverl_dist.ports import Assignment, ScoredTrajectory
from miniverl_dist.training.recorder import Recorder, peak_rss_bytes
from tests.fakes import FakeClock, group, trajectory


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def recorder(tmp_path: Path, clock: FakeClock) -> Recorder:
    return Recorder(RunDirectory.create(tmp_path / "run"), SilentProgress(), clock)


def steps(recorder: Recorder) -> list[dict[str, float]]:
    return recorder.run.read_jsonl(RecordFile.METRICS)


def test_times_add_up_until_the_step_that_reports_them(
    recorder: Recorder, clock: FakeClock
) -> None:
    for _ in range(2):
        with recorder.timed("seconds_take"):
            clock.time += 1.5
    recorder.add_seconds("seconds_rollout", 4.0)
    recorder.step({"step": 1})
    recorder.step({"step": 2})
    first, second = steps(recorder)
    assert (first["seconds_take"], first["seconds_rollout"]) == (3.0, 4.0)
    assert "seconds_take" not in second


def test_a_block_that_fails_is_timed_too(recorder: Recorder, clock: FakeClock) -> None:
    def fail() -> None:
        with recorder.timed("seconds_update"):
            clock.time += 2.0
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    recorder.step({"step": 1})
    assert steps(recorder)[0]["seconds_update"] == 2.0


def test_every_step_says_how_much_memory_was_used(recorder: Recorder) -> None:
    recorder.step({"step": 1, "reward_mean": 0.25})
    [line] = steps(recorder)
    assert line["reward_mean"] == 0.25
    # This process holds an interpreter and numpy: more than 20 MB, less than a terabyte.
    assert 2e7 < line["peak_rss_bytes"] <= peak_rss_bytes() < 1e12


def test_an_undeclared_metric_is_refused(recorder: Recorder) -> None:
    with pytest.raises(RecordError, match="rewardmean"):
        recorder.step({"step": 1, "rewardmean": 0.25})


def test_counters_count(recorder: Recorder) -> None:
    recorder.count("empty_batches")
    recorder.count("empty_batches", 2)
    assert dict(recorder.counters) == {"empty_batches": 3}


def test_every_member_of_a_batch_is_written_as_it_was(recorder: Recorder) -> None:
    place = Assignment(ticket=0, task_id="a", prefix_calls=0, tail_calls=1)
    told = [trajectory("é", place=place, member=i) for i in range(3)]
    recorder.groups([group(place, told[:2]), group(place, told[2:])])
    lines = recorder.run.read_jsonl(RecordFile.TRAJECTORIES)
    loaded = [ScoredTrajectory.model_validate_json(json.dumps(line)) for line in lines]
    assert [m.trajectory.model_dump_json() for m in loaded] == [t.model_dump_json() for t in told]


def test_positions_cover_what_a_commit_holds_and_no_more(recorder: Recorder) -> None:
    committed = ("metrics.jsonl", "trajectories.jsonl", "token_analysis.jsonl")
    assert recorder.positions() == dict.fromkeys(committed, 0)
    recorder.step({"step": 1})
    recorder.event(Event.RUN_STARTED)
    recorder.evaluation_trajectory("after", "student", trajectory())
    size = (recorder.run.path / "metrics.jsonl").stat().st_size
    assert recorder.positions() == dict.fromkeys(committed, 0) | {"metrics.jsonl": size}


NEAR = {"step": 4, "policy_lag_max": 1, "mismatch_mean_abs": 0.01, "mismatch_max_ratio": 2.0}


class TestMismatchAlarm:
    def events(self, recorder: Recorder, loss: dict[str, object], **changes: float) -> list[object]:
        recorder.check_mismatch(NEAR | changes, LossConfig.model_validate(loss))
        return list(recorder.run.read_jsonl(RecordFile.EVENTS))

    def test_engine_and_trainer_that_agree_raise_none(self, recorder: Recorder) -> None:
        assert self.events(recorder, {}) == []
        limits = {"mismatch_alarm_mean": 0.01, "mismatch_alarm_ratio": 2.0}
        assert self.events(recorder, limits) == []

    @pytest.mark.parametrize(
        ("name", "value", "limit"),
        [
            ("mismatch_mean_abs", 0.06, 0.05),
            ("mismatch_mean_abs", math.nan, 0.05),
            ("mismatch_max_ratio", 51.0, 50.0),
        ],
    )
    def test_either_limit_raises_one(
        self, recorder: Recorder, name: str, value: float, limit: float
    ) -> None:
        [event] = self.events(recorder, {}, **{name: value})
        assert event["event"] == "engine_mismatch"
        assert event["limits"] == {name: limit}
        assert (event["step"], event["policy_lag_max"]) == (4, 1)
        assert {"mismatch_mean_abs", "mismatch_max_ratio"} <= event.keys()

    def test_null_switches_a_limit_off(self, recorder: Recorder) -> None:
        off = {"mismatch_alarm_mean": None, "mismatch_alarm_ratio": None}
        assert self.events(recorder, off, mismatch_mean_abs=9.0, mismatch_max_ratio=1e6) == []

    def test_what_a_student_does_not_report_raises_none(self, recorder: Recorder) -> None:
        recorder.check_mismatch({"step": 1, "policy_lag_max": 0}, LossConfig())
        assert recorder.run.read_jsonl(RecordFile.EVENTS) == []


def test_fields_with_a_key_become_one_mapping(recorder: Recorder) -> None:
    told: list[dict[str, float | int]] = []
    recorder.sinks.append(told.append)
    recorder.step({"step": 1, "loss": 2.0, "loss_by_span_type:a": 1.5, "loss_by_span_type:b": 2.5})
    line = json.loads((recorder.run.path / "metrics.jsonl").read_text())
    assert line["loss_by_span_type"] == {"a": 1.5, "b": 2.5}
    assert line["loss"] == 2.0
    assert not [name for name in told[0] if ":" in name]  # a gauge takes numbers
