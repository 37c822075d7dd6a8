"""What an evaluation found: one row per policy, moment and horizon, and the outcomes by task."""

from __future__ import annotations

from typing import Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from miniverl_dist.config.base import Fraction, NonNegativeInt
from miniverl_dist.schemas.messages import FrozenModel

TailCalls = int | Literal["all"]
"""T of a row; ``all``: every T from 1 to N of each task together."""

ErrorKind = Literal["parse", "unknown_tool", "arguments", "execution", "harness_fault"]
"""What went wrong: a call that could not be read, a tool that does not exist, arguments that do
not fit its schema, a call that ran and failed, an episode lost to the harness."""

Settings = dict[str, str]
"""What decides how episodes go, by name: ``rollout.max_new_tokens`` -> ``512``. Nothing secret."""

_ROUNDING: Final = 1e-6
_MEASURED: Final = (
    "pass_rate",
    "pass_low",
    "pass_high",
    "official_per_turn_rate",
    "state_only_rate",
    "reward_mean",
    "calls_per_episode",
    "tokens_per_episode",
    "parsed_call_rate",
    "first_call_match_rate",
)
"""What a row without an episode that counts does not have."""


class TaskOutcome(FrozenModel):
    """Episodes of one task at one horizon that count; what statistics over tasks start from."""

    task_id: str
    tail_calls: int
    num_episodes: NonNegativeInt
    """Without harness faults; may be 0."""
    num_passed: NonNegativeInt
    reward_sum: float = 0.0
    family: str = ""
    """Variants of one task share it and are resampled together; empty: the task stands alone."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_passed > self.num_episodes:
            raise ValueError(
                f"task {self.task_id}: found num_passed {self.num_passed} of num_episodes "
                f"{self.num_episodes}, expected at most as many"
            )
        return self


class EvaluationRow(FrozenModel):
    """Results of one policy over the same tasks and seeds.

    Rates and means are None where no episode counts: nothing was measured then.
    """

    policy: str
    """``student``, ``teacher``, ``null``, ``oracle``, or the name of another policy."""
    tag: str
    """When in the run: ``before`` (before any training), ``warm`` (after the SFT warm-up),
    ``step-000010``, ``after``, or the name of a job of its own."""
    policy_version: int | None
    """Of the student; None for every other policy (a number in rows of earlier versions)."""
    tail_calls: TailCalls
    """T that was asked for; a task with fewer calls is played whole. In an evaluation of every T,
    the row of one T holds only the tasks that have as many calls."""
    num_tasks: NonNegativeInt
    num_episodes: NonNegativeInt
    """Episodes that count; harness faults are left out."""
    num_faults: NonNegativeInt
    pass_rate: Fraction | None
    pass_low: Fraction | None
    """Lower end of the 95 % Wilson interval of ``pass_rate``, which takes episodes as
    independent."""
    pass_high: Fraction | None
    official_per_turn_rate: float | None
    """Official per-turn verdict, a column of its own; None where the environment has none."""
    state_only_rate: float | None
    reward_mean: float | None
    reward_parts: dict[str, float]
    calls_per_episode: float | None
    tokens_per_episode: float | None
    """Sampled tokens."""
    terminations: dict[str, int]
    failed_ends: dict[str, int] = Field(default_factory=dict)
    """How the episodes ended that count and did not pass; empty in rows of earlier versions."""

    pass_low_by_task: float | None = None
    """Lower end of the 95 % interval that resamples tasks; None with fewer than two tasks, and in
    rows of earlier versions."""
    pass_high_by_task: float | None = None
    pass_at_k: tuple[float, ...] = ()
    """Entry k - 1: share of tasks that at least one of k episodes passes, estimated without
    bias."""
    parsed_call_rate: float | None = None
    """Share of episodes with at least one call that could be read."""
    first_call_match_rate: float | None = None
    """Share of episodes whose first call has the expert's name and arguments; None where the
    environment does not say."""
    errors: dict[ErrorKind, int] = Field(default_factory=dict)
    """Calls that went wrong, by kind; ``harness_fault`` counts episodes."""
    tasks: tuple[TaskOutcome, ...] = ()
    """One per task and T, in the order played; empty in rows of earlier versions."""
    job: str = ""
    """Digest of all that decides how these episodes go; empty where that is not known (weights
    without a checksum, rows of earlier versions)."""
    settings: Settings = Field(default_factory=dict)
    """How this policy was asked, beside the settings of the report."""

    @property
    def pass_interval(self) -> tuple[float, float, float] | None:
        """Pass rate and the ends of its Wilson interval; None where no episode counts."""
        if self.pass_rate is None or self.pass_low is None or self.pass_high is None:
            return None
        return self.pass_rate, self.pass_low, self.pass_high

    @field_validator(*_MEASURED)
    @classmethod
    def _forget_what_nothing_measured(
        cls, value: float | None, info: ValidationInfo
    ) -> float | None:
        """Rows of earlier versions say 0 where no episode counts."""
        return None if info.data.get("num_episodes") == 0 else value

    @model_validator(mode="after")
    def _check(self) -> Self:
        name = f"row {self.policy} {self.tag} (T = {self.tail_calls})"
        if self.num_episodes and None in (
            *(self.pass_rate, self.pass_low, self.pass_high),
            *(self.reward_mean, self.calls_per_episode, self.tokens_per_episode),
        ):
            raise ValueError(
                f"{name}: found {self.num_episodes} episodes and a rate or mean that is null"
            )
        counted = sum(o.num_episodes for o in self.tasks)
        if self.tasks and counted != self.num_episodes:
            raise ValueError(
                f"{name}: found num_episodes {self.num_episodes}, expected {counted} as its tasks "
                "have together"
            )
        passed = sum(o.num_passed for o in self.tasks)
        if counted and abs((self.pass_rate or 0.0) - passed / counted) > _ROUNDING:
            raise ValueError(
                f"{name}: found pass_rate {self.pass_rate}, expected {passed} of {counted} as its "
                "tasks have together"
            )
        return self


class EvaluationReport(FrozenModel):
    """``eval.json``: all rows of a run so far, and which tasks they are about."""

    environment: str
    task_ids: tuple[str, ...]
    trains_on_eval_tasks: bool
    """True where evaluation tasks are also trained on: the numbers then measure memorisation."""
    temperature: float
    rows: tuple[EvaluationRow, ...]
    num_episode_bytes: int = 0
    """Length of eval_trajectories.jsonl that belongs to these rows."""
    split: str = ""
    """How the tasks were chosen: ``tail``, ``stratified`` or ``ids``; empty where not recorded."""
    classes: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Task id -> the classes (tool families) it uses."""
    categories: dict[str, str] = Field(default_factory=dict)
    """Task id -> the part of the data it is from, where the data has parts."""
    families: dict[str, str] = Field(default_factory=dict)
    """Task id -> family; tasks of one family are variants of each other."""
    doubtful_ids: tuple[str, ...] = ()
    """Evaluation tasks whose own answer key is in doubt."""
    doubtful_source: str = ""
    """Who doubts them."""
    settings: Settings = Field(default_factory=dict)
    """Of the recipe, as far as they decide how episodes go and what they are worth; empty where
    not recorded."""
