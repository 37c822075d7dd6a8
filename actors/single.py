"""One process: every part of a run in one plain object.

`actors.host` runs the same class in a Ray actor; it knows nothing of that. Torch is imported when a
part that needs it is built, so that commands which only read a run stay light.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.demonstrations import stored_episodes
from actors.roles import role_graph
from actors.sources import EvaluationSources, evaluation_player, training_player
from actors.student_pool import InProcessStudentPool
from actors.student_side import (
    STUDENT_VOCABULARY_FILE,
    StudentSide,
    declare_vocabulary,
    has_declared_vocabulary,
    sft_seed,
    student_examples,
    student_side,
    student_tokenizer,
    warmup_traces,
)
from actors.supervisor import RestartBudget
from actors.teacher_files import TEACHER_SEAL_FILE, keep_teacher
from actors.teacher_scoring import prefix_scorer, teacher_scorer
from actors.teacher_side import fit_teacher, fit_traces, teacher_tokenizer
from actors.warm_start import take_over_student, take_over_teacher
from miniverl_dist.alignment.spans import student_byte_ends
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.config.load import LoadedConfig
from miniverl_dist.config.recipe import TaskSplit
from miniverl_dist.config.roles import SftConfig
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.observability.events import Event
from miniverl_dist.ports import RolloutSource, StudentPool, TeacherScorer, WeightStore
from miniverl_dist.schemas.batch import IntArray, SftBatch
from miniverl_dist.schemas.eval_settings import recipe_settings
from miniverl_dist.schemas.evaluation import EvaluationReport, TailCalls
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from miniverl_dist.training.evaluate import assignments
from miniverl_dist.training.evaluator import Evaluator, read_evaluation
from miniverl_dist.training.loop import Trainer, TrainerPorts
from miniverl_dist.training.recorder import Recorder
from miniverl_dist.training.sft import sft_batches
from miniverl_dist.training.weight_sync import DirectWeightStore
from rollout_server.curriculum import ReverseK
from rollout_server.engines.restarted import RestartableEngine, RestartedEngine

if TYPE_CHECKING:
    from actors.lab_builds import LabParts
    from miniverl_dist.backends.hf_teacher import BackboneTeacher
    from miniverl_dist.schemas.teacher import TeacherRefusal
    from rollout_server.engines.base import Engine
    from rollout_server.episode import EpisodeWatcher


@dataclass(frozen=True)
class Parts:
    """What one open run consists of."""

    ports: TrainerPorts
    evaluator: Evaluator


class SingleActor:
    """Builds the parts of one run around its run directory."""

    def __init__(self, loaded: LoadedConfig, recorder: Recorder) -> None:
        self._loaded, self._config = loaded, loaded.config
        self._recorder = recorder
        self._run_dir: Path = recorder.run.path
        self._clock = SystemClock()

    async def prepare(self, *, with_teacher: bool = True, with_student: bool = True) -> None:
        """Make what must be there before anything else: vocabularies and the fitted teacher.

        What is there already is left alone, so that a resumed run uses the same.

        Args:
            with_teacher: False where nothing will ask the teacher (an evaluation of others).
            with_student: False where nothing will ask the student; its tokenizer is needed always.
        """
        if with_student or with_teacher:
            from actors.builds import set_num_threads

            set_num_threads(self._config)
        if with_student or has_declared_vocabulary(self._config):
            take_over_student(self._config, self._run_dir)
        path = self._run_dir / STUDENT_VOCABULARY_FILE
        if has_declared_vocabulary(self._config) and not path.exists():
            self._recorder.progress.phase("declaring the student's vocabulary")
            (await declare_vocabulary(self._config, self._clock)).save(path)
        if with_student:
            from actors.builds import prepare_student

            prepare_student(self._config, self.tokenizer, self._run_dir)
        teacher = self._config.teacher if with_teacher else None
        if with_teacher:
            keep_teacher(self._config, self._run_dir)
        is_fitted = (self._run_dir / TEACHER_SEAL_FILE).exists()  # written last
        if teacher is None or teacher.fit is None or is_fitted:
            return
        if not take_over_teacher(self._config, teacher, self._run_dir):
            await self._fit_teacher(teacher.fit)

    async def _fit_teacher(self, fit: SftConfig) -> None:
        traces = await fit_traces(self._config, self.side, fit, self._clock)
        self._recorder.progress.phase("fitting the toy teacher", fit.num_steps)
        last: dict[str, float] = {}

        def on_step(step: int, metrics: dict[str, float]) -> None:
            last.update(metrics)
            self._recorder.progress.advance(1, f"loss {metrics['loss']:.3f}")

        fit_teacher(self._config, self.side, traces, self._run_dir, on_step)
        self._recorder.event(Event.TEACHER_FITTED, num_steps=fit.num_steps, **last)

    @cached_property
    def tokenizer(self) -> TokenizerLike:
        """The student's tokenizer, or the part of it that the run declared."""
        return student_tokenizer(self._config, self._run_dir)

    @cached_property
    def side(self) -> StudentSide:
        """The student's half of the run."""
        return student_side(self._config, self.tokenizer)

    def byte_ends(self, span_token_ids: Sequence[int]) -> IntArray:
        """[S] byte ends of a sampled span; turn ends count where the teacher has them too."""
        teacher = self._config.teacher
        has_turn_ends = teacher is not None and teacher.rendering != "raw"
        turn_end = self.side.chat.turn_end_id if has_turn_ends else None
        return student_byte_ends(span_token_ids, self.tokenizer, turn_end)

    @asynccontextmanager
    async def reserved(self) -> AsyncIterator[None]:
        """Hold what the run needs beside this process, for the length of the block: nothing.

        Entered before anything is prepared, so that what cannot be had fails at once.
        """
        yield

    @asynccontextmanager
    async def open(
        self, *, tail_calls: TailCalls | None = None, with_scorer: bool = True
    ) -> AsyncIterator[Parts]:
        """Everything behind its port; leaving the block closes engines and sessions.

        Args:
            tail_calls: Horizon of evaluations instead of the config's.
            with_scorer: False where nothing will be trained.
        """
        from actors.builds import build_backbone_teacher, build_engine, build_student

        config, clock = self._config, self._clock
        async with AsyncExitStack() as stack:
            engine = self._restarted(
                build_engine(config, self.tokenizer, self._run_dir, "engine-0")
            )
            stack.push_async_callback(engine.close)
            await engine.start()
            shared = build_backbone_teacher(config, self.tokenizer) if with_scorer else None
            lab = self._lab(shared) if with_scorer else None
            rank = build_student(
                config,
                self.tokenizer,
                self._run_dir,
                RankAddress(),
                rows=None if lab is None else lab.rows,
                backbone_teacher=shared,
            )
            stack.callback(rank.close)
            students = InProcessStudentPool(rank)
            teacher, prefixes = None, None
            if with_scorer and config.uses_teacher and config.teacher is not None:
                prefixes = prefix_scorer(config, self.side, self._run_dir, clock)
                if prefixes is not None:
                    stack.callback(self._tell_prefixes, prefixes.counts)
                    stack.push_async_callback(prefixes.close)
                teacher = await stack.enter_async_context(
                    teacher_scorer(
                        config.teacher,
                        self.side,
                        self._run_dir,
                        clock,
                        tell=self._tell,
                        kept_scores=prefixes,
                        backbone=shared,
                    )
                )
            weights = DirectWeightStore(
                students.snapshot,
                [engine],
                deadline_s=config.deadlines.publish_s,
                on_quarantine=self._quarantined,
            )
            player = await self._player(engine, prefixes, is_trained=with_scorer)
            ports = replace(
                self._ports(students, weights, player, teacher),
                targets=None if lab is None else lab.targets,
            )
            acting = evaluation_player(config, self.side, engine, clock)
            yield Parts(ports, self._evaluator(acting, tail_calls))

    async def _player(
        self, engine: Engine, watcher: EpisodeWatcher | None, *, is_trained: bool
    ) -> RolloutSource:
        """Who plays what is trained on: the student, or nobody where episodes are stored.

        An evaluation asks for none: it can do without the stored ones.
        """
        told = self._config.demonstrations if is_trained else None
        if told is None:
            return training_player(self._config, self.side, engine, self._clock, watcher=watcher)
        return await stored_episodes(self._config, told, self.side, self._clock, self._run_dir)

    def _lab(self, backbone: BackboneTeacher | None) -> LabParts | None:
        """Row loss and target source; None under an objective without whole distributions."""
        if self._config.row_loss is None:
            return None
        from actors.builds import student_head
        from actors.lab_builds import build_lab

        def refused(refusal: TeacherRefusal) -> None:
            self._recorder.count("targets_refused")
            self._recorder.event(
                Event.TARGETS_REFUSED,
                trajectory_id=refusal.trajectory_id,
                reason=refusal.reason.value,
                detail=refusal.detail,
            )

        vocabulary, student_bytes = student_head(self._config, self.tokenizer, self._run_dir)
        lab = build_lab(
            self._config,
            self.side,
            vocabulary,
            self._run_dir,
            student_bytes=student_bytes,
            on_refused=refused,
            backbone=backbone,
        )
        if lab is not None and lab.memory is not None:
            self._recorder.event(
                Event.MEMORY_CHOSEN, strategy=lab.memory.strategy, reason=lab.memory.reason
            )
        return lab

    def _ports(
        self,
        students: StudentPool,
        weights: WeightStore,
        rollouts: RolloutSource,
        teacher: TeacherScorer | None,
    ) -> TrainerPorts:
        return TrainerPorts(
            students=students,
            weights=weights,
            rollouts=rollouts,
            teacher=teacher,
            curriculum=ReverseK(
                self.side.environment.tasks(),
                self.side.train_ids,
                self._config.curriculum,
                seed=self._config.seed,
            ),
            clock=self._clock,
            byte_ends=self.byte_ends,
        )

    def _restarted(self, engine: Engine) -> Engine:
        """An engine with a server of its own gets restarts."""
        if not isinstance(engine, RestartableEngine):
            return engine
        budget = RestartBudget(self._config.cluster, self._clock)

        def tell(name: str, reason: str) -> None:
            self._tell(Event.ENGINE_LOST if reason else Event.ENGINE_RESTARTED, name, reason)

        return RestartedEngine(engine, budget.spend, tell)

    def _tell(self, event: Event, server: str, reason: str) -> None:
        self._recorder.event(event, engine=server, reason=reason)

    def _tell_prefixes(self, counts: Mapping[str, int]) -> None:
        self._recorder.event(Event.PREFIXES_SCORED, **counts)

    def _quarantined(self, name: str, reason: str) -> None:
        self._recorder.event(Event.ENGINE_QUARANTINED, engine=name, reason=reason)

    def evaluator_alone(self, tail_calls: TailCalls | None) -> Evaluator:
        """Evaluations without the student: nothing of it is built or loaded."""
        return self._evaluator(None, tail_calls)

    def _evaluator(self, student: RolloutSource | None, tail_calls: TailCalls | None) -> Evaluator:
        """Evaluations of this run; rows that eval.json holds already are kept."""
        config, side = self._config.evaluation, self.side
        if tail_calls is not None:
            config = config.model_copy(update={"tail_calls": tail_calls})
        places = assignments(side.environment.tasks(), side.eval_ids, config.tail_calls)
        report = read_evaluation(self._recorder.run) or self.empty_evaluation()
        if not report.settings:  # of an earlier version, under this very config
            report = report.model_copy(update={"settings": recipe_settings(self._config)})
        sources = EvaluationSources(self._config, side, student, self._run_dir, self._clock)
        return Evaluator(
            sources.by_name(),
            places,
            config,
            report,
            self._recorder,
            deadline_s=self._config.deadlines.evaluate_s,
            identity=self._loaded.digest,
        )

    def empty_evaluation(self) -> EvaluationReport:
        """The report before its first row."""
        side, tasks = self.side, self.side.environment.tasks()
        chosen, doubtful = self._config.tasks, self._config.evaluation.doubtful_ids
        return EvaluationReport(
            environment=side.environment.name,
            task_ids=side.eval_ids,
            trains_on_eval_tasks=bool(set(side.train_ids) & set(side.eval_ids)),
            temperature=self._config.evaluation.temperature,
            rows=(),
            split=chosen.split if isinstance(chosen, TaskSplit) else "ids",
            classes={task_id: tasks[task_id].classes for task_id in side.eval_ids},
            categories=_named(side.eval_ids, lambda task_id: tasks[task_id].category),
            families=_named(side.eval_ids, lambda task_id: tasks[task_id].family),
            doubtful_ids=tuple(i for i in side.eval_ids if i in doubtful),
            doubtful_source=self._config.evaluation.doubtful_source,
            settings=recipe_settings(self._config),
        )

    async def trainer(self, parts: Parts, *, with_warmup: bool) -> Trainer:
        """The one trainer, on this runtime's parts.

        Args:
            parts: What `open` gave.
            with_warmup: False for a run that has a commit: its warm-up lies behind it, and its
                traces need not be played again.
        """
        return Trainer(
            self._config,
            parts.ports,
            parts.evaluator,
            self._recorder,
            config_digest=self._loaded.digest,
            warmup=await self._warmup_batches() if with_warmup else None,
        )

    def roles(self) -> dict[str, Any]:
        """Who plays which role, with tokenizers and restricted softmaxes; for the manifest."""
        own, weights = self.tokenizer, role_graph(self._config).by_role
        student = _role(self._config.student.model.kind, own.name, own.fingerprint, own)
        roles: dict[str, Any] = {"student": student | weights["actor"].model_dump()}
        if "reference" in weights:
            roles["reference"] = student | weights["reference"].model_dump()
        teacher = self._config.teacher
        if teacher is not None:
            tokenizer = teacher_tokenizer(teacher, self._run_dir)
            kind = teacher.model.kind if teacher.model is not None else "url"
            role = _role(kind, tokenizer.name, tokenizer.fingerprint, tokenizer)
            roles["teacher"] = role | weights["teacher"].model_dump()
        return roles

    async def _warmup_batches(self) -> Iterator[SftBatch] | None:
        student = self._config.student
        warmup = None if student.warm_start is not None else student.warmup
        if warmup is None or warmup.num_steps == 0:
            return None
        traces = await warmup_traces(
            self._config, self.side.stage, self.side.train_ids, self._clock
        )
        return sft_batches(
            student_examples(traces),
            warmup,
            seed=sft_seed(self._config, "student"),
            replacement_ids=_known_ids(self.tokenizer),
        )


def _named(task_ids: Sequence[str], name: Callable[[str], str]) -> dict[str, str]:
    """Task id -> name, without empty names."""
    return {task_id: found for task_id in task_ids if (found := name(task_id))}


def _known_ids(tokenizer: TokenizerLike) -> Sequence[int]:
    return tokenizer.ids if isinstance(tokenizer, SubVocabulary) else range(tokenizer.vocab_size)


def _role(kind: str, tokenizer: str, fingerprint: str, vocabulary: TokenizerLike) -> dict[str, Any]:
    restricted = None
    if isinstance(vocabulary, SubVocabulary):
        restricted = {"num_ids": len(vocabulary.ids), "vocab_size": vocabulary.base.vocab_size}
    return {
        "kind": kind,
        "tokenizer": tokenizer,
        "fingerprint": fingerprint,
        "restricted_softmax": restricted,
    }
