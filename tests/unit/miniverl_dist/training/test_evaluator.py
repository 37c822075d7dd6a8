from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.errors import ConfigError, DeadlineError, RecordError, TokenizerError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory
from miniverl_dist.ports import Assignment, RolloutSource
from miniverl_dist.schemas.evaluation import EvaluationReport
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.training.evaluator import Evaluator, read_evaluation
from miniverl_dist.training.recorder import Recorder
from tests.fakes import FakeClock, FakeRollouts, trajectory

PLACES = [Assignment(ticket=0, task_id="a", prefix_calls=0, tail_calls=1)]
EMPTY = EvaluationReport(
    environment="fake", task_ids=("a",), trains_on_eval_tasks=False, temperature=1.0, rows=()
)


class Lab:
    """An evaluator on a fresh run directory; counts the sources that were made."""

    def __init__(
        self,
        folder: Path,
        report: EvaluationReport = EMPTY,
        play: Callable[[Assignment, int], Trajectory] | None = None,
        identity: str | None = None,
        **config: object,
    ) -> None:
        path = folder / "run"
        is_new = not path.exists()
        self.run = RunDirectory.create(path) if is_new else RunDirectory.open(path, writable=True)
        self.made: list[str] = []
        self.errors: dict[str, Exception] = {}
        self._play = play
        self.evaluator = Evaluator(
            {name: self._maker(name) for name in ("student", "teacher", "null", "oracle")},
            PLACES,
            EvaluationConfig.model_validate({"episodes_per_task": 3} | config),
            report,
            Recorder(self.run, SilentProgress(), FakeClock()),
            deadline_s=5.0,
            identity=identity,
        )

    def _maker(self, name: str) -> Callable[[], Awaitable[RolloutSource]]:
        async def make() -> RolloutSource:
            self.made.append(name)
            if name in self.errors:
                raise self.errors[name]
            return FakeRollouts([], lambda: 0, self._play)

        return make

    @property
    def stored(self) -> EvaluationReport:
        return EvaluationReport.model_validate_json(self.run.read_bytes("eval.json"))

    def events(self) -> list[tuple[str, str]]:
        return [(e["event"], e["policy"]) for e in self.run.read_jsonl(RecordFile.EVENTS)]


async def test_a_row_is_measured_once_and_kept_over_a_restart(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    await lab.evaluator.student("after", 5)
    await lab.evaluator.student("after", 5)
    assert lab.made == ["student"]
    lab.run.close()
    again = Lab(tmp_path, report=lab.stored)
    await again.evaluator.student("after", 5)
    assert again.made == []
    await again.evaluator.student("step-000005", 5)
    assert [row.tag for row in again.stored.rows] == ["after", "step-000005"]
    assert again.evaluator.rows == again.stored.rows


async def test_it_writes_the_report_the_event_and_the_episodes(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    await lab.evaluator.student("after", 5)
    [row] = lab.stored.rows
    assert (row.policy, row.policy_version, row.num_episodes) == ("student", 5, 3)
    [event] = lab.run.read_jsonl(RecordFile.EVENTS)
    assert event["event"] == "evaluation_finished"
    assert event["pass_rate"] == row.pass_rate == pytest.approx(2 / 3)
    episodes = lab.run.read_jsonl(RecordFile.EVAL_TRAJECTORIES)
    assert [(e["tag"], e["policy"]) for e in episodes] == [("after", "student")] * 3
    loaded = Trajectory.model_validate_json(json.dumps(episodes[1]["trajectory"]))
    assert loaded.trajectory_id == "after.student.000000.0.1"


async def test_deterministic_policies_play_each_task_once(tmp_path: Path) -> None:
    lab = Lab(tmp_path, baselines=("null", "oracle", "teacher"))
    await lab.evaluator.baselines()
    assert {row.policy: row.num_episodes for row in lab.stored.rows} == {
        "null": 1,
        "oracle": 1,
        "teacher": 3,
        "student": 3,
    }
    assert {row.tag for row in lab.stored.rows} == {"before"}


async def test_the_untrained_student_is_measured_only_when_asked_for(tmp_path: Path) -> None:
    lab = Lab(tmp_path, baselines=("null",), before=False)
    await lab.evaluator.baselines()
    assert lab.made == ["null"]


@pytest.mark.parametrize(
    "error",
    [ConfigError("a teacher behind `url` cannot act"), DeadlineError("too slow")],
    ids=["config", "deadline"],
)
async def test_a_baseline_that_fails_is_logged_and_the_rest_goes_on(
    tmp_path: Path, error: Exception
) -> None:
    lab = Lab(tmp_path, baselines=("teacher", "null"))
    lab.errors["teacher"] = error
    await lab.evaluator.baselines()
    assert lab.events() == [
        ("baseline_failed", "teacher"),
        ("baseline_evaluated", "null"),
        ("baseline_evaluated", "student"),
    ]
    assert lab.run.read_jsonl(RecordFile.EVENTS)[0]["error"] == str(error)
    assert [row.policy for row in lab.stored.rows] == ["null", "student"]


async def test_a_baseline_whose_episode_fails_is_logged_too(tmp_path: Path) -> None:
    def play(place: Assignment, member: int) -> Trajectory:
        raise TokenizerError("id 9 is outside of the vocabulary")

    lab = Lab(tmp_path, play=play, baselines=("null",), before=False)
    await lab.evaluator.baselines()
    assert lab.events() == [("baseline_failed", "null")]


async def test_a_failing_evaluation_is_logged_and_does_not_stop_training(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.errors["student"] = DeadlineError("too slow")
    await lab.evaluator.student("after", 5)
    assert lab.evaluator.rows == ()
    assert (
        '"event":"evaluation_failed","tag":"after","error":"too slow"'
        in (lab.run.path / "events.jsonl").read_text()
    )


async def test_a_job_of_its_own_fails_with_the_error_itself(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    lab.errors["student"] = DeadlineError("too slow")
    with pytest.raises(DeadlineError, match="too slow"):
        await lab.evaluator.measure("student", "after", 5)


async def test_the_student_is_measured_when_due(tmp_path: Path) -> None:
    lab = Lab(tmp_path, every_n_steps=2)
    for step in range(6):
        await lab.evaluator.student_if_due(step, step)
    assert [row.tag for row in lab.evaluator.rows] == ["step-000002", "step-000004"]
    never = Lab(tmp_path / "other")
    await never.evaluator.student_if_due(2, 2)
    assert never.made == []


@pytest.mark.parametrize("after", [True, False])
async def test_the_trained_student_is_measured_when_asked_for(tmp_path: Path, after: bool) -> None:
    lab = Lab(tmp_path, after=after, play=lambda p, m: trajectory(place=p, member=m, version=9))
    await lab.evaluator.after(9)
    assert [(row.tag, row.policy_version) for row in lab.evaluator.rows] == [("after", 9)] * after


async def test_episodes_of_a_row_that_a_crash_cut_off_are_not_kept(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    await lab.evaluator.measure("null", "before", 0)
    before = lab.run.positions([RecordFile.EVAL_TRAJECTORIES])[RecordFile.EVAL_TRAJECTORIES]
    lab.run.append(RecordFile.EVAL_TRAJECTORIES, {"tag": "x", "policy": "student"})
    await lab.evaluator.measure("student", "after", 0)
    lines = lab.run.read_jsonl(RecordFile.EVAL_TRAJECTORIES)
    assert [line for line in lines if line["tag"] == "x"] == []
    assert before > 0


def test_a_damaged_eval_json_is_one_clear_error(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    assert read_evaluation(lab.run) is None
    lab.run.write_text("eval.json", "{")
    with pytest.raises(RecordError, match=r"eval\.json is damaged"):
        read_evaluation(lab.run)


async def test_episode_ids_are_unique_over_policies_and_moments(tmp_path: Path) -> None:
    lab = Lab(tmp_path)
    for policy, tag in (("null", "before"), ("student", "before"), ("student", "after")):
        await lab.evaluator.measure(policy, tag, 0)
    ids = [
        line["trajectory"]["trajectory_id"]
        for line in lab.run.read_jsonl(RecordFile.EVAL_TRAJECTORIES)
    ]
    assert len(set(ids)) == len(ids) > 3
    assert ids[0].startswith("before.null.000000.0")


class TestResumed:
    """A second evaluator in the directory that a first one has left in the middle."""

    @staticmethod
    def cut(lab: Lab, num_kept: int) -> None:
        """Leave the file as a killed process leaves it: so many episodes, and half a line."""
        file = lab.run.path / "eval_trajectories.jsonl"
        lines = file.read_bytes().splitlines(keepends=True)
        lab.run.close()
        (lab.run.path / "eval.json").unlink()
        file.write_bytes(b"".join(lines[:num_kept]) + b'{"tag": "af')

    @pytest.mark.parametrize("num_kept", [0, 1, 2, 3])
    async def test_only_what_is_missing_is_played(self, tmp_path: Path, num_kept: int) -> None:
        played: list[int] = []

        def play(place: Assignment, member: int) -> Trajectory:
            played.append(member)
            return trajectory(place=place, member=member, passed=member == 1)

        lab = Lab(tmp_path, play=play, identity="digest")
        await lab.evaluator.measure("student", "after", 5, weights="w")
        whole = lab.stored.rows
        played.clear()
        self.cut(lab, num_kept)
        again = Lab(tmp_path, play=play, identity="digest")
        await again.evaluator.measure("student", "after", 5, weights="w")
        assert again.stored.rows == whole
        assert played == [0, 1, 2][num_kept:]
        ids = [
            line["trajectory"]["trajectory_id"]
            for line in again.run.read_jsonl(RecordFile.EVAL_TRAJECTORIES)
        ]
        assert len(ids) == len(set(ids)) == 3

    @pytest.mark.parametrize(
        ("identity", "name", "tag", "version", "weights"),
        [
            ("another config", "student", "after", 5, "w"),
            ("digest", "teacher", "after", 5, "w"),
            ("digest", "student", "later", 5, "w"),
            ("digest", "student", "after", 6, "w"),
            ("digest", "student", "after", 5, "other weights"),
        ],
    )
    async def test_episodes_of_anything_else_are_not_taken(
        self, tmp_path: Path, identity: str, name: str, tag: str, version: int, weights: str
    ) -> None:
        lab = Lab(tmp_path, identity="digest")
        await lab.evaluator.measure("student", "after", 5, weights="w")
        self.cut(lab, 2)
        num_played = 0

        def play(place: Assignment, member: int) -> Trajectory:
            nonlocal num_played
            num_played += 1
            return trajectory(place=place, member=member)

        again = Lab(tmp_path, play=play, identity=identity)
        await again.evaluator.measure(name, tag, version, weights=weights)
        assert num_played == 3
        # What the first one had paid for is still there.
        jobs = [line["job"] for line in again.run.read_jsonl(RecordFile.EVAL_TRAJECTORIES)]
        assert (len(jobs), len(set(jobs))) == (5, 2)

    async def test_weights_that_a_run_trains_again_are_measured_anew(self, tmp_path: Path) -> None:
        lab = Lab(tmp_path, identity="digest")
        await lab.evaluator.student("after", 5)
        self.cut(lab, 2)
        again = Lab(tmp_path, identity="digest")
        await again.evaluator.student("after", 5)
        assert len(again.run.read_jsonl(RecordFile.EVAL_TRAJECTORIES)) == 3

    async def test_a_damaged_episode_is_one_clear_error(self, tmp_path: Path) -> None:
        lab = Lab(tmp_path, identity="digest")
        await lab.evaluator.measure("null", "after", 5)
        lab.run.close()
        (lab.run.path / "eval.json").unlink()
        file = lab.run.path / "eval_trajectories.jsonl"
        file.write_text(file.read_text().replace('"seed":', '"seeds":'))
        again = Lab(tmp_path, identity="digest")
        with pytest.raises(RecordError, match=r"damaged episode .* choose another --output"):
            await again.evaluator.measure("null", "after", 5)
