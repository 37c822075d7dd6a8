"""A benchmark: one base recipe, some arms that change it, the same seeds for all."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, JsonValue, ValidationError, model_validator

from miniverl_dist.config.base import ConfigModel, PositiveFloat, PositiveInt
from miniverl_dist.config.load import LoadedConfig, load_config
from miniverl_dist.config.problems import explain
from miniverl_dist.config.yaml_text import parse_yaml
from miniverl_dist.errors import ConfigError

BENCHMARK_KIND: Final = "benchmark"
COLD_START: Final = "cold-start"
"""Names the runs that the arms start from; no arm may have it."""
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=60)]
Overrides = dict[str, JsonValue]
"""Sections of a recipe, merged over the base as a recipe merges over what it extends."""
_ESCAPED = re.compile(r"[^\x20-\x7e]")


class ColdStartConfig(ConfigModel):
    """One run per seed that makes what all arms of that seed start from."""

    overrides: Overrides = Field(default_factory=dict)
    checkpoint: Annotated[str, Field(pattern=r"^step-[0-9]{6,}$")] | None = None
    """Which of its commits the arms take the weights of (``step-000000`` stands behind a warm-up);
    None: the newest."""
    share_teacher: bool = True
    """Arms take over the toy teacher that it has fitted, if any."""


class ArmConfig(ConfigModel):
    """What one arm changes."""

    overrides: Overrides = Field(default_factory=dict)
    against: Name | None = None
    """The arm it is compared with; None: the benchmark's ``reference``."""


class BenchmarkConfig(ConfigModel):
    """Arms over seeds."""

    kind: Literal["benchmark"]
    name: Name
    base: Path
    """Recipe that every run builds on, relative to this file."""
    cold_start: ColdStartConfig | None = None
    arms: dict[Name, ArmConfig] = Field(min_length=1)
    """In the order in which they are run: each arm over all seeds, then the next."""
    reference: Name
    """The arm that the others are compared with."""
    seeds: tuple[int, ...] = Field(min_length=1)
    max_processes: PositiveInt = 1
    """Runs at once, one thread each."""
    run_deadline_s: PositiveFloat | None = None
    """A run that takes longer is ended and counts as failed; None: no limit."""
    tolerate_unequal_samples: bool = False
    """Compare arms although they sample different numbers of episodes."""
    tolerate_unequal_updates: bool = False
    """Compare arms although they take different numbers of optimizer steps."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        named = {"reference": self.reference} | {
            f"arms.{name}.against": arm.against
            for name, arm in self.arms.items()
            if arm.against is not None
        }
        for where, name in named.items():
            if name not in self.arms:
                raise ValueError(f"{where}: there is no arm {name!r}, only {', '.join(self.arms)}")
        if COLD_START in self.arms:
            raise ValueError(
                f"arms.{COLD_START}: this name is that of the runs which arms start from; give "
                "the arm another one"
            )
        for name, arm in self.arms.items():
            for taken in self._decided_by_the_plan(arm.overrides):
                raise ValueError(
                    f"arms.{name}.overrides: found {taken}, which the plan decides: remove it"
                )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(
                f"seeds {list(self.seeds)} repeat one: runs of a seed are the same run"
            )
        return self

    def _decided_by_the_plan(self, overrides: Overrides) -> list[str]:
        """Fields that an arm's run gets from the plan, whatever the arm says."""
        student = overrides.get("student")
        found = [name for name in ("seed", "name") if name in overrides]
        has_start = isinstance(student, dict) and student.get("warm_start") is not None
        return found + ["student.warm_start"] * (has_start and self.cold_start is not None)

    def reference_of(self, arm: str) -> str:
        """The arm that ``arm`` is compared with."""
        return self.arms[arm].against or self.reference


@dataclass(frozen=True)
class LoadedBenchmark:
    """A checked benchmark, and where its base recipe lies."""

    config: BenchmarkConfig
    base: Path
    digest: str
    """SHA-256 (hex) of the plan's own fields but for how many processes run it."""

    def recipe(self, *layers: Overrides) -> LoadedConfig:
        """The base with overrides.

        Raises:
            ConfigError: it cannot be read, or they contradict each other.
        """
        return load_config(self.base, [text for layer in layers for text in override_texts(layer)])


def override_texts(overrides: Overrides) -> list[str]:
    """Overrides as ``load_config`` and the command line take them."""
    return [f"{key}={_flow_text(value)}" for key, value in overrides.items()]


def _flow_text(value: JsonValue) -> str:
    """A value as JSON that reads the same as YAML, which takes fewer characters as they are."""
    text = json.dumps(value, ensure_ascii=False)
    return _ESCAPED.sub(lambda found: f"\\U{ord(found.group()):08x}", text)


def load_benchmark(path: Path) -> LoadedBenchmark:
    """Read a benchmark file.

    Raises:
        ConfigError: one message with every problem as ``file:line: field: found X, expected Y``.
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from None
    text = parse_yaml(raw, str(path))
    if not isinstance(text.data, dict) or text.data.get("kind") != BENCHMARK_KIND:
        raise ConfigError(f"{path}: found no `kind: {BENCHMARK_KIND}`, expected a benchmark")
    try:
        config = BenchmarkConfig.model_validate_json(json.dumps(text.data), strict=True)
    except ValidationError as error:
        lines = [
            f"{path}:{text.lines.get(problem.path, 1)}: {problem}"
            for problem in explain(error, BenchmarkConfig)
        ]
        raise ConfigError("\n".join(lines)) from None
    base = Path(os.path.normpath(path.parent / config.base))
    return LoadedBenchmark(config, base, _digest(config))


def _digest(config: BenchmarkConfig) -> str:
    fields: dict[str, Any] = config.model_dump(
        mode="json", exclude={"max_processes", "run_deadline_s"}
    )
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()
