"""One run from start to end; resuming and replaying are in test_loop_resume."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniverl_dist.errors import (
    DeadlineError,
    EmptyBatchError,
    PublishError,
    TeacherDropFractionError,
    TeacherError,
    TokenizerError,
    UpdateError,
)
from miniverl_dist.observability.run_dir import RecordFile
from miniverl_dist.ports import Assignment, PublishReceipt
from miniverl_dist.schemas.batch import SftBatch, TrainBatch, UpdateResult
from miniverl_dist.schemas.teacher import RefusalReason
from miniverl_dist.schemas.trajectory import Termination, Trajectory
from miniverl_dist.training.checkpoint import verify
from miniverl_dist.training.loop import Trainer
from tests.fake_world import World
from tests.fakes import FakeStudents, FakeTeacher, FakeWeightStore, run_config, trajectory
from tests.support.virtual_time import run_virtually

EVALUATION = {"before": False, "after": False, "baselines": []}


def positions(log: list[str], *lines: str) -> list[int]:
    """Where each line stands first; fails where one does not occur."""
    return [log.index(line) for line in lines]


def only(log: list[str], *kinds: str) -> list[str]:
    return [line for line in log if line.split(" ")[0] in kinds]


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


def play_of(**changes: Any) -> Callable[[Assignment, int], Trajectory]:
    return lambda place, member: trajectory(
        place=place, member=member, **({"reward": float(member)} | changes)
    )


class TestOrder:
    async def test_a_step_is_update_publish_advance_record_release(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(checkpoint={"every_n_steps": 1}))
        await world.trainer().run()
        kinds = ("update", "publish", "advance", "metrics", "assign", "save")
        assert only(world.log, *kinds)[:16] == [
            "publish 0",
            "save",  # the commit before the first step
            "assign 0",
            "assign 1",
            *("update", "publish 1", "advance 0,1", "metrics", "assign 2", "assign 3", "save"),
            *("update", "publish 2", "advance 2,3", "metrics", "assign 4"),
        ]

    async def test_a_batch_is_journalled_before_its_update(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(checkpoint={"every_n_steps": 2}))
        seen: list[list[str]] = []

        class Watching(FakeStudents):
            async def update(self, batch: TrainBatch) -> UpdateResult:
                folder = world.run.path / "journal"
                seen.append(sorted(path.name for path in folder.iterdir()))
                return await super().update(batch)

        world.students = Watching(world.log)
        await world.trainer().run()
        first, second = "step-000000.json", "step-000001.json"
        # A commit clears it: at the third step the first two are gone.
        assert seen == [[first], [first, second], ["step-000002.json"]]

    async def test_strictly_on_policy_nothing_is_sampled_under_older_weights(
        self, tmp_path: Path
    ) -> None:
        world = World(tmp_path)
        summary = await world.trainer().run()
        lines = only(world.log, "play", "publish")
        for step in range(3):
            played = [f"play 00000{2 * step + g}.0.{m}" for g in (0, 1) for m in (0, 1)]
            start = lines.index(f"publish {step}")
            assert sorted(lines[start + 1 : start + 5]) == played
        assert (summary.step, summary.policy_version, summary.is_finished) == (3, 3, True)
        assert [line["policy_lag_max"] for line in world.records(RecordFile.METRICS)] == [0, 0, 0]

    async def test_with_a_lag_rollouts_run_ahead_but_not_further(self, tmp_path: Path) -> None:
        loop = {"num_steps": 6, "max_policy_lag": 1}
        world = World(tmp_path, run_config(loop=loop))
        await world.trainer().run()
        lags = [line["policy_lag_max"] for line in world.records(RecordFile.METRICS)]
        assert max(lags) == 1
        for step, batch in enumerate(world.students.batches):
            assert batch.group_ids[0] == f"{2 * step:06d}.0"
        played = max(int(line[5:11]) for line in world.log if line.startswith("play"))
        assert played == 11

    async def test_several_optimizer_steps_count_as_versions(self, tmp_path: Path) -> None:
        config = run_config(loop={"num_minibatches": 2})
        world = World(tmp_path, config, num_optimizer_steps=2)
        assert (await world.trainer().run()).policy_version == 6
        assert only(world.log, "publish") == [f"publish {v}" for v in (0, 2, 4, 6)]
        assert config.policy_label == "minibatched"

    async def test_the_warm_up_comes_before_the_first_commit(self, tmp_path: Path) -> None:
        batch = SftBatch(np.arange(3), np.array([0, 3]), np.array([False, True, True]))
        student = {"warmup": {"num_steps": 2}}
        world = World(tmp_path, run_config(student=student), warmup=iter([batch, batch]))
        await world.trainer().run()
        start = [line for line in world.log if not line.startswith(("play", "assign"))][:8]
        assert start == [
            "publish 0",
            "sft",
            "sft",
            "finish_warmup",
            "publish 0",
            "evaluate",
            "save",
            "update",
        ]
        assert [e["step"] for e in world.events("warmup_step")] == [0, 1]
        assert [row["tag"] for row in world.events("evaluation_finished")] == ["warm"]

    async def test_the_warm_up_can_go_without_its_evaluation(self, tmp_path: Path) -> None:
        batch = SftBatch(np.arange(3), np.array([0, 3]), np.array([False, True, True]))
        off = {"before": False, "warm": False, "after": False, "baselines": []}
        config = run_config(student={"warmup": {"num_steps": 1}}, evaluation=off)
        world = World(tmp_path, config, warmup=iter([batch]))
        await world.trainer().run()
        assert world.events("warmup_finished")
        assert "evaluate" not in world.log

    async def test_without_a_warm_up_the_reference_is_frozen_all_the_same(
        self, tmp_path: Path
    ) -> None:
        world = World(tmp_path)
        await world.trainer().run()
        assert world.log.count("finish_warmup") == 1
        assert world.log.index("finish_warmup") < world.log.index("update")

    async def test_evaluations_are_made_when_due(self, tmp_path: Path) -> None:
        evaluation = {"every_n_steps": 2, "before": True, "after": True, "baselines": ["null"]}
        config = run_config(evaluation=evaluation, loop={"num_steps": 5})
        world = World(tmp_path, config)
        await world.trainer().run()
        tags = [(e["policy"], e["tag"], e["policy_version"]) for e in world.events() if "tag" in e]
        assert tags == [
            ("null", "before", None),
            ("student", "before", 0),
            ("student", "step-000002", 2),
            ("student", "step-000004", 4),
            ("student", "after", 5),
        ]


class TestRecords:
    async def test_every_step_leaves_a_line_its_trajectories_and_an_event(
        self, tmp_path: Path
    ) -> None:
        world = World(tmp_path)
        await world.trainer().run()
        lines = world.records(RecordFile.METRICS)
        assert [(line["step"], line["policy_version"]) for line in lines] == [
            (1, 1),
            (2, 2),
            (3, 3),
        ]
        assert [line["tail_calls_mean"] for line in lines] == [1.0, 2.0, 3.0]
        assert {line["loss"] for line in lines} == {0.5}
        told = [r["trajectory"]["trajectory_id"] for r in world.records(RecordFile.TRAJECTORIES)]
        assert told == [f"00000{g}.0.{m}" for g in range(6) for m in range(2)]
        assert [e["step"] for e in world.events("step_finished")] == [1, 2, 3]
        assert [e["event"] for e in world.events("run_started", "run_finished")] == [
            "run_started",
            "run_finished",
        ]

    async def test_old_checkpoints_are_pruned(self, tmp_path: Path) -> None:
        config = run_config(checkpoint={"every_n_steps": 1, "keep": 2}, loop={"num_steps": 4})
        world = World(tmp_path, config)
        await world.trainer().run()
        folder = world.run.path / "checkpoints"
        assert sorted(path.name for path in folder.iterdir()) == ["step-000003", "step-000004"]

    async def test_the_last_step_is_committed_whatever_the_interval(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(checkpoint={"every_n_steps": 2}))
        await world.trainer().run()
        state = verify(world.checkpoint(3)).state
        assert (state.step, state.policy_version, state.num_publishes, state.next_ticket) == (
            3,
            3,
            4,
            6,
        )
        assert state.curriculum == {"tail_calls": 4}
        sizes = {n: (world.run.path / n).stat().st_size for n in state.file_positions}
        assert state.file_positions == sizes
        assert set(sizes) == {"metrics.jsonl", "trajectories.jsonl", "token_analysis.jsonl"}

    async def test_refills_are_counted_for_the_step_they_belong_to(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            is_flat = place.attempt == 0 and place.ticket in (0, 1, 4)
            reward = 0.0 if is_flat else float(member)
            return trajectory(place=place, member=member, reward=reward)

        world = World(tmp_path, run_config(grpo={"zero_variance": "drop"}), play=play)
        await world.trainer().run()
        refilled = [line["num_refilled_groups"] for line in world.records(RecordFile.METRICS)]
        assert refilled == [2, 0, 1]
        assert world.recorder.counters["refilled_groups"] == 3
        assert {e["reason"] for e in world.events("group_dropped")} == {"zero variance"}

    async def test_peer_22_a_step_without_one_call_raises_an_alarm(self, tmp_path: Path) -> None:
        world = World(tmp_path, play=play_of(reward=0.93), config=run_config(loop={"num_steps": 2}))
        await world.trainer().run()
        assert [e["step"] for e in world.events("alarm")] == [1, 2]
        assert "no trajectory of this step made a call" in world.events("alarm")[0]["what"]
        busy = World(tmp_path / "busy")
        await busy.trainer().run()
        assert busy.events("alarm") == []


class TestEmptyBatches:
    def faults_until(self, ticket: int) -> Callable[[Assignment, int], Trajectory]:
        def play(place: Assignment, member: int) -> Trajectory:
            end = Termination.ENGINE_ERROR if place.ticket < ticket else Termination.FINAL_ANSWER
            return trajectory(place=place, member=member, reward=float(member), termination=end)

        return play

    async def test_many_in_a_row_are_an_error(self, tmp_path: Path) -> None:
        world = World(tmp_path, play=self.faults_until(10**9))
        with pytest.raises(EmptyBatchError, match=r"10 batches in a row .* \(4 harness faults"):
            await world.trainer().run()
        assert [e["in_a_row"] for e in world.events("batch_empty")] == list(range(1, 11))
        assert "update" not in world.log
        # Each of the 20 groups was tried once and refilled up to max_refills times.
        assert len(world.events("group_dropped")) == 20 * 4

    async def test_after_some_the_run_goes_on_to_all_its_steps(self, tmp_path: Path) -> None:
        world = World(tmp_path, play=self.faults_until(4))
        summary = await world.trainer().run()
        assert (summary.step, summary.is_finished) == (3, True)
        assert len(world.events("batch_empty")) == 2
        assert world.recorder.counters["empty_batches"] == 2
        assert only(world.log, "advance") == ["advance 4,5", "advance 6,7", "advance 8,9"]
        assert verify(world.checkpoint(3)).state.next_ticket == 10

    async def test_the_count_starts_anew_after_a_good_batch(self, tmp_path: Path) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            bad = (place.ticket // 2) % 3 != 2
            end = Termination.ENGINE_ERROR if bad else Termination.FINAL_ANSWER
            return trajectory(place=place, member=member, reward=float(member), termination=end)

        config = run_config(loop={"max_empty_batches": 3, "num_steps": 4})
        world = World(tmp_path, config, play=play)
        assert (await world.trainer().run()).step == 4


class TestStop:
    async def test_a_stop_while_waiting_ends_in_a_commit(self, tmp_path: Path) -> None:
        world = World(tmp_path)
        world.rollouts.gates[2, 0] = asyncio.Event()  # the second step never gets its first group
        trainer = world.trainer()
        running = asyncio.ensure_future(trainer.run())
        await until(lambda: "play 000002.0.0" in world.log)
        trainer.request_stop()
        summary = await running
        assert (summary.step, summary.is_finished) == (1, False)
        assert verify(world.checkpoint(1)).state.next_ticket == 2
        assert [e["step"] for e in world.events("stopped")] == [1]
        assert world.events("run_finished") == []
        assert world.log.count("update") == 1

    async def test_peer_36_a_stop_does_not_wait_for_a_slow_teacher(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(objective="grpo_opd"))
        world.teacher = FakeTeacher(world.log, gate=asyncio.Event())
        trainer = world.trainer()
        running = asyncio.ensure_future(trainer.run())
        await until(lambda: "score 000000.0.0" in world.log)
        trainer.request_stop()
        assert (await running).is_finished is False
        assert "score cancelled 000000.0.0" in world.log
        assert verify(world.checkpoint(0)).state.step == 0

    async def test_a_stop_during_an_update_finishes_the_step(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(evaluation=EVALUATION | {"after": True}))
        trainers: list[Trainer] = []

        class Stopping(FakeStudents):
            async def update(self, batch: TrainBatch) -> UpdateResult:
                trainers[0].request_stop()
                return await super().update(batch)

        world.students = Stopping(world.log)
        trainers.append(world.trainer())
        summary = await trainers[0].run()
        assert (summary.step, summary.policy_version) == (1, 1)
        assert verify(world.checkpoint(1)).state.policy_version == 1
        assert "evaluate" not in world.log  # only a finished run is measured as `after`


class TestFailures:
    async def run_with(self, world: World, students: FakeStudents) -> None:
        world.students = students
        await world.trainer().run()

    async def test_an_update_that_takes_too_long_loses_the_student(self, tmp_path: Path) -> None:
        class Slow(FakeStudents):
            async def update(self, batch: TrainBatch) -> UpdateResult:
                await asyncio.Event().wait()
                raise AssertionError

            async def rebuild(self) -> None:
                raise UpdateError("too many rebuilds")

        world = World(tmp_path, run_config(deadlines={"update_s": 0.02}))
        with pytest.raises(UpdateError, match="too many rebuilds"):
            await self.run_with(world, Slow([]))
        (lost,) = world.events("student_lost")
        assert lost["reason"] == "step 0: the update took longer than 0.02 s (deadlines.update_s)"

    async def test_an_update_that_fails_arrives_as_itself(self, tmp_path: Path) -> None:
        class Failing(FakeStudents):
            async def update(self, batch: TrainBatch) -> UpdateResult:
                raise UpdateError("rank 1 died")

        world = World(tmp_path)
        with pytest.raises(UpdateError, match="rank 1 died"):
            await self.run_with(world, Failing([]))
        assert world.records(RecordFile.METRICS) == []
        assert (world.run.path / "journal" / "step-000000.json").exists()

    def test_groups_that_do_not_come_are_a_deadline(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(deadlines={"take_s": 0.02, "generate_s": 0.01}))
        world.rollouts.gates[0, 0] = asyncio.Event()
        with pytest.raises(DeadlineError, match=r"only 1 of 2 groups arrived"):
            run_virtually(world.trainer().run())

    async def test_a_publish_that_nobody_confirms_ends_the_run(self, tmp_path: Path) -> None:
        class Refusing(FakeWeightStore):
            async def publish(self, policy_version: int) -> PublishReceipt:
                if policy_version:
                    raise PublishError("no engine confirmed policy version 1")
                return await super().publish(policy_version)

        world = World(tmp_path)
        world.weights = Refusing(world.log)
        with pytest.raises(PublishError):
            await world.trainer().run()
        assert only(world.log, "advance", "metrics") == []

    async def test_an_error_of_a_worker_ends_the_run_and_leaves_nothing_running(
        self, tmp_path: Path
    ) -> None:
        def play(place: Assignment, member: int) -> Trajectory:
            raise TokenizerError("id 9 is outside of the vocabulary")

        world = World(tmp_path, play=play)
        before = asyncio.all_tasks()
        with pytest.raises(TokenizerError, match="id 9"):
            await world.trainer().run()
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == before

    async def test_a_teacher_that_must_not_fail_ends_the_run(self, tmp_path: Path) -> None:
        teacher = {"url": "http://t", "rendering": "raw", "on_failure": "fail"}
        world = World(tmp_path, run_config(objective="grpo_opd", teacher=teacher))
        world.teacher = FakeTeacher(world.log, refuse=lambda told: RefusalReason.UNAVAILABLE)
        with pytest.raises(TeacherError, match="on_failure is `fail`"):
            await world.trainer().run()

    async def test_too_few_scores_end_the_run(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config(objective="grpo_opd"))
        world.teacher = FakeTeacher(world.log, refuse=lambda told: RefusalReason.TOO_LONG)
        with pytest.raises(TeacherDropFractionError, match="4 of 4"):
            await world.trainer().run()

    async def test_grpo_asks_no_teacher_although_there_is_one(self, tmp_path: Path) -> None:
        world = World(tmp_path, run_config())
        world.teacher = FakeTeacher(world.log)
        await world.trainer().run()
        assert only(world.log, "score") == []
