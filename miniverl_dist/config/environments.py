"""Which environment a recipe plays: one section per kind, and no other way to name one."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from miniverl_dist.config.base import ConfigModel, Fraction, PositiveFloat, PositiveInt
from miniverl_dist.config.recipe import BfclConfig

Difficulty = Literal["easy", "medium", "hard"]


class QuestionReward(ConfigModel):
    """Fractions of the reward of an environment with one question; they add up to 1."""

    passed: Fraction = 0.6
    progress: Fraction = 0.3
    """Share of the expert's remaining results that the policy reached."""
    valid_calls: Fraction = 0.1
    """Share of its calls that ran without an error."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        total = self.passed + self.progress + self.valid_calls
        if abs(total - 1) > 1e-9 or self.passed == 0:
            raise ValueError(
                f"the fractions add up to {total:.6g} and passed is "
                f"{self.passed:.6g}; expected a sum of 1, and more than 0 for passed"
            )
        return self


class QuestionConfig(ConfigModel):
    """What the generated environments share."""

    difficulty: Literal["easy", "medium", "hard", "mixed"] = "mixed"
    """``mixed`` takes the three in turn: every third task is of one difficulty."""
    num_tasks: Annotated[int, Field(gt=0, le=10_000)] = 60
    seed: int = 0
    """Of the tasks; apart from the run's seed, so that arms and seeds share them. Task i is the
    same whatever ``num_tasks``."""
    prompt: Literal["full", "names", "compact"] = "full"
    """Tools in the prompt: schemas, names only, none."""
    max_observation_chars: PositiveInt = 2000
    reward: QuestionReward = QuestionReward()


class CalculatorConfig(QuestionConfig):
    """Arithmetic through calls, in exact decimals."""

    kind: Literal["calculator"] = "calculator"


class JsonNavigationConfig(QuestionConfig):
    """Questions on a JSON document that only tools can see."""

    kind: Literal["json_navigation"] = "json_navigation"


class SqliteConfig(QuestionConfig):
    """Questions on a database that only read-only SQL can see."""

    kind: Literal["sqlite_query"] = "sqlite_query"
    max_rows: PositiveInt = 20
    """Rows of a result that the model is shown."""
    max_steps: PositiveInt = 100_000
    """Instructions of SQLite's virtual machine that a statement may take: the same on every
    machine, so that a verdict does not depend on the load."""
    max_statement_s: PositiveFloat = 1.0
    """CPU seconds of a statement; catches the few whose single instructions are slow."""


def _default_kind(section: Any) -> Any:  # noqa: ANN401 - not validated yet
    return {"kind": "bfcl"} | section if isinstance(section, dict) else section


EnvironmentConfig = Annotated[
    BfclConfig | CalculatorConfig | JsonNavigationConfig | SqliteConfig,
    Field(discriminator="kind"),
    BeforeValidator(_default_kind),
]
"""A section without ``kind`` is BFCL's."""
