"""What an evaluation found: one row per policy and horizon."""

from __future__ import annotations

from miniverl_dist.schemas.messages import FrozenModel


class EvaluationRow(FrozenModel):
    """Results of one policy over the same tasks and seeds."""

    policy: str
    """``student``, ``teacher``, ``null`` or ``oracle``."""
    tag: str
    """When in the run: ``before`` (before any training), ``warm`` (after the SFT warm-up),
    ``step-000010``, ``after``, or the name of a job of its own."""
    policy_version: int
    tail_calls: int
    num_tasks: int
    num_episodes: int
    """Episodes that count; harness faults are left out."""
    num_faults: int
    pass_rate: float
    pass_low: float
    """Lower end of the 95 % Wilson interval of ``pass_rate``."""
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
