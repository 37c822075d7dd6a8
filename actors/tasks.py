"""Which environment and which tasks a config names."""

from __future__ import annotations

from collections.abc import Mapping

from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import TaskIds
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import ConfigError, TaskNotFoundError
from rollout_server.bfcl.environment import BfclEnvironment, BfclOptions, CallWriter
from rollout_server.bfcl.tasks import split


def make_environment(config: RunConfig, write_calls: CallWriter) -> BfclEnvironment:
    """The environment of the config; prefix calls are written by ``write_calls``.

    Raises:
        MissingDependencyError: bfcl-eval is not installed.
    """
    bfcl = config.environment
    return BfclEnvironment(
        BfclOptions(
            prompt=bfcl.prompt,
            max_observation_chars=bfcl.max_observation_chars,
            call_deadline_s=bfcl.call_deadline_s,
        ),
        write_calls=write_calls,
        weights=bfcl.reward,
    )


def resolve_tasks(
    config: RunConfig, tasks: Mapping[str, TaskInfo]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(training ids, evaluation ids) of the config.

    Raises:
        TaskNotFoundError: an id that the environment does not have.
        ConfigError: a split that leaves nothing to train on or to evaluate.
    """
    chosen = config.tasks
    if isinstance(chosen, TaskIds):
        for task_id in (*chosen.train, *chosen.eval):
            if task_id not in tasks:
                raise TaskNotFoundError(
                    f"tasks: there is no task {task_id!r} among the {len(tasks)} of "
                    f"{config.environment.kind} (the first is {next(iter(tasks))!r})"
                )
        return chosen.train, chosen.eval
    train, held_out = split(tasks, chosen.split, chosen.num_eval, chosen.seed)
    if not train or not held_out:
        raise ConfigError(
            f"tasks: split {chosen.split} with num_eval {chosen.num_eval} leaves {len(train)} "
            f"training and {len(held_out)} evaluation tasks of {len(tasks)}"
        )
    return tuple(train), tuple(held_out)
