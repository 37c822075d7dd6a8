"""A whole run in simulated time: real loop, buffer, workers and records around timed fakes.

Episodes have long-tailed durations and share the engines' slots; the teacher scores some at a
time; the student takes time by the token. Durations follow from the seed and the episode's place,
so every mode of the loop plays the very same episodes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from miniverl_dist.config.models import RunConfig
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory
from miniverl_dist.ports import Assignment, PublishReceipt, ScoredGroup
from miniverl_dist.schemas.batch import TrainBatch, UpdateResult
from miniverl_dist.schemas.evaluation import EvaluationReport
from miniverl_dist.schemas.teacher import TeacherResult
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.training.evaluator import Evaluator
from miniverl_dist.training.loop import Trainer, TrainerPorts
from miniverl_dist.training.recorder import Recorder
from tests.fake_world import DIGEST, byte_ends
from tests.fakes import FakeCurriculum, FakeStudents, FakeTeacher, run_config, trajectory
from tests.support.virtual_time import VirtualClock, run_virtually


@dataclass(frozen=True)
class Timing:
    """Simulated seconds, and what the machines can do at a time."""

    mean_episode_s: float = 60.0
    sigma: float = 0.8
    """Of the lognormal: the slowest of 128 takes about six times the mean."""
    num_slots: int = 128
    """Episodes that the engines decode at once."""
    teacher_width: int = 24
    score_s: float = 2.0
    gradient_s: float = 0.5
    """Of one trajectory of mean length; proportional to the tokens."""
    step_s: float = 2.0
    publish_s: float = 3.0
    tokens_per_s: float = 0.5
    """Sampled tokens in the records: few, to keep the simulation quick."""

    def episode_s(self, seed: int, ticket: int, member: int) -> float:
        """Duration of an episode."""
        draw = np.random.default_rng([seed, ticket, member]).standard_normal()
        mu = np.log(self.mean_episode_s) - self.sigma**2 / 2
        return float(np.exp(mu + self.sigma * draw))

    def num_tokens(self, episode_s: float) -> int:
        """Tokens that an episode samples, its turn end included."""
        return max(2, round(episode_s * self.tokens_per_s))

    def gradients_s(self, num_tokens: int) -> float:
        """Forward and backward over so many tokens."""
        return self.gradient_s * num_tokens / (self.mean_episode_s * self.tokens_per_s)


@dataclass
class SimulatedEngines:
    """`ports.RolloutSource`."""

    timing: Timing
    seed: int
    store: SimulatedStore

    def __post_init__(self) -> None:
        self._slots = asyncio.Semaphore(self.timing.num_slots)

    async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
        async with self._slots:
            version = self.store.version
            seconds = self.timing.episode_s(self.seed, assignment.ticket, member)
            await asyncio.sleep(seconds)
        return trajectory(
            "x" * (self.timing.num_tokens(seconds) - 1),
            place=assignment,
            member=member,
            reward=float(member),
            version=version,
        )


class SteadyCurriculum(FakeCurriculum):
    """However many steps there are, the task stays as it is."""

    def advance(self, groups: Sequence[ScoredGroup]) -> None:
        pass


class SimulatedTeacher(FakeTeacher):
    """`ports.TeacherScorer`, so many at a time."""

    def __init__(self, timing: Timing) -> None:
        super().__init__()
        self._timing, self._width = timing, asyncio.Semaphore(timing.teacher_width)

    async def score(self, told: Trajectory) -> TeacherResult:
        async with self._width:
            await asyncio.sleep(self._timing.score_s)
        return await super().score(told)


class SimulatedStudents(FakeStudents):
    """`ports.StudentPool` that takes its time."""

    def __init__(self, timing: Timing) -> None:
        super().__init__([])
        self._timing = timing
        self._has_parts = False

    async def update(self, batch: TrainBatch) -> UpdateResult:
        await self.accumulate(batch, 0)
        return await self.commit_accumulated()

    async def accumulate(self, batch: TrainBatch, place: int) -> None:
        await asyncio.sleep(self._timing.gradients_s(batch.num_loss_tokens[0]))
        self._has_parts = True

    async def commit_accumulated(self) -> UpdateResult:
        assert self._has_parts
        await asyncio.sleep(self._timing.step_s)
        self._has_parts = False
        self.policy_version += 1
        return UpdateResult(self.policy_version, 1, {"loss": 0.5})


@dataclass
class SimulatedStore:
    """`ports.WeightStore`."""

    timing: Timing
    version: int = 0
    published_s: list[float] = field(default_factory=list)
    """When each publish was confirmed."""

    async def publish(self, policy_version: int) -> PublishReceipt:
        await asyncio.sleep(self.timing.publish_s)
        self.version = policy_version
        self.published_s.append(asyncio.get_running_loop().time())
        return PublishReceipt(policy_version, "0" * 64, ("engine-0",))


@dataclass(frozen=True)
class Simulated:
    """When what happened, in simulated seconds."""

    published_s: tuple[float, ...]
    """The start of the run first, then one per step."""
    max_lag: int

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return (self.published_s[-1] - self.published_s[0]) / (len(self.published_s) - 1)


def simulate(folder: Path, timing: Timing, seed: int, **loop: object) -> Simulated:
    """Run the real loop.

    Args:
        folder: For the run directory.
        timing: Of everything.
        seed: Of the durations.
        loop: Fields of ``LoopConfig``; ``num_workers`` is that of ``rollout``.
    """
    num_workers = loop.pop("num_workers")
    patience = {"take_s": 1e6, "update_s": 1e6, "publish_s": 1e6, "generate_s": 1e6}
    config = run_config(
        objective="grpo_opd",
        loop=loop,
        rollout={"num_workers": num_workers},
        deadlines=patience,
        checkpoint={"every_n_steps": 10**6},
    )
    return run_virtually(_run(folder, timing, seed, config))


async def _run(folder: Path, timing: Timing, seed: int, config: RunConfig) -> Simulated:
    clock, store = VirtualClock(), SimulatedStore(timing)
    recorder = Recorder(RunDirectory.create(folder), SilentProgress(), clock)
    ports = TrainerPorts(
        students=SimulatedStudents(timing),
        weights=store,
        rollouts=SimulatedEngines(timing, seed, store),
        teacher=SimulatedTeacher(timing),
        curriculum=SteadyCurriculum([]),
        clock=clock,
        byte_ends=byte_ends,
    )
    report = EvaluationReport(
        environment="fake", task_ids=("a",), trains_on_eval_tasks=False, temperature=1.0, rows=()
    )
    evaluator = Evaluator({}, [], config.evaluation, report, recorder, deadline_s=10.0)
    await Trainer(config, ports, evaluator, recorder, config_digest=DIGEST).run()
    lags = [line["policy_lag_max"] for line in recorder.run.read_jsonl(RecordFile.METRICS)]
    return Simulated(tuple(store.published_s), max(lags))
