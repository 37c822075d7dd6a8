"""Evaluation: the same tasks and seeds for every policy, one row per policy and moment."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import ConfigError, DeadlineError, first_error
from miniverl_dist.ports import Assignment, RolloutSource
from miniverl_dist.schemas.evaluation import EvaluationRow
from miniverl_dist.schemas.trajectory import HARNESS_TERMINATIONS, Trajectory

_Z_95 = 1.959963984540054


def wilson_interval(num_passed: int, num_episodes: int) -> tuple[float, float]:
    """95 % Wilson score interval of a pass rate; (0, 1) without episodes.

    Source: Wilson 1927. Unlike the normal interval it stays within [0, 1] and does not collapse
    at 0 or all passes.
    """
    if num_episodes == 0:
        return 0.0, 1.0
    rate, z2 = num_passed / num_episodes, _Z_95**2
    denominator = 1 + z2 / num_episodes
    center = (rate + z2 / (2 * num_episodes)) / denominator
    half = (
        _Z_95
        * math.sqrt(rate * (1 - rate) / num_episodes + z2 / (4 * num_episodes**2))
        / denominator
    )
    # At 0 or all passes an end is the rate itself, but for rounding.
    return max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half))


@dataclass(frozen=True)
class EvaluationJob:
    """One policy to evaluate at one moment."""

    policy: str
    tag: str
    policy_version: int
    source: RolloutSource
    tail_calls: int
    episodes_per_task: int
    """Deterministic policies need one."""


def assignments(
    tasks: Mapping[str, TaskInfo], task_ids: Sequence[str], tail_calls: int
) -> list[Assignment]:
    """One assignment per task with an expert call; T is at most the task's N.

    Raises:
        ConfigError: nothing is left to evaluate.
    """
    usable = [i for i in task_ids if tasks[i].num_calls > 0]
    if not usable:
        raise ConfigError("evaluation: no task to evaluate (the split is empty)")
    longest = max(tasks[i].num_calls for i in usable)
    if tail_calls > longest:
        raise ConfigError(
            f"evaluation: T = {tail_calls}, but no evaluation task has more than {longest} calls"
        )
    return [
        Assignment(
            ticket=index,
            task_id=task_id,
            prefix_calls=tasks[task_id].num_calls - min(tail_calls, tasks[task_id].num_calls),
            tail_calls=min(tail_calls, tasks[task_id].num_calls),
        )
        for index, task_id in enumerate(usable)
    ]


async def evaluate(
    job: EvaluationJob,
    places: Sequence[Assignment],
    config: EvaluationConfig,
    *,
    deadline_s: float,
    on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
) -> EvaluationRow:
    """Play all episodes of a job, a bounded number at once.

    Args:
        job: Policy and moment.
        places: Tasks and horizons, the same for every policy.
        config: Concurrency.
        deadline_s: For the whole job.
        on_trajectory: Called with every trajectory, in the order of places and members.

    Raises:
        DeadlineError: the job took longer than ``deadline_s``.
    """
    gate = asyncio.Semaphore(config.max_concurrency)

    async def play(place: Assignment, member: int) -> Trajectory:
        async with gate:  # freed by the episodes before; each ends by its own deadline
            trajectory = await job.source.rollout(place, member)
        # Tickets of evaluations and of training both count from 0; ids are unique within a run.
        name = f"{job.tag}.{job.policy}.{trajectory.trajectory_id}"
        return trajectory.model_copy(update={"trajectory_id": name})

    try:
        async with asyncio.timeout(deadline_s), asyncio.TaskGroup() as crew:
            running = [
                crew.create_task(play(place, member))
                for place in places
                for member in range(job.episodes_per_task)
            ]
    except TimeoutError as error:
        raise DeadlineError(
            f"evaluation of {job.policy} ({job.tag}) took longer than {deadline_s} s "
            "(deadlines.evaluate_s)"
        ) from error
    except BaseExceptionGroup as errors:
        raise first_error(errors) from None
    trajectories = [task.result() for task in running]
    for trajectory in trajectories:
        on_trajectory(trajectory)
    return summarize(job, trajectories, num_tasks=len(places))


def summarize(
    job: EvaluationJob, trajectories: Sequence[Trajectory], *, num_tasks: int
) -> EvaluationRow:
    """Rates and means over the episodes that count; harness faults are counted apart."""
    counted = [t for t in trajectories if t.termination not in HARNESS_TERMINATIONS]
    passed = sum(t.passed for t in counted)
    low, high = wilson_interval(passed, len(counted))
    parts = sorted({name for t in counted for name in t.reward_parts})
    return EvaluationRow(
        policy=job.policy,
        tag=job.tag,
        policy_version=job.policy_version,
        tail_calls=job.tail_calls,
        num_tasks=num_tasks,
        num_episodes=len(counted),
        num_faults=len(trajectories) - len(counted),
        pass_rate=_mean([float(t.passed) for t in counted]),
        pass_low=low,
        pass_high=high,
        official_per_turn_rate=_check_rate(counted, "official_per_turn"),
        state_only_rate=_check_rate(counted, "state_only"),
        reward_mean=_mean([t.reward for t in counted]),
        reward_parts={
            name: _mean([t.reward_parts.get(name, 0.0) for t in counted]) for name in parts
        },
        calls_per_episode=_mean([float(len(t.tool_calls)) for t in counted]),
        tokens_per_episode=_mean(
            [float(sum(s.end - s.start for s in t.spans if s.sampled)) for t in counted]
        ),
        terminations=dict(sorted(Counter(t.termination.value for t in trajectories).items())),
    )


def _check_rate(trajectories: Sequence[Trajectory], check: str) -> float | None:
    """Share of verdicts that hold a check and found it true; None where none holds it."""
    if trajectories and not any(check in trajectory.verdict for trajectory in trajectories):
        return None
    return _mean([float(bool(trajectory.verdict.get(check))) for trajectory in trajectories])


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0
