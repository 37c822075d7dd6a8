"""Who plays episodes: the student in training, and any policy in evaluation.

Every policy of an evaluation meets the same stage, tasks and seeds.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from actors.student_side import WRITE_CALLS, ActingModel, StudentSide, routing_shape, stage_for
from actors.teacher_files import TEACHER_FOLDER
from actors.teacher_side import teacher_chat, teacher_tokenizer
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import ConfigError
from miniverl_dist.generate_api.wire import SamplingParams
from miniverl_dist.ports import ChatFormat, Clock, RolloutSource
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import SamplingRecord
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from rollout_server.episode import EVALUATION_BUDGET, EpisodePlayer, EpisodeWatcher, Stage
from rollout_server.policies import EnginePolicy, Policy, null_policy, oracle_policy

if TYPE_CHECKING:
    from rollout_server.engines.base import Engine


EpisodeKind = Literal["training", "evaluation"]


def training_player(
    config: RunConfig,
    side: StudentSide,
    engine: Engine,
    clock: Clock,
    *,
    watcher: EpisodeWatcher | None = None,
) -> EpisodePlayer:
    """The student in training, sampled by ``engine``."""
    rollout = config.rollout
    sampling = SamplingParams(
        temperature=rollout.temperature, max_new_tokens=rollout.max_new_tokens
    )
    policy = EnginePolicy(
        engine,
        side.chat,
        sampling,
        other_stop_ids=side.other_stop_ids,
        deadline_s=config.deadlines.generate_s,
        routing=routing_shape(config),
    )
    return EpisodePlayer(side.stage, policy, seed=config.seed, clock=clock, watcher=watcher)


def evaluation_player(
    config: RunConfig, side: StudentSide, engine: Engine, clock: Clock
) -> EpisodePlayer:
    """The student in evaluation, sampled by ``engine``."""
    policy = EnginePolicy(
        engine,
        side.chat,
        _evaluation_sampling(config),
        other_stop_ids=side.other_stop_ids,
        deadline_s=config.deadlines.generate_s,
    )
    return _evaluation_player(config, side, policy, side.chat, config.student.model, clock)


def _evaluation_sampling(config: RunConfig) -> SamplingParams:
    return SamplingParams(
        temperature=config.evaluation.temperature, max_new_tokens=config.rollout.max_new_tokens
    )


def _evaluation_player(
    config: RunConfig,
    side: StudentSide,
    policy: Policy,
    chat: ChatFormat,
    acting: ActingModel,
    clock: Clock,
) -> EpisodePlayer:
    stage = stage_for(chat, side.environment, config, acting)
    return player_of(config, stage, policy, clock, config.rollout.max_new_tokens)


def player_of(
    config: RunConfig, stage: Stage, policy: Policy, clock: Clock, max_new_tokens: int
) -> EpisodePlayer:
    """Any policy in evaluation: seeds and budget are the same for all."""
    return EpisodePlayer(
        stage,
        policy,
        seed=derive_seed(config.seed, "evaluation"),
        clock=clock,
        budget=EVALUATION_BUDGET,
        sampling=SamplingRecord(
            temperature=config.evaluation.temperature, max_new_tokens=max_new_tokens
        ),
    )


class EvaluationSources:
    """Makes a `RolloutSource` for each policy that can be evaluated.

    Args:
        config: Of the run.
        side: The student's half.
        student: Plays the student in evaluation; None where it has not been built.
        run_dir: Where a fitted teacher lies.
        clock: For diagnostics.
    """

    def __init__(
        self,
        config: RunConfig,
        side: StudentSide,
        student: RolloutSource | None,
        run_dir: Path,
        clock: Clock,
    ) -> None:
        self._config, self._side, self._student = config, side, student
        self._run_dir, self._clock = run_dir, clock

    def by_name(self) -> Mapping[str, Callable[[], Awaitable[RolloutSource]]]:
        """Policy name -> maker of its source."""
        return {
            "student": self._the_student,
            "teacher": self._teacher,
            "null": self._null,
            "oracle": self._oracle,
        }

    async def _null(self) -> RolloutSource:
        return self._player(null_policy(self._side.chat), self._side.chat)

    async def _oracle(self) -> RolloutSource:
        return self._player(oracle_policy(self._side.chat, WRITE_CALLS), self._side.chat)

    async def _the_student(self) -> RolloutSource:
        if self._student is None:
            raise ConfigError("policy student: this evaluation was started without its weights")
        return self._student

    async def _teacher(self) -> RolloutSource:
        """The teacher acts in its own tokens and roles, with the student's wire format.

        Raises:
            ConfigError: this runtime can only score with it, not sample.
        """
        from actors.builds import folder_snapshot, toy_engine

        teacher = self._config.teacher
        if teacher is None or not isinstance(teacher.model, ToyModelConfig):
            raise ConfigError(f"policy teacher: {self._config.acting_teacher_problem}")
        tokenizer = teacher_tokenizer(teacher, self._run_dir)
        if not isinstance(tokenizer, SubVocabulary):
            raise ConfigError("teacher.fit is missing: a toy teacher must be fitted to act")
        chat = teacher_chat(teacher, tokenizer)
        engine = toy_engine(teacher.model, tokenizer, "teacher-0")
        await engine.load_weights(folder_snapshot(self._run_dir / TEACHER_FOLDER))
        policy = EnginePolicy(
            engine,
            chat,
            _evaluation_sampling(self._config),
            deadline_s=self._config.deadlines.generate_s,
        )
        return self._player(policy, chat, teacher.model)

    def _player(
        self, policy: Policy, chat: ChatFormat, acting: ActingModel | None = None
    ) -> EpisodePlayer:
        return _evaluation_player(
            self._config,
            self._side,
            policy,
            chat,
            acting or self._config.student.model,
            self._clock,
        )
