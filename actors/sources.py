"""Evaluation sources: any policy on the same stage, tasks and seeds."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from actors.student_side import WRITE_CALLS, StudentSide, stage_for
from actors.teacher_side import TEACHER_FOLDER, teacher_tokenizer
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import ModelConfig, ToyModelConfig
from miniverl_dist.errors import ConfigError
from miniverl_dist.generate_api.wire import SamplingParams
from miniverl_dist.ports import ChatFormat, Clock, RolloutSource
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import SamplingRecord
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from rollout_server.episode import EVALUATION_BUDGET, EpisodePlayer
from rollout_server.policies import EnginePolicy, Policy, null_policy, oracle_policy
from teacher_server.rendering import DeepSeekV4ChatFormat

if TYPE_CHECKING:
    from rollout_server.engines.base import Engine


class EvaluationSources:
    """Makes a `RolloutSource` for each policy that can be evaluated."""

    def __init__(
        self, config: RunConfig, side: StudentSide, engine: Engine, run_dir: Path, clock: Clock
    ) -> None:
        self._config, self._side, self._engine = config, side, engine
        self._run_dir, self._clock = run_dir, clock
        evaluation, rollout = config.evaluation, config.rollout
        self._sampling = SamplingParams(
            temperature=evaluation.temperature, max_new_tokens=rollout.max_new_tokens
        )

    def by_name(self) -> Mapping[str, Callable[[], Awaitable[RolloutSource]]]:
        """Policy name -> maker of its source."""
        return {
            "student": self._student,
            "teacher": self._teacher,
            "null": self._null,
            "oracle": self._oracle,
        }

    async def _null(self) -> RolloutSource:
        return self._player(null_policy(self._side.chat), self._side.chat)

    async def _oracle(self) -> RolloutSource:
        return self._player(oracle_policy(self._side.chat, WRITE_CALLS), self._side.chat)

    async def _student(self) -> RolloutSource:
        return self._player(self._engine_policy(self._engine, self._side.chat), self._side.chat)

    async def _teacher(self) -> RolloutSource:
        """The teacher acts in its own tokens and roles, with the student's wire format.

        Raises:
            ConfigError: this runtime can only score with it, not sample.
        """
        from actors.student_rank import folder_snapshot, toy_engine

        teacher = self._config.teacher
        if teacher is None or not isinstance(teacher.model, ToyModelConfig):
            raise ConfigError(
                "the teacher can be evaluated as a policy only where it is a toy model in this "
                "process; a teacher behind `url` or an HF model is asked for scores only"
            )
        tokenizer = teacher_tokenizer(teacher, self._run_dir)
        if not isinstance(tokenizer, SubVocabulary):
            raise ConfigError("teacher.fit is missing: a toy teacher must be fitted to act")
        chat = DeepSeekV4ChatFormat(tokenizer)
        engine = toy_engine(teacher.model, tokenizer, "teacher-0")
        await engine.load_weights(folder_snapshot(self._run_dir / TEACHER_FOLDER))
        return self._player(self._engine_policy(engine, chat), chat, teacher.model)

    def _engine_policy(self, engine: Engine, chat: ChatFormat) -> Policy:
        stops = self._side.other_stop_ids if chat is self._side.chat else ()
        return EnginePolicy(
            engine,
            chat,
            self._sampling,
            other_stop_ids=stops,
            deadline_s=self._config.deadlines.generate_s,
        )

    def _player(
        self, policy: Policy, chat: ChatFormat, model: ModelConfig | None = None
    ) -> EpisodePlayer:
        acting = model or self._config.student.model
        return EpisodePlayer(
            stage_for(chat, self._side.environment, self._config, acting),
            policy,
            seed=derive_seed(self._config.seed, "evaluation"),
            clock=self._clock,
            budget=EVALUATION_BUDGET,
            sampling=SamplingRecord(
                temperature=self._sampling.temperature,
                max_new_tokens=self._sampling.max_new_tokens,
            ),
        )
