"""Which environment and which tasks a config names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from miniverl_dist.config.environments import (
    CalculatorConfig,
    JsonNavigationConfig,
    SqliteConfig,
)
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import BfclConfig, TaskIds
from miniverl_dist.environments.base import Environment, TaskInfo
from miniverl_dist.environments.calculator import calculator
from miniverl_dist.environments.json_navigation import json_navigation
from miniverl_dist.environments.registry import EnvironmentRegistry
from miniverl_dist.environments.splits import split
from miniverl_dist.environments.sqlite_query import sqlite_query
from miniverl_dist.environments.texts import CallWriter
from miniverl_dist.errors import ConfigError, TaskNotFoundError
from rollout_server.bfcl.environment import BfclEnvironment, BfclOptions

_NUM_NAMED = 5
_NUM_SHOWN = 2


def environments(write_calls: CallWriter) -> EnvironmentRegistry:
    """Every environment a recipe can name; prefix calls are written by ``write_calls``."""
    registry = EnvironmentRegistry()

    def bfcl(options: Mapping[str, Any]) -> Environment:
        section = BfclConfig.model_validate(options)
        return BfclEnvironment(
            BfclOptions(
                categories=section.categories,
                prompt=section.prompt,
                max_observation_chars=section.max_observation_chars,
                call_deadline_s=section.call_deadline_s,
            ),
            write_calls=write_calls,
            weights=section.reward,
        )

    def calculations(options: Mapping[str, Any]) -> Environment:
        return calculator(CalculatorConfig.model_validate(options), write_calls)

    def documents(options: Mapping[str, Any]) -> Environment:
        return json_navigation(JsonNavigationConfig.model_validate(options), write_calls)

    def databases(options: Mapping[str, Any]) -> Environment:
        return sqlite_query(SqliteConfig.model_validate(options), write_calls)

    registry.register("bfcl", bfcl)
    registry.register("calculator", calculations)
    registry.register("json_navigation", documents)
    registry.register("sqlite_query", databases)
    return registry


def make_environment(config: RunConfig, write_calls: CallWriter) -> Environment:
    """The environment that the config names.

    Raises:
        MissingDependencyError: its package is not installed.
    """
    section = config.environment
    return environments(write_calls).create(section.kind, section.model_dump())


def resolve_tasks(
    config: RunConfig, tasks: Mapping[str, TaskInfo]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(training ids, evaluation ids) of the config.

    Raises:
        TaskNotFoundError: an id that the environment does not have.
        ConfigError: a split that leaves nothing to train on or to evaluate.
    """
    chosen = config.tasks
    named = {"evaluation.doubtful_ids": config.evaluation.doubtful_ids}
    if isinstance(chosen, TaskIds):
        named["tasks"] = (*chosen.train, *chosen.eval)
    for where, ids in named.items():
        _require_known(where, ids, tasks, config.environment.kind)
    if isinstance(chosen, TaskIds):
        return chosen.train, chosen.eval
    train, held_out = split(tasks, chosen.split, chosen.num_eval, chosen.seed)
    if not train or not held_out:
        raise ConfigError(
            f"tasks: split {chosen.split} with num_eval {chosen.num_eval} leaves {len(train)} "
            f"training and {len(held_out)} evaluation tasks of {len(tasks)}"
        )
    return tuple(train), tuple(held_out)


def _require_known(
    where: str, ids: Iterable[str], tasks: Mapping[str, TaskInfo], kind: str
) -> None:
    unknown = [task_id for task_id in dict.fromkeys(ids) if task_id not in tasks]
    if not unknown:
        return
    looks = ", ".join(repr(task_id) for task_id in list(tasks)[:_NUM_SHOWN])
    named = ", ".join(repr(task_id) for task_id in unknown[:_NUM_NAMED])
    more = f" and {len(unknown) - _NUM_NAMED} more" if len(unknown) > _NUM_NAMED else ""
    raise TaskNotFoundError(
        f"{where}: there is no task {named}{more} among the {len(tasks)} of {kind}, which are "
        f"named {looks}, …"
    )
