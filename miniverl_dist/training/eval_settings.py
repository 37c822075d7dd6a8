"""Which fields of a recipe decide how evaluation episodes go and what they are worth."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final

from miniverl_dist.config.models import RunConfig
from miniverl_dist.schemas.evaluation import Settings

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


def recipe_settings(config: RunConfig) -> Settings:
    """Seed, environment (prompt and reward weights included) and limits, by their path.

    Tasks, horizon and temperature have fields of their own in an evaluation's report.
    """
    told = {
        "seed": config.seed,
        "environment": config.environment.model_dump(mode="json"),
        "rollout": config.rollout.model_dump(mode="json", include=set(_LIMITS)),
        "student": {"tokenizer": config.student.tokenizer},
    }
    return dict(_flat(told, ""))


def _flat(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            yield f"{prefix}{name}", shown
