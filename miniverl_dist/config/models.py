"""RunConfig: one recipe, checked as a whole before anything is loaded."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from miniverl_dist.config.base import ConfigModel, PositiveInt
from miniverl_dist.config.cluster import ClusterConfig, PublishConfig, Runtime
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
    TaskIds,
    TaskSplit,
)
from miniverl_dist.config.roles import MegatronModelConfig, StudentConfig, TeacherConfig

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
    environment: BfclConfig = BfclConfig()
    tasks: Annotated[TaskIds | TaskSplit, Field(discriminator="kind")]
    student: StudentConfig
    teacher: TeacherConfig | None = None
    curriculum: CurriculumConfig = CurriculumConfig()
    rollout: RolloutConfig = RolloutConfig()
    grpo: GrpoConfig = GrpoConfig()
    opd: OpdConfig | None = None
    distill: DistillConfig | None = None
    """Compare whole distributions: all of ``sft`` and ``offline_kd``, instead of ``opd`` elsewhere."""
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

    @property
    def uses_teacher(self) -> bool:
        """Whether training asks the teacher for scores of the tokens that were sampled."""
        return self.opd is not None

    @property
    def uses_targets(self) -> bool:
        """Whether training asks the teacher for whole distributions."""
        return self.distill is not None and self.distill.needs_teacher

    @property
    def is_online(self) -> bool:
        """Whether the student samples what it is trained on."""
        return self.objective not in ("sft", "offline_kd")

    @property
    def uses_group_advantage(self) -> bool:
        """Whether rewards enter the advantage."""
        return self.objective in ("grpo", "grpo_opd")

    @property
    def num_student_ranks(self) -> int:
        """World size of the student."""
        return self.cluster.student.num_ranks if self.runtime == "cluster" else 1

    @property
    def policy_label(self) -> str:
        """What may be said of how close to on-policy the run is."""
        if self.loop.max_policy_lag:
            return f"off-policy (lag <= {self.loop.max_policy_lag})"
        return "minibatched" if self.loop.num_minibatches > 1 else "strictly on-policy"

    @model_validator(mode="after")
    def _check(self) -> Self:
        for problem in (
            self._objective_problem(),
            self._sampling_problem(),
            self._size_problem(),
            self._student_problem(),
            self._accumulation_problem(),
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
                f"objective {self.objective} needs an `opd` section (credit of sampled tokens) or a "
                f"`distill` section (whole distributions), found "
                f"{'neither' if self.opd is None else 'both'}"
            )
        if not has_term and self.opd is not None:
            return f"objective {self.objective} has no OPD term: remove the `opd` section"
        if self.opd is not None and self.opd.coef == 0:
            return "opd.coef is 0: use `objective: grpo` instead of a teacher without a say"
        if (
            self.opd is not None
            and self.opd.discount != 1
            and (self.opd.lookahead != "return_to_go")
        ):
            return "opd.discount has a meaning only with `lookahead: return_to_go`"
        if "teacher" in self.evaluation.baselines and self.teacher is None:
            return "evaluation.baselines names the teacher, but there is no `teacher` section"
        if self.uses_group_advantage and self.loop.group_size < 2:
            return f"objective {self.objective} compares siblings: group_size must be at least 2"
        if not self.uses_group_advantage and self.grpo.zero_variance == "drop":
            return "grpo.zero_variance: drop has no meaning without a group advantage"
        return None

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
            if ranks > 1:
                return f"cluster.student asks for {ranks} ranks, but a toy student has one"
            if self.rollout.engine is not None:
                return "rollout.engine: a toy student brings its own engine; remove the section"
            if self.rollout.routing_replay == "on":
                return "rollout.routing_replay: a toy student has no experts to replay; set it off"
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
