"""What an evaluation found: one row per policy, moment and horizon, and the outcomes by task."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from miniverl_dist.schemas.messages import FrozenModel

TailCalls = int | Literal["all"]
"""T of a row; ``all``: every T from 1 to N of each task together."""

ErrorKind = Literal["parse", "unknown_tool", "arguments", "execution", "harness_fault"]
"""What went wrong: a call that could not be read, a tool that does not exist, arguments that do
not fit its schema, a call that ran and failed, an episode lost to the harness."""


class TaskOutcome(FrozenModel):
    """Episodes of one task at one horizon that count; what statistics over tasks start from."""

    task_id: str
    tail_calls: int
    num_episodes: int
    """Without harness faults; may be 0."""
    num_passed: int
    reward_sum: float = 0.0
    family: str = ""
    """Variants of one task share it and are resampled together; empty: the task stands alone."""


class EvaluationRow(FrozenModel):
    """Results of one policy over the same tasks and seeds."""

    policy: str
    """``student``, ``teacher``, ``null``, ``oracle``, or the name of another policy."""
    tag: str
    """When in the run: ``before`` (before any training), ``warm`` (after the SFT warm-up),
    ``step-000010``, ``after``, or the name of a job of its own."""
    policy_version: int
    tail_calls: TailCalls
    """T that was asked for; a task with fewer calls is played whole. In an evaluation of every T,
    the row of one T holds only the tasks that have as many calls."""
    num_tasks: int
    num_episodes: int
    """Episodes that count; harness faults are left out."""
    num_faults: int
    pass_rate: float
    pass_low: float
    """Lower end of the 95 % Wilson interval of ``pass_rate``, which takes episodes as
    independent."""
    pass_high: float
    official_per_turn_rate: float | None
    """Official per-turn verdict, a column of its own; None where the environment has none."""
    state_only_rate: float | None
    reward_mean: float
    reward_parts: dict[str, float]
    calls_per_episode: float
    tokens_per_episode: float
    """Sampled tokens."""
    terminations: dict[str, int]

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
