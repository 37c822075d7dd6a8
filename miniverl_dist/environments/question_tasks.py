"""Tasks of one question: what a family of them provides, and how they are drawn."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, Protocol, get_args

from miniverl_dist.config.environments import Difficulty, QuestionConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.environments.decimals import json_number, parse_number, write_number
from miniverl_dist.errors import ConfigError
from miniverl_dist.schemas.messages import CallError, ToolCall, ToolSchema
from miniverl_dist.schemas.seeds import derive_seed

SUBMIT = "submit"
_MAX_DRAWS = 200
"""Draws for one task until its question differs from those before."""

Scalar = str | int | float | bool | Fraction | None


class ToolError(Exception):
    """A mistake of the model, in words that it reads; never leaves the environment."""

    kind = CallError.EXECUTION


class UnknownToolError(ToolError):
    """There is no such tool."""

    kind = CallError.UNKNOWN_TOOL


class ArgumentsError(ToolError):
    """Arguments that the tool does not take."""

    kind = CallError.ARGUMENTS


@dataclass(frozen=True)
class ToolResult:
    """What a tool gave back."""

    text: str
    values: tuple[Scalar, ...] = ()
    """Single values in it, each of which may be submitted."""


class Toolbox(Protocol):
    """One episode's private tools; they read, and change nothing."""

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a tool that is declared, with the arguments' names as declared.

        Raises:
            ToolError: the model's mistake.
        """

    def close(self) -> None:
        """Free what it holds; safe to call twice."""


@dataclass(frozen=True)
class Question:
    """A drawn task before it has a name."""

    text: str
    calls: tuple[ToolCall, ...]
    """The expert's, without ``submit``."""
    answer: str | Fraction
    """Submitted as a text, or as a number."""
    hidden: Any = None
    """What only the tools see; JSON, so that the data has a checksum. Never changed."""


@dataclass(frozen=True)
class QuestionTask:
    """A question with a name; the expert's calls end with ``submit``."""

    task_id: str
    difficulty: Difficulty
    question: Question

    @property
    def expert_calls(self) -> tuple[ToolCall, ...]:
        """All N."""
        answer = self.question.answer
        value = json_number(answer) if isinstance(answer, Fraction) else answer
        return (*self.question.calls, ToolCall(name=SUBMIT, arguments={"answer": value}))

    @property
    def info(self) -> TaskInfo:
        """What curriculum and splits need."""
        return TaskInfo(
            task_id=self.task_id,
            num_calls=len(self.question.calls) + 1,
            num_turns=1,
            classes=(self.difficulty,),
        )


@dataclass(frozen=True)
class Family:
    """What tells one environment of this kind from another."""

    name: str
    """Registry name."""
    tools: tuple[ToolSchema, ...]
    """Without ``submit``."""
    answer_schema: Mapping[str, Any]
    """JSON Schema of the submitted answer."""
    draw: Callable[[Difficulty, random.Random], Question]
    open_tools: Callable[[Question], Toolbox]
    versions: Mapping[str, str] = field(default_factory=dict)
    """Of what the observations depend on, for the provenance."""


def canonical(value: Scalar) -> str:
    """A value as a text whose equality is the verifier's: ``85``, ``"85"`` and ``85.0`` are equal.

    Texts count as they are, but for blanks around them: case matters.
    """
    number = parse_number(value)
    if number is not None:
        return write_number(number)
    if isinstance(value, str):
        return value.strip()
    return json.dumps(value) if isinstance(value, bool | None) else str(value)


def make_tool(name: str, description: str, /, **parameters: Mapping[str, Any]) -> ToolSchema:
    """A tool all of whose parameters are required."""
    schema = {
        "type": "object",
        "properties": {key: dict(value) for key, value in parameters.items()},
        "required": list(parameters),
    }
    return ToolSchema(name=name, description=description, parameters=schema)


def draw_tasks(family: Family, config: QuestionConfig) -> dict[str, QuestionTask]:
    """The tasks of a config by id; no two ask the same.

    Raises:
        ConfigError: the family has too few different questions of a difficulty.
    """
    levels = get_args(Difficulty) if config.difficulty == "mixed" else (config.difficulty,)
    asked: set[tuple[str, str]] = set()
    tasks: dict[str, QuestionTask] = {}
    for index in range(config.num_tasks):
        level: Difficulty = levels[index % len(levels)]
        place, number = f"{family.name} {level}", index // len(levels)
        question = _new_question(family, config, level, number, asked)
        if question is None:
            raise ConfigError(
                f"environment.num_tasks {config.num_tasks}: {place} has no further question after "
                f"{number}; ask for fewer, or for another difficulty"
            )
        task_id = f"{family.name}_{level}_{number:03d}"
        tasks[task_id] = QuestionTask(task_id, level, question)
    return tasks


def _new_question(
    family: Family,
    config: QuestionConfig,
    level: Difficulty,
    number: int,
    asked: set[tuple[str, str]],
) -> Question | None:
    for attempt in range(_MAX_DRAWS):
        seed = derive_seed(config.seed, family.name, level, number, attempt)
        question = family.draw(level, random.Random(seed))
        key = (question.text, json.dumps(question.hidden))
        if key not in asked:
            asked.add(key)
            return question
    return None
