"""Trajectories that the teacher said nothing about: counted, and too many of them end the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import TeacherDropFractionError
from miniverl_dist.ports import TargetAnswer
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal, TeacherResult

_NUM_SHOWN: Final = 3
_MEND: Final = "mend the teacher, then `miniverl-dist resume`"
_REMEDIES: Final[Mapping[RefusalReason, str]] = {
    RefusalReason.TOO_LONG: (
        "start a new run in which the teacher may read more (teacher.max_prefill_tokens, and what "
        "its model or server takes) or has less to read (rollout.max_context_tokens, a shorter "
        "environment.prompt)"
    ),
    RefusalReason.REJECTED: (
        "mend what the teacher turned down: at its server, then `miniverl-dist resume`, or in the "
        "recipe of a new run"
    ),
}


def check_drops(
    answers: Sequence[TeacherResult | TargetAnswer | None],
    config: RunConfig,
    metrics: dict[str, float],
) -> None:
    """Count what has no answer.

    Args:
        answers: One per trajectory of the batch; None where the teacher said nothing at all.
        config: Of the run.
        metrics: Gets the counts.

    Raises:
        TeacherDropFractionError: more than ``teacher.max_drop_fraction`` have none.
    """
    refusals = [answer for answer in answers if isinstance(answer, TeacherRefusal)]
    dropped = len(refusals) + sum(answer is None for answer in answers)
    metrics["teacher_dropped"] = float(dropped)
    metrics["teacher_scored_fraction"] = (len(answers) - dropped) / len(answers)
    limit = config.teacher.max_drop_fraction if config.teacher is not None else 0.0
    if dropped <= limit * len(answers):
        return
    missing = "teacher score" if config.uses_teacher else "teacher targets"
    raise TeacherDropFractionError(
        f"{dropped} of {len(answers)} trajectories have no {missing}, more than "
        f"teacher.max_drop_fraction = {limit} allows; the teacher said: {_told(refusals)}. "
        f"To go on: {_remedy(refusals)}"
    )


def _told(refusals: Sequence[TeacherRefusal]) -> str:
    told = sorted({f"{refusal.reason}: {refusal.detail}" for refusal in refusals})
    more = f"; and {len(told) - _NUM_SHOWN} more" if len(told) > _NUM_SHOWN else ""
    return ("; ".join(told[:_NUM_SHOWN]) or "nothing") + more


def _remedy(refusals: Sequence[TeacherRefusal]) -> str:
    """What helps against each kind of refusal."""
    reasons = sorted({refusal.reason for refusal in refusals})
    return "; ".join(dict.fromkeys(_REMEDIES.get(reason, _MEND) for reason in reasons)) or _MEND
