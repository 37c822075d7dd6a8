"""A whole run on fakes: real loop, buffer, workers, journal and records; nothing else is real."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from miniverl_dist.alignment.spans import student_byte_ends
from miniverl_dist.config.models import RunConfig
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.observability.run_dir import EVALUATION, RecordFile, RunDirectory
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.batch import IntArray, SftBatch
from miniverl_dist.schemas.evaluation import EvaluationReport
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.training.buffer import BufferSizes, GroupBuffer
from miniverl_dist.training.evaluator import Evaluator
from miniverl_dist.training.loop import Trainer, TrainerPorts
from miniverl_dist.training.recorder import Recorder
from miniverl_dist.training.workers import RolloutWorkers
from tests.fakes import (
    FakeClock,
    FakeCurriculum,
    FakeRollouts,
    FakeStudents,
    FakeTeacher,
    FakeWeightStore,
    Log,
    PlainChat,
    run_config,
)

CHAT = PlainChat()
DIGEST = "d" * 64


def byte_ends(span_token_ids: Sequence[int]) -> IntArray:
    """[S] of `PlainChat`'s spans, the turn end as one virtual byte."""
    return student_byte_ends(span_token_ids, CHAT.tokenizer, CHAT.turn_end_id)


class LoggedRun(RunDirectory):
    """A run directory that says in the log when a record is written."""

    log: Log

    def append(self, name: str, record: Any) -> None:
        super().append(name, record)
        if name == RecordFile.METRICS:
            self.log.append("metrics")


@dataclass
class World:
    """One process's view of a run; another `World` on the same folder resumes it."""

    folder: Path
    config: RunConfig = field(default_factory=run_config)
    play: Callable[[Assignment, int], Trajectory] | None = None
    num_optimizer_steps: int = 1
    warmup: Iterator[SftBatch] | None = None
    log: Log = field(default_factory=list)
    curriculum: Any = None
    teacher: FakeTeacher | None = None

    def __post_init__(self) -> None:
        path = self.folder / "run"
        is_new = not path.exists()
        self.run = LoggedRun.create(path) if is_new else LoggedRun.open(path, writable=True)
        self.run.log = self.log
        self.clock = FakeClock()
        self.recorder = Recorder(self.run, SilentProgress(), self.clock)
        self.students = FakeStudents(self.log, num_optimizer_steps=self.num_optimizer_steps)
        self.weights = FakeWeightStore(self.log)
        self.rollouts = FakeRollouts(self.log, lambda: self.students.policy_version, self.play)
        self.curriculum = self.curriculum or FakeCurriculum(self.log)
        if self.teacher is None and self.config.uses_teacher:
            self.teacher = FakeTeacher(self.log)

    def trainer(self) -> Trainer:
        ports = TrainerPorts(
            students=self.students,
            weights=self.weights,
            rollouts=self.rollouts,
            teacher=self.teacher,
            curriculum=self.curriculum,
            clock=self.clock,
            byte_ends=byte_ends,
        )
        return Trainer(
            self.config,
            ports,
            self.evaluator(),
            self.recorder,
            config_digest=DIGEST,
            warmup=self.warmup,
        )

    def evaluator(self) -> Evaluator:
        async def student() -> FakeRollouts:
            self.log.append("evaluate")
            return FakeRollouts([], lambda: self.students.policy_version)

        report = EvaluationReport(
            environment="fake",
            task_ids=("a",),
            trains_on_eval_tasks=False,
            temperature=1.0,
            rows=(),
        )
        if (self.run.path / EVALUATION).exists():
            report = EvaluationReport.model_validate_json(self.run.read_bytes(EVALUATION))
        place = Assignment(ticket=0, task_id="a", prefix_calls=0, tail_calls=1)
        return Evaluator(
            {"student": student, "null": student},
            [place],
            self.config.evaluation,
            report,
            self.recorder,
            deadline_s=10.0,
        )

    def workers(self, buffer: GroupBuffer) -> RolloutWorkers:
        return RolloutWorkers(
            buffer, self.rollouts, self.teacher, self.config, self.recorder, self.clock
        )

    def buffer(self, **changes: Any) -> GroupBuffer:
        loop = self.config.loop
        sizes = BufferSizes(
            loop.num_groups, loop.max_policy_lag, self.config.grpo.max_refills, take_deadline_s=5.0
        )
        return GroupBuffer(self.curriculum, sizes, **changes)

    def records(self, file: RecordFile) -> list[dict[str, Any]]:
        return self.run.read_jsonl(file)

    def events(self, *names: str) -> list[dict[str, Any]]:
        """Event lines, of these names only."""
        lines = self.records(RecordFile.EVENTS)
        return [line for line in lines if not names or line["event"] in names]

    def checkpoint(self, step: int) -> Path:
        return self.run.path / "checkpoints" / f"step-{step:06d}"
