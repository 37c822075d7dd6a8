"""RunConfig: one recipe, checked as a whole before anything is loaded."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from miniverl_dist.config.base import ConfigModel, PositiveInt
from miniverl_dist.config.cluster import ClusterConfig, PublishConfig, Runtime
from miniverl_dist.config.environments import EnvironmentConfig
from miniverl_dist.config.lab import (
    DemonstrationConfig,
    DistillConfig,
    MemoryConfig,
    SelectionConfig,
)
from miniverl_dist.config.recipe import (
    BfclConfig,
    CheckpointConfig,
    CurriculumConfig,
    DeadlineConfig,
    EvaluationConfig,
    GrpoConfig,
    LoopConfig,
    LossConfig,
    OpdConfig,
    OptimConfig,
    RolloutConfig,
    SGLangEngineConfig,
    TaskIds,
    TaskSplit,
)
from miniverl_dist.config.roles import (
    NATIVE_TOKENIZERS,
    BackboneTeacherConfig,
    HFStudentConfig,
    MegatronModelConfig,
    StudentConfig,
    TeacherConfig,
    ToyModelConfig,
)
from miniverl_dist.config.tracking import TrackingConfig
from miniverl_dist.config.unused import unused_problem

Objective = Literal["sft", "offline_kd", "opd", "grpo", "grpo_opd"]


class RunConfig(ConfigModel):
    """One training run."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)]
    """Names the run directory below ``runs/``."""
    seed: int = 0
    runtime: Runtime = "inprocess"
    """``inprocess``: this process; ``single_actor``: one Ray actor; ``cluster``: pools of actors.
    The trainer is the same in all three."""
    torch_threads: PositiveInt = 1
    objective: Objective = "grpo_opd"
    environment: EnvironmentConfig = BfclConfig()
    tasks: Annotated[TaskIds | TaskSplit, Field(discriminator="kind")]
    student: StudentConfig
    teacher: TeacherConfig | None = None
    curriculum: CurriculumConfig = CurriculumConfig()
    rollout: RolloutConfig = RolloutConfig()
    grpo: GrpoConfig = GrpoConfig()
    opd: OpdConfig | None = None
    distill: DistillConfig | None = None
    """Compare whole distributions: the loss of ``offline_kd``, and elsewhere instead of ``opd``."""
    selection: SelectionConfig = SelectionConfig()
    memory: MemoryConfig = MemoryConfig()
    demonstrations: DemonstrationConfig | None = None
    """What ``sft`` and ``offline_kd`` learn from."""
    loss: LossConfig = LossConfig()
    optim: OptimConfig = OptimConfig()
    loop: LoopConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    deadlines: DeadlineConfig = DeadlineConfig()
    cluster: ClusterConfig = ClusterConfig()
    publish: PublishConfig = PublishConfig()
    tracking: tuple[TrackingConfig, ...] = ()
    """Other places where the run's numbers can be looked at; the run directory has them all."""

    @property
    def uses_teacher(self) -> bool:
        """Whether training asks the teacher for scores of the tokens that were sampled."""
        return self.opd is not None

    @property
    def uses_targets(self) -> bool:
        """Whether training asks the teacher for whole distributions."""
        return self.distill is not None and self.distill.needs_teacher

    @property
    def row_loss(self) -> DistillConfig | None:
        """The loss of single rows: ``distill``, or the written tokens' own under ``sft``."""
        if self.objective == "sft" and self.distill is None:
            return DistillConfig(divergence="sampled_nll")
        return self.distill

    @property
    def is_online(self) -> bool:
        """Whether the student samples what it is trained on."""
        return self.objective not in ("sft", "offline_kd")

    @property
    def uses_group_advantage(self) -> bool:
        """Whether rewards enter the advantage."""
        return self.objective in ("grpo", "grpo_opd")

    @property
    def acts_elsewhere(self) -> bool:
        """Whether one actor does everything, maybe on another machine: it reads its own files."""
        return self.runtime == "single_actor" and self.cluster.address != "local"

    @property
    def has_policy_term(self) -> bool:
        """Whether a token's advantage enters the loss, by whatever it comes from."""
        is_lowered = self.loss.kl_coef > 0 and self.loss.kl_estimator == "k1_in_reward"
        has_advantage = self.uses_group_advantage or self.opd is not None or is_lowered
        return self.is_online and has_advantage

    @property
    def acting_teacher_problem(self) -> str | None:
        """Why the teacher cannot play episodes itself; None where it can."""
        teacher = self.teacher
        if teacher is None:
            return "there is no `teacher` section"
        if not isinstance(teacher.model, ToyModelConfig):
            kind = "" if teacher.model is None else teacher.model.kind
            place = f"{_a(kind)} teacher" if kind else "a teacher behind `url`"
            return (
                f"{place} is asked for scores only: as a policy, a teacher has to be a toy model "
                "in this process"
            )
        if teacher.tokenizer not in NATIVE_TOKENIZERS:
            return (
                f"there is no chat format for its tokenizer {teacher.tokenizer!r}: known are "
                f"{', '.join(NATIVE_TOKENIZERS)}"
            )
        return None

    @property
    def num_student_ranks(self) -> int:
        """World size of the student."""
        return self.cluster.student.num_ranks if self.runtime == "cluster" else 1

    @property
    def policy_label(self) -> str:
        """What may be said of how close to on-policy the run is."""
        if not self.is_online:
            return "supervised, on stored episodes"
        if self.loop.max_policy_lag:
            return f"off-policy (lag <= {self.loop.max_policy_lag})"
        return "minibatched" if self.loop.num_minibatches > 1 else "strictly on-policy"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in (
            self._objective_problem(),
            self._baseline_problem(),
            self._engine_problem(),
            self._sampling_problem(),
            self._size_problem(),
            self._student_problem(),
            self._accumulation_problem(),
            self._stored_problem(),
            self._distill_problem(),
            self._teacher_text_problem(),
            self._backbone_problem(),
            unused_problem(self),
        ):
            if problem:
                raise ValueError(problem)
        return self

    def _objective_problem(self) -> str | None:
        has_term = self.objective in ("opd", "grpo_opd")
        if has_term and self.teacher is None:
            return f"objective {self.objective} needs a `teacher` section"
        if has_term and (self.opd is None) == (self.distill is None):
            return (
                f"objective {self.objective} needs an `opd` section (credit of sampled tokens) or "
                f"a `distill` section (whole distributions), found "
                f"{'neither' if self.opd is None else 'both'}"
            )
        if not has_term and self.opd is not None:
            return f"objective {self.objective} has no OPD term: remove the `opd` section"
        if self.objective == "grpo" and self.distill is not None:
            return "objective grpo asks no teacher: remove `distill`, or use grpo_opd"
        if self.opd is not None and self.opd.coef == 0:
            return "opd.coef is 0: use `objective: grpo` instead of a teacher without a say"
        if (
            self.opd is not None
            and self.opd.discount != 1
            and (self.opd.lookahead != "return_to_go")
        ):
            return "opd.discount has a meaning only with `lookahead: return_to_go`"
        if self.uses_group_advantage and self.loop.group_size < 2:
            return f"objective {self.objective} compares siblings: group_size must be at least 2"
        return None

    def _baseline_problem(self) -> str | None:
        problem = self.acting_teacher_problem
        if "teacher" not in self.evaluation.baselines or problem is None:
            return None
        return f"evaluation.baselines names the teacher, but {problem}: remove it from the list"

    def _sampling_problem(self) -> str | None:
        rollout = self.rollout
        if rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0:
            return (
                "rollout: training refuses top_p < 1, top_k and min_p: the engine's logprobs "
                "would be those of another distribution than the one sampled from"
            )
        if self.loop.max_policy_lag and self.loss.mismatch_cap is None:
            return (
                "loss.mismatch_cap: null leaves the importance weight out, but with "
                f"loop.max_policy_lag {self.loop.max_policy_lag} the engine samples under older "
                "weights than the trainer holds: set a cap"
            )
        if (
            self.opd is not None
            and rollout.temperature != 1
            and not (self.opd.allow_untempered_teacher)
        ):
            return (
                f"rollout.temperature is {rollout.temperature}, but prefill scores ignore "
                "temperature: use 1.0, or set opd.allow_untempered_teacher"
            )
        return None

    def _size_problem(self) -> str | None:
        sequences = self.loop.num_groups * self.loop.group_size
        if self.loop.num_minibatches > sequences:
            return f"loop.num_minibatches {self.loop.num_minibatches} > {sequences} trajectories"
        if self.curriculum.max_tail_calls is not None and (
            self.curriculum.initial_tail_calls > self.curriculum.max_tail_calls
        ):
            return "curriculum.initial_tail_calls exceeds curriculum.max_tail_calls"
        return None

    def _student_problem(self) -> str | None:
        model, ranks = self.student.model, self.num_student_ranks
        if not isinstance(model, MegatronModelConfig):
            kind, engine = model.kind, self.rollout.engine
            if ranks > 1:
                return f"cluster.student asks for {ranks} ranks, but {_a(kind)} student has one"
            if kind == "toy" and engine is not None:
                return "rollout.engine: a toy student brings its own engine; remove the section"
            if kind == "hf" and engine is not None and engine.kind != "hf":
                return (
                    f"rollout.engine: an hf student is sampled by transformers, found "
                    f"{engine.kind}; use kind hf, or a megatron student"
                )
            if self.rollout.routing_replay == "on":
                return f"rollout.routing_replay: {_a(kind)} student replays no experts; set it off"
            return None
        if problem := model.parallel.problem(ranks):
            where = "cluster.student" if self.runtime == "cluster" else f"runtime {self.runtime}"
            return f"student.model.parallel on the {ranks} rank(s) of {where}: {problem}"
        if model.parallel.context > 1 and self.loss.kind == "gspo_token":
            return (
                "loss.kind gspo_token needs the whole sequence of a token on one rank: use "
                "parallel.context 1, or another loss"
            )
        return None

    def _engine_problem(self) -> str | None:
        """Transformers samples on one device: further GPUs of its actor would stand idle."""
        engine, gpus = self.rollout.engine, self.cluster.rollout.gpus_per_actor
        if self.runtime != "cluster" or gpus <= 1 or isinstance(engine, SGLangEngineConfig):
            return None
        kind = "not given, which means hf" if engine is None else engine.kind
        return (
            f"cluster.rollout.gpus_per_actor is {gpus:g}, but rollout.engine is {kind}, which uses "
            "one GPU: name `kind: sglang` with `tensor`, or reserve at most 1"
        )

    def _accumulation_problem(self) -> str | None:
        """A group's gradients are final before the batch is whole."""
        if not self.loop.accumulate:
            return None
        why = None
        if self.loop.num_minibatches > 1:
            why = (
                f"loop.num_minibatches {self.loop.num_minibatches}: all groups of a batch go into "
                "one optimizer step"
            )
        elif self.opd is not None and self.opd.baseline != "none":
            why = f"opd.baseline {self.opd.baseline}: it is taken over the whole batch"
        return why and f"loop.accumulate does not go with {why}; change it, or leave accumulate out"

    def _stored_problem(self) -> str | None:
        """``sft`` and ``offline_kd`` sample nothing."""
        if self.is_online:
            if self.demonstrations is not None:
                return (
                    f"objective {self.objective} samples its own episodes: remove `demonstrations`"
                )
            return None
        if self.demonstrations is None:
            return (
                f"objective {self.objective} learns from stored episodes: add a `demonstrations` "
                "section ({} plays the oracle's)"
            )
        if self.loop.max_policy_lag or self.loss.kl_coef > 0:
            return (
                f"objective {self.objective} samples nothing: loop.max_policy_lag and loss.kl_coef "
                "must be 0"
            )
        if self.objective == "sft" and self.uses_targets:
            return "objective sft learns the written tokens: use offline_kd to learn distributions"
        if self.objective == "offline_kd" and (self.teacher is None or not self.uses_targets):
            return (
                "objective offline_kd needs a `teacher` and a `distill` section with a divergence"
            )
        return None

    def _distill_problem(self) -> str | None:
        """What a divergence needs of student, teacher and memory."""
        selects = self.selection.kind != "all_model_tokens"
        if self.row_loss is None:
            return "selection has a meaning only with a `distill` section" if selects else None
        if self.is_online and not self.uses_targets:
            return (
                "distill.divergence sampled_nll would make whatever was sampled more likely: it is "
                "for objective sft"
            )
        if isinstance(self.student.model, MegatronModelConfig) or self.runtime == "cluster":
            return (
                f"objective {self.objective} with whole distributions runs on one device: use a "
                "toy or hf student and runtime inprocess or single_actor"
            )
        if self.loop.accumulate:
            return "loop.accumulate does not go with `distill`: leave one of them out"
        return self._target_problem(self.distill) if self.uses_targets and self.distill else None

    def _target_problem(self, distill: DistillConfig) -> str | None:
        teacher, student = self.teacher, self.student.model
        is_quantized = isinstance(student, HFStudentConfig) and student.quantization != "none"
        if is_quantized and self.memory.strategy == "swap":
            return (
                "memory.strategy swap does not go with student.model.quantization: what quantized "
                "kernels keep on the device cannot be planned; use resident, or quantization none"
            )
        if teacher is None or teacher.model is None:
            return (
                "distill needs teacher.model: whole distributions come from a teacher in this "
                "process, not from `url`"
            )
        if distill.support == "exact_full_vocab":
            if teacher.fit is not None and teacher.rendering != "verbatim":
                return (
                    "distill.support exact_full_vocab needs one vocabulary for both, and a fitted "
                    "teacher has the student's only under teacher.rendering verbatim"
                )
            if teacher.tokenizer != self.student.tokenizer:
                return (
                    f"distill.support exact_full_vocab compares token by token, but the teacher "
                    f"reads {teacher.tokenizer!r} and the student {self.student.tokenizer!r}: use "
                    "top_k_tail"
                )
            if self.memory.strategy == "swap":
                return (
                    "distill.support exact_full_vocab with memory.strategy swap would store the "
                    "whole vocabulary for every row: use top_k_tail, or resident"
                )
        return None

    def _backbone_problem(self) -> str | None:
        """A teacher over the student's backbone needs one that nobody trains, and its tokens."""
        teacher, student = self.teacher, self.student.model
        if teacher is None or not isinstance(teacher.model, BackboneTeacherConfig):
            return None
        where = "teacher.model.kind student_backbone"
        if not isinstance(student, HFStudentConfig) or student.lora is None:
            return (
                f"{where} shares frozen weights, but the student trains its own: it goes with "
                "student.model.kind hf and `lora`"
            )
        if teacher.tokenizer != self.student.tokenizer:
            return (
                f"{where} reads the student's ids, but teacher.tokenizer is {teacher.tokenizer!r} "
                f"and student.tokenizer {self.student.tokenizer!r}: give both the same"
            )
        if self.memory.strategy == "swap":
            return f"{where}: there is nothing to swap, memory.strategy must be auto or resident"
        return None

    def _teacher_text_problem(self) -> str | None:
        """What the teacher reads."""
        teacher = self.teacher
        if teacher is None:
            return None
        if teacher.rendering == "verbatim" and teacher.tokenizer != self.student.tokenizer:
            return (
                f"teacher.rendering verbatim gives the teacher the student's own ids, but it reads "
                f"{teacher.tokenizer!r} and the student writes {self.student.tokenizer!r}: use "
                "native or raw"
            )
        if teacher.mode == "privileged_context" and not (self.uses_teacher or self.uses_targets):
            return (
                f"teacher.mode privileged_context: objective {self.objective} asks no teacher; "
                "remove it"
            )
        if teacher.mode == "privileged_context" and "teacher" in self.evaluation.baselines:
            return (
                "evaluation.baselines: a teacher with privileged context acts without the oracle's "
                "calls that it scores with; leave it out"
            )
        return None


def _a(kind: str) -> str:
    return f"an {kind}" if kind == "hf" else f"a {kind}"
