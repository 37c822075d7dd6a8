"""What is said of trajectories without the teacher's word: each kind of refusal, and what helps."""

from __future__ import annotations

from typing import Any

import pytest

from miniverl_dist.errors import TeacherDropFractionError
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal
from miniverl_dist.training.drops import check_drops
from tests.fakes import run_config

TEACHER = {"url": "http://t", "rendering": "raw", "max_drop_fraction": 0.5}
RESUME = "`miniverl-dist resume`"


def refusal(reason: RefusalReason, detail: str = "why") -> TeacherRefusal:
    return TeacherRefusal(trajectory_id="t", reason=reason, detail=detail)


def problem(*answers: TeacherRefusal | None) -> str:
    config: Any = run_config(objective="grpo_opd", opd={}, teacher=TEACHER)
    with pytest.raises(TeacherDropFractionError) as caught:
        check_drops(answers, config, {})
    return str(caught.value)


def test_up_to_the_limit_they_are_counted() -> None:
    metrics: dict[str, float] = {}
    config = run_config(objective="grpo_opd", opd={}, teacher={**TEACHER, "max_drop_fraction": 1.0})
    check_drops([refusal(RefusalReason.TOO_LONG), None, None], config, metrics)
    assert metrics == {"teacher_dropped": 3.0, "teacher_scored_fraction": 0.0}


def test_a_text_that_is_too_long_wants_a_new_run() -> None:
    told = problem(refusal(RefusalReason.TOO_LONG, "9 tokens, the limit is 3"))
    assert "1 of 1 trajectories have no teacher score" in told
    assert "teacher said: too_long: 9 tokens, the limit is 3. To go on: start a new run" in told
    for setting in ("teacher.max_prefill_tokens", "rollout.max_context_tokens"):
        assert setting in told
    assert RESUME not in told


@pytest.mark.parametrize(
    "reason", [RefusalReason.UNAVAILABLE, RefusalReason.NOT_FINITE, RefusalReason.MISMATCH]
)
def test_a_teacher_that_fails_wants_mending_and_a_resume(reason: RefusalReason) -> None:
    told = problem(refusal(reason))
    assert told.endswith(f"{reason}: why. To go on: mend the teacher, then {RESUME}")


def test_every_kind_that_occurred_has_its_remedy() -> None:
    told = problem(*(refusal(reason) for reason in RefusalReason))
    for part in (
        "start a new run in which",
        "mend what the teacher turned down",
        "mend the teacher",
    ):
        assert told.count(part) == 1


def test_many_words_are_cut_and_counted() -> None:
    told = problem(*(refusal(RefusalReason.TOO_LONG, f"{size} tokens") for size in range(5)))
    assert "too_long: 2 tokens; and 2 more. To go on" in told
    assert "3 tokens" not in told
