"""Which fields of a recipe decide how evaluation episodes go and what they are worth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from miniverl_dist.config.models import RunConfig
from miniverl_dist.schemas.evaluation import Settings

REWARD_PREFIX: Final = "environment.reward."
"""Settings that say what an episode is worth, and not how it goes."""
_LIMITS: Final = frozenset(
    {
        "max_new_tokens",
        "max_context_tokens",
        "max_turns",
        "parse_error_limit",
        "tool_error_limit",
        "repeated_call_limit",
        "episode_deadline_s",
    }
)
_MEASURING: Final = ("tail_calls", "episodes_per_task", "temperature")


def recipe_settings(config: RunConfig) -> Settings:
    """Seed, environment (prompt and reward weights included) and limits, by their path.

    Tasks, horizon and temperature have fields of their own in an evaluation's report.
    """
    return dict(_settings(config.model_dump(mode="json")))


def measuring_settings(resolved: Mapping[str, Any]) -> Settings:
    """All that decides what an evaluation's numbers are about: the above, tasks, T, temperature.

    Args:
        resolved: A recipe as JSON, of this version or an earlier one; what it lacks is left out.
    """
    evaluation, tasks = resolved.get("evaluation", {}), dict(resolved.get("tasks", {}))
    tasks.pop("train", None)
    told = {
        "evaluation": {name: evaluation[name] for name in _MEASURING if name in evaluation},
        "tasks": tasks,
    }
    return dict(_settings(resolved)) | dict(_flat(told, ""))


def reward_weights(settings: Settings) -> Settings:
    """Those of the settings that say what an episode is worth."""
    return {name: told for name, told in settings.items() if name.startswith(REWARD_PREFIX)}


def _settings(resolved: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    rollout = resolved.get("rollout", {})
    told = {
        "seed": resolved.get("seed"),
        "environment": resolved.get("environment", {}),
        "rollout": {name: value for name, value in rollout.items() if name in _LIMITS},
        "student": {"tokenizer": resolved.get("student", {}).get("tokenizer")},
    }
    return _flat(told, "")


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{name}", shown
