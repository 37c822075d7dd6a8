from __future__ import annotations

import math

import pytest
from pydantic import TypeAdapter

from miniverl_dist.errors import RecordError, StaleScoreError
from miniverl_dist.ports import ScoredTrajectory
from miniverl_dist.schemas.teacher import (
    RefusalReason,
    SpanScore,
    TeacherRefusal,
    TeacherResult,
    TeacherScore,
)
from tests.fakes import ByteTokenizer, teacher_score, trajectory


def span(**changes: object) -> SpanScore:
    values = {"span_index": 1, "token_ids": (1, 2), "byte_ends": (1, 2), "logprobs": (-1.0, -2.0)}
    return SpanScore.model_validate(values | changes)


@pytest.mark.parametrize("name", ["token_ids", "byte_ends", "logprobs"])
def test_the_three_rows_are_of_one_length(name: str) -> None:
    with pytest.raises(RecordError, match="expected equal lengths"):
        span(**{name: (1,) if name != "logprobs" else (-1.0,)})


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf, 0.1])
def test_defect_a_logprob_that_cannot_be_one_is_no_score(value: float) -> None:
    with pytest.raises(RecordError, match="finite and <= 0"):
        span(logprobs=(-1.0, value))


def test_an_empty_span_has_an_empty_score() -> None:
    assert span(token_ids=(), byte_ends=(), logprobs=()).logprobs == ()


def test_a_score_is_of_one_policy_version() -> None:
    score = teacher_score(trajectory(version=4), ByteTokenizer())
    score.require_version(4)
    for other in (3, 5):
        with pytest.raises(
            StaleScoreError, match=f"version 4, the trajectory is of version {other}"
        ):
            score.require_version(other)


def test_scores_and_refusals_come_back_as_what_they_were() -> None:
    told = trajectory()
    refusal = TeacherRefusal(
        trajectory_id="x", reason=RefusalReason.TOO_LONG, detail="9000 > 100 tokens"
    )
    for result in (teacher_score(told, ByteTokenizer()), refusal):
        line = ScoredTrajectory(trajectory=told, teacher=result).model_dump_json()
        loaded = ScoredTrajectory.model_validate_json(line).teacher
        assert loaded == result
        assert type(loaded) is type(result)


def test_a_mixture_of_both_is_refused() -> None:
    refusal = {"trajectory_id": "x", "reason": "too_long", "detail": "", "spans": []}
    adapter: TypeAdapter[TeacherResult] = TypeAdapter(TeacherResult)
    with pytest.raises(ValueError, match="spans"):
        adapter.validate_python(refusal)


def test_the_span_index_points_into_the_spans() -> None:
    score: TeacherScore = teacher_score(trajectory(), ByteTokenizer())
    assert [s.span_index for s in score.spans] == [1]
