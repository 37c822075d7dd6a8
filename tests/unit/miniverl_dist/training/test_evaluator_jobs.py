"""Which rows are one job's own: faults are played again, other settings are other rows."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.errors import EngineError
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory
from miniverl_dist.ports import Assignment, RolloutSource
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from miniverl_dist.schemas.trajectory import Termination, Trajectory
from miniverl_dist.training.evaluator import Evaluator, Player, read_evaluation
from miniverl_dist.training.recorder import Recorder
from tests.fakes import FakeClock, FakeRollouts, trajectory

PLACES = [
    Assignment(ticket=i, task_id=name, prefix_calls=0, tail_calls=1) for i, name in enumerate("ab")
]
EMPTY = EvaluationReport(
    environment="fake", task_ids=("a", "b"), trains_on_eval_tasks=False, temperature=1.0, rows=()
)
Play = Callable[[Assignment, int], Trajectory]


class Told(SilentProgress):
    """Keeps the messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def message(self, text: str) -> None:
        self.messages.append(text)


class Desk:
    """Evaluations in one folder, each by an evaluator of its own, as one command after another."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "run"
        with RunDirectory.create(self.path) as run:
            run.write_json("manifest.json", {})
        self.played: list[tuple[str, int]] = []
        self.told = Told()

    async def measure(
        self,
        name: str,
        tag: str = "initial",
        *,
        play: Play | None = None,
        settings: dict[str, str] | None = None,
        weights: str | None = None,
        identity: str | None = "config",
    ) -> tuple[EvaluationRow, ...]:
        """One command; ``settings`` make the policy a foreign one."""

        def playing(place: Assignment, member: int) -> Trajectory:
            self.played.append((place.task_id, member))
            return (play or verdict)(place, member)

        async def source() -> RolloutSource:
            return FakeRollouts([], lambda: 0, playing)

        self.played.clear()
        self.told = Told()
        with RunDirectory.open(self.path, writable=True) as run:
            evaluator = Evaluator(
                dict.fromkeys(("student", "null", "oracle", "teacher"), source),
                PLACES,
                EvaluationConfig(episodes_per_task=2),
                read_evaluation(run) or EMPTY,
                Recorder(run, self.told, FakeClock()),
                deadline_s=5.0,
                identity=identity,
            )
            player = None if settings is None else Player(source, settings)
            await evaluator.measure(name, tag, 3, weights=weights, player=player)
            found = read_evaluation(run)
        assert found is not None
        return found.rows

    def episodes(self) -> list[str]:
        lines = RunDirectory.open(self.path).read_jsonl(RecordFile.EVAL_TRAJECTORIES)
        return [line["trajectory"]["trajectory_id"] for line in lines]


def verdict(place: Assignment, member: int) -> Trajectory:
    return trajectory(place=place, member=member, passed=member == 0, reward=float(member == 0))


def lost(place: Assignment, member: int, why: str = "no\n answer") -> Trajectory:
    found = trajectory(place=place, member=member, termination=Termination.ENGINE_ERROR)
    return found.model_copy(update={"notes": {"error": why}})


def dies_after(count: int) -> Play:
    """A server that answers so many episodes."""
    left = [count]

    def play(place: Assignment, member: int) -> Trajectory:
        left[0] -= 1
        return verdict(place, member) if left[0] >= 0 else lost(place, member)

    return play


def outcome(row: EvaluationRow) -> tuple[float | None, float | None, int, int]:
    return row.pass_rate, row.reward_mean, row.num_episodes, row.num_faults


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


ASKED = {"endpoint": "e1", "max_new_tokens": "8"}


class TestFaults:
    async def test_nothing_is_claimed_where_every_episode_was_lost(self, desk: Desk) -> None:
        [row] = await desk.measure("openai:m", settings=ASKED, play=lost)
        assert outcome(row) == (None, None, 0, 4)
        assert (row.calls_per_episode, row.tokens_per_episode, row.parsed_call_rate) == (
            None,
            None,
            None,
        )
        assert desk.told.messages[-1] == (
            "openai:m (initial, T = 1): - (4 faults: engine_error: no answer)"
        )

    @pytest.mark.parametrize("count", [0, 1, 3])
    async def test_the_same_command_plays_them_again(self, desk: Desk, count: int) -> None:
        whole = (await Desk(desk.path / "other").measure("openai:m", settings=ASKED))[0]
        await desk.measure("null")
        [_, half] = await desk.measure("openai:m", settings=ASKED, play=dies_after(count))
        assert (half.num_episodes, half.num_faults) == (count, 4 - count)
        await desk.measure("oracle")
        rows = await desk.measure("openai:m", settings=ASKED)
        assert [row.policy for row in rows] == ["null", "openai:m", "oracle"]
        assert rows[1] == whole
        assert len(desk.played) == 4 - count
        await desk.measure("openai:m", settings=ASKED)
        assert desk.played == []

    async def test_a_verdict_is_final(self, desk: Desk) -> None:
        """A server that would answer otherwise now changes nothing that counted."""
        await desk.measure("openai:m", settings=ASKED, play=dies_after(3))

        def all_pass(place: Assignment, member: int) -> Trajectory:
            return trajectory(place=place, member=member, passed=True, reward=1.0)

        [row] = await desk.measure("openai:m", settings=ASKED, play=all_pass)
        assert desk.played == [("b", 1)]
        assert [o.num_passed for o in row.tasks] == [1, 2]

    async def test_a_retry_that_helps_nothing_leaves_the_row(self, desk: Desk) -> None:
        before = await desk.measure("openai:m", settings=ASKED, play=dies_after(2))
        after = await desk.measure("openai:m", settings=ASKED, play=lost)
        assert after == before
        assert "no fewer episodes are lost (engine_error: no answer)" in desk.told.messages[-1]

    async def test_the_most_frequent_reason_is_told(self, desk: Desk) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            return lost(place, member, "rare" if (place.task_id, member) == ("a", 0) else "often")

        await desk.measure("openai:m", settings=ASKED, play=play)
        assert desk.told.messages[-1].endswith("- (4 faults: mostly engine_error: often)")

    async def test_where_episodes_are_not_kept_it_says_so(self, desk: Desk) -> None:
        first = await desk.measure("student", play=dies_after(2))
        assert await desk.measure("student") == first
        assert desk.played == []
        assert "its 2 faults stay" in desk.told.messages[-1]

    async def test_a_command_that_ends_with_an_error_keeps_what_counted(self, desk: Desk) -> None:
        def gives_up(place: Assignment, member: int) -> Trajectory:
            if place.task_id == "b":
                raise EngineError("gone for good")
            return lost(place, member) if member else verdict(place, member)

        with pytest.raises(EngineError, match="gone for good"):
            await desk.measure("openai:m", settings=ASKED, play=gives_up)
        [row] = await desk.measure("openai:m", settings=ASKED)
        assert outcome(row) == (0.5, 0.5, 4, 0)
        assert desk.played == [("a", 1), ("b", 0), ("b", 1)]


class TestIdentity:
    @pytest.mark.parametrize("name", sorted(ASKED))
    async def test_other_settings_are_another_row(self, desk: Desk, name: str) -> None:
        other = ASKED | {name: "other"}
        await desk.measure("openai:m", settings=ASKED)
        first, second = await desk.measure("openai:m", settings=other, play=lost)
        assert first.policy == "openai:m"
        assert second.policy == f"openai:m@{second.job[:8]}"
        assert first.settings[name] != second.settings[name] == "other"
        assert len(desk.played) == 4
        ids = desk.episodes()
        assert len(set(ids)) == len(ids) == 8
        # Both are found again by what they are, whatever they are called.
        for settings, expected in ((ASKED, 0), (other, 4)):
            rows = await desk.measure("openai:m", settings=settings)
            assert len(desk.played) == expected
        assert [row.policy for row in rows] == [first.policy, second.policy]
        assert rows[1].num_faults == 0

    async def test_one_row_never_holds_episodes_of_two_settings(self, desk: Desk) -> None:
        """Cut off under one setting, then asked under another: it starts from nothing."""

        def cut(place: Assignment, member: int) -> Trajectory:
            if place.task_id == "b":
                raise EngineError("killed")
            return verdict(place, member)

        with pytest.raises(EngineError):
            await desk.measure("openai:m", settings=ASKED, play=cut)
        await desk.measure("openai:m", settings=ASKED | {"max_new_tokens": "4096"})
        assert len(desk.played) == 4
        rows = await desk.measure("openai:m", settings=ASKED)
        assert desk.played == [("b", 0), ("b", 1)]
        assert [row.settings["max_new_tokens"] for row in rows] == ["4096", "8"]

    async def test_a_foreign_row_of_an_earlier_version_is_not_taken_for_it(
        self, desk: Desk
    ) -> None:
        [row] = await desk.measure("openai:m", settings=ASKED)
        self._forget_job(desk)
        rows = await desk.measure("openai:m", settings=ASKED)
        assert rows[0] == row.model_copy(update={"job": "", "settings": {}})
        assert rows[1].policy.startswith("openai:m@")

    async def test_an_own_row_of_an_earlier_version_is(self, desk: Desk) -> None:
        await desk.measure("null")
        self._forget_job(desk)
        await desk.measure("null")
        assert desk.played == []

    @staticmethod
    def _forget_job(desk: Desk) -> None:
        with RunDirectory.open(desk.path, writable=True) as run:
            report = read_evaluation(run)
            assert report is not None
            rows = [r.model_copy(update={"job": "", "settings": {}}) for r in report.rows]
            run.write_json("eval.json", report.model_copy(update={"rows": tuple(rows)}))

    async def test_other_weights_of_the_student_stand_under_another_tag(self, desk: Desk) -> None:
        await desk.measure("student", "step-000001", weights="one")
        first, second = await desk.measure("student", "step-000001", weights="two")
        assert (first.policy, first.tag) == ("student", "step-000001")
        assert (second.policy, second.tag) == ("student", f"step-000001@{second.job[:8]}")
        await desk.measure("student", "step-000001", weights="one")
        assert desk.played == []

    @pytest.mark.parametrize("name", ["null", "oracle"])
    async def test_what_cannot_go_otherwise_is_played_once(self, desk: Desk, name: str) -> None:
        rows = await desk.measure(name, "step-000001")
        assert await desk.measure(name, "step-000002") == rows
        assert desk.played == []
        assert desk.told.messages[-1] == (
            f"{name} (step-000002) is measured already, as {name} (step-000001), not repeated"
        )

    async def test_a_teacher_is_measured_at_every_moment_it_is_asked_for(self, desk: Desk) -> None:
        await desk.measure("teacher", "step-000001")
        assert len(await desk.measure("teacher", "step-000002")) == 2

    async def test_only_the_student_has_a_version(self, desk: Desk) -> None:
        await desk.measure("null")
        await desk.measure("openai:m", settings=ASKED)
        rows = await desk.measure("student", weights="w")
        assert [row.policy_version for row in rows] == [None, None, 3]
