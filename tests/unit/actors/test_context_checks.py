"""Which scripted episodes are played before a start: those the run itself would begin with."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.context_checks import check_contexts
from miniverl_dist.config.load import load_config
from miniverl_dist.errors import ConfigError

LAB = Path(__file__).resolve().parents[3] / "configs" / "lab_calculator.yaml"
SHORT_STUDENT = "rollout.max_context_tokens=60"
SHORT_TEACHER = "teacher.model.max_context_tokens=60"
FITTED = "teacher.fitted=another"
WARM = ("student.warm_start=another", "student.warmup=null")


def check(*overrides: str) -> None:
    check_contexts(load_config(LAB, overrides).config)


@pytest.mark.parametrize(
    "overrides",
    [(SHORT_STUDENT, FITTED), (SHORT_TEACHER,), (SHORT_TEACHER, *WARM)],
    ids=str,
)
def test_what_a_model_begins_with_has_to_fit(overrides: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="calculator_easy_000"):
        check(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        # Weights and vocabulary are another run's.
        (SHORT_STUDENT, *WARM, FITTED),
        # Fitted before, on what that run played.
        (SHORT_TEACHER, FITTED),
        # An actor on another machine, which may have other packages.
        (SHORT_STUDENT, SHORT_TEACHER, "runtime=single_actor", "cluster.address=auto"),
    ],
    ids=str,
)
def test_nothing_is_played_that_the_run_does_not_play(overrides: tuple[str, ...]) -> None:
    check(*overrides)
