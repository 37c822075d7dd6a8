"""Evaluation: the same tasks and seeds for every policy, one row per policy and moment."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import ConfigError, DeadlineError, first_error
from miniverl_dist.ports import Assignment, RolloutSource
from miniverl_dist.schemas.evaluation import EvaluationRow, TailCalls
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.training.eval_stats import summaries


@dataclass(frozen=True)
class EvaluationJob:
    """One policy to evaluate at one moment."""

    policy: str
    tag: str
    policy_version: int
    source: RolloutSource
    tail_calls: TailCalls
    episodes_per_task: int
    """Deterministic policies need one."""
    families: Mapping[str, str] = field(default_factory=dict)
    """Task id -> what it is a variant of."""
    digest: str | None = None
    """Of all that decides how the episodes go; None where that is not known."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """How the policy is asked, for the row."""


def assignments(
    tasks: Mapping[str, TaskInfo], task_ids: Sequence[str], tail_calls: TailCalls
) -> list[Assignment]:
    """One assignment per task with an expert call, T at most its N; under ``all``, one per T.

    Raises:
        ConfigError: nothing is left to evaluate.
    """
    usable = [i for i in task_ids if tasks[i].num_calls > 0]
    if not usable:
        raise ConfigError("evaluation: no task to evaluate (the split is empty)")
    longest = max(tasks[i].num_calls for i in usable)
    if tail_calls != "all" and tail_calls > longest:
        raise ConfigError(
            f"evaluation: T = {tail_calls}, but no evaluation task has more than {longest} calls"
        )
    places = [
        (task_id, tail)
        for task_id in usable
        for tail in _horizons(tasks[task_id].num_calls, tail_calls)
    ]
    return [
        Assignment(
            ticket=index,
            task_id=task_id,
            prefix_calls=tasks[task_id].num_calls - tail,
            tail_calls=tail,
        )
        for index, (task_id, tail) in enumerate(places)
    ]


def _horizons(num_calls: int, tail_calls: TailCalls) -> Sequence[int]:
    if tail_calls == "all":
        return range(1, num_calls + 1)
    return (min(tail_calls, num_calls),)


async def evaluate(
    job: EvaluationJob,
    places: Sequence[Assignment],
    config: EvaluationConfig,
    *,
    deadline_s: float,
    on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
    done: Mapping[str, Trajectory] = MappingProxyType({}),
) -> tuple[EvaluationRow, ...]:
    """Play all episodes of a job, a bounded number at once.

    Args:
        job: Policy and moment.
        places: Tasks and horizons, the same for every policy.
        config: Concurrency.
        deadline_s: For the whole job.
        on_trajectory: Called with every episode that is played here, as soon as it has ended.
        done: Episodes that have ended before, by the id of their trajectory; not played again.

    Returns:
        One row, or under ``all`` one per T and then one for all together.

    Raises:
        DeadlineError: the job took longer than ``deadline_s``.
    """
    gate = asyncio.Semaphore(config.max_concurrency)

    async def play(place: Assignment, member: int) -> Trajectory:
        name = episode_id(job, place, member)
        if name in done:
            return done[name]
        async with gate:  # freed by the episodes before; each ends by its own deadline
            trajectory = await job.source.rollout(place, member)
        trajectory = trajectory.model_copy(update={"trajectory_id": name})
        on_trajectory(trajectory)
        return trajectory

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
    # In the order of places and members, whichever ended first.
    return summaries(job, [task.result() for task in running], places)


def episode_id(job: EvaluationJob, place: Assignment, member: int) -> str:
    """Unique within a run: tickets of evaluations and of training both count from 0."""
    return f"{job.tag}.{job.policy}.{place.group_id}.{member}"
