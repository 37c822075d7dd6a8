from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from miniverl_dist.errors import MaskMismatchError, RecordError
from miniverl_dist.schemas.trajectory import (
    HARNESS_TERMINATIONS,
    Span,
    SpanKind,
    Termination,
    Trajectory,
    mask_from_spans,
)
from tests.fakes import ok_call, trajectory


def changed(base: Trajectory, **changes: object) -> Trajectory:
    """The trajectory with other fields, checked anew as a loaded one is."""
    fields = {name: getattr(base, name) for name in Trajectory.model_fields}
    return Trajectory.model_validate(fields | changes)


def with_span(base: Trajectory, index: int, **changes: object) -> Trajectory:
    spans = list(base.spans)
    spans[index] = spans[index].model_copy(update=changes)
    return changed(base, spans=tuple(spans))


def equal(left: Trajectory, right: Trajectory) -> bool:
    """Field by field; logprobs bit by bit."""
    return left.rollout_logprobs.tobytes() == right.rollout_logprobs.tobytes() and left.model_dump(
        exclude={"rollout_logprobs"}
    ) == right.model_dump(exclude={"rollout_logprobs"})


class TestSpansTile:
    def test_a_gap_an_overlap_and_a_rest_are_errors(self) -> None:
        base = trajectory(context_after="ok")
        starts = [span.start for span in base.spans]
        for index, change in [
            (1, {"start": starts[1] + 1}),
            (1, {"start": starts[1] - 1}),
            (0, {"start": 1}),
            (1, {"end": starts[1] - 1}),
            (2, {"end": base.spans[2].end - 1}),
            (2, {"end": base.spans[2].end + 1}),
        ]:
            with pytest.raises(RecordError, match=r"trajectory 000000\.0\.0: span"):
                with_span(base, index, **change)

    def test_a_negative_start_is_refused(self) -> None:
        with pytest.raises(ValidationError):
            Span(kind=SpanKind.USER, start=-1, end=0, segment_key="user:0")

    def test_empty_spans_tile_too(self) -> None:
        base = trajectory()
        empty = Span(kind=SpanKind.SYSTEM, start=0, end=0, segment_key="system:0")
        assert changed(base, spans=(empty, *base.spans)).spans[0] == empty

    def test_context_cannot_be_sampled(self) -> None:
        base = trajectory()
        for kind in (SpanKind.SYSTEM, SpanKind.USER, SpanKind.TOOL_RESULT):
            with pytest.raises(RecordError, match="is sampled but has kind"):
                with_span(base, 1, kind=kind)

    def test_a_sampled_span_needs_its_weight_versions(self) -> None:
        with pytest.raises(RecordError, match="weight versions"):
            with_span(trajectory(), 1, weight_versions=())


class TestMask:
    def test_every_flipped_entry_is_found(self) -> None:
        base = trajectory(context_after="ok")
        for position in range(len(base.token_ids)):
            mask = list(base.loss_mask)
            mask[position] = not mask[position]
            with pytest.raises(MaskMismatchError, match="differs from the mask"):
                changed(base, loss_mask=tuple(mask))

    def test_a_span_that_loses_its_flag_is_found(self) -> None:
        with pytest.raises(MaskMismatchError):
            with_span(trajectory(), 1, sampled=False)

    def test_a_loaded_record_is_checked_again(self) -> None:
        record = json.loads(trajectory().model_dump_json())
        record["loss_mask"][-1] = False
        record["rollout_logprobs"][-1] = None
        with pytest.raises(MaskMismatchError):
            Trajectory.model_validate_json(json.dumps(record))

    def test_defect_position_zero_is_never_trained(self) -> None:
        span = Span(
            kind=SpanKind.ASSISTANT_TEXT,
            start=0,
            end=3,
            segment_key="assistant:0",
            sampled=True,
            weight_versions=(0,),
        )
        assert mask_from_spans((span,), 3) == [False, True, True]
        base = trajectory()
        fields = {"token_ids": (1, 2, 3), "spans": (span,), "messages": ()}
        changed(base, **fields, loss_mask=(False, True, True), rollout_logprobs=[None, -1.0, -1.0])
        with pytest.raises(MaskMismatchError):
            changed(base, **fields, loss_mask=(True, True, True), rollout_logprobs=[-1.0] * 3)

    def test_it_holds_the_sampled_span_with_its_turn_end_only(self) -> None:
        told = trajectory("hi", context_after="ok")
        span = told.spans[1]
        assert span.end - span.start == 3
        assert np.flatnonzero(told.loss_mask).tolist() == [span.start, span.start + 1, span.end - 1]


class TestLogprobs:
    def test_lengths_must_agree(self) -> None:
        base = trajectory()
        for name in ("loss_mask", "rollout_logprobs"):
            with pytest.raises(RecordError, match=f"{name} has"):
                changed(base, **{name: tuple(getattr(base, name))[:-1]})

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None])
    def test_a_sampled_token_needs_a_finite_one(self, value: float | None) -> None:
        base = trajectory()
        logprobs = [None if math.isnan(v) else v for v in base.rollout_logprobs]
        logprobs[-1] = value
        with pytest.raises(RecordError, match="sampled token 11 has rollout logprob"):
            changed(base, rollout_logprobs=logprobs)

    @pytest.mark.parametrize("value", [0.0, -1.0, math.inf, -math.inf])
    def test_peer_9_a_context_token_has_none_not_even_zero(self, value: float) -> None:
        base = trajectory(context_after="a tool wrote this")
        for position in np.flatnonzero(~np.array(base.loss_mask)):
            logprobs = base.rollout_logprobs.tolist()
            logprobs[position] = value
            with pytest.raises(RecordError, match=f"context token {position} has rollout logprob"):
                changed(base, rollout_logprobs=logprobs)

    def test_peer_9_model_tool_model_has_logprobs_on_the_model_only(self) -> None:
        told = trajectory(context_after="a tool wrote this")
        stored = json.loads(told.model_dump_json())["rollout_logprobs"]
        assert [value is not None for value in stored] == list(told.loss_mask)
        assert np.isnan(told.rollout_logprobs[~np.array(told.loss_mask)]).all()

    def test_a_certain_token_keeps_its_zero(self) -> None:
        told = trajectory(logprob=0.0)
        assert json.loads(told.model_dump_json())["rollout_logprobs"][-1] == 0.0

    def test_text_in_place_of_numbers_is_refused(self) -> None:
        with pytest.raises((RecordError, ValidationError)):
            changed(trajectory(), rollout_logprobs="none")

    def test_the_array_cannot_be_written_and_is_a_copy(self) -> None:
        source = trajectory().rollout_logprobs.copy()
        told = changed(trajectory(), rollout_logprobs=source)
        source[:] = -9.0
        assert told.rollout_logprobs[-1] == -0.5
        with pytest.raises(ValueError, match="read-only"):
            told.rollout_logprobs[-1] = 0.0


class TestJson:
    @settings(deadline=None, max_examples=60)
    @given(
        st.floats(max_value=0.0, allow_nan=False, allow_infinity=False),
        st.text(alphabet=st.characters(codec="utf-8"), max_size=12),
    )
    def test_it_comes_back_bit_by_bit(self, logprob: float, text: str) -> None:
        told = trajectory(text, logprob=logprob, reward=0.1 + 0.2, calls=[ok_call("f", a=[1, 2.5])])
        assert equal(Trajectory.model_validate_json(told.model_dump_json()), told)

    def test_peer_19_two_spellings_of_one_text_stay_two(self) -> None:
        base = trajectory("Pantom")
        start, end = base.spans[1].start, base.spans[1].end
        other = (300, *base.token_ids[start + 3 : end])  # 300 spells the first three bytes
        spans = (base.spans[0], base.spans[1].model_copy(update={"end": start + len(other)}))
        told = changed(
            base,
            token_ids=(*base.token_ids[:start], *other),
            spans=spans,
            loss_mask=(False,) * start + (True,) * len(other),
            rollout_logprobs=[None] * start + [-0.5] * len(other),
        )
        assert told.messages == base.messages
        loaded = Trajectory.model_validate_json(told.model_dump_json())
        assert loaded.token_ids == told.token_ids != base.token_ids

    def test_an_unknown_field_is_refused(self) -> None:
        record = json.loads(trajectory().model_dump_json()) | {"extra": 1}
        with pytest.raises(ValidationError, match="extra"):
            Trajectory.model_validate_json(json.dumps(record))

    def test_wrong_types_are_refused(self) -> None:
        record = json.loads(trajectory().model_dump_json())
        for name, value in [("reward", "1"), ("seed", 1.5), ("termination", "bored")]:
            with pytest.raises(ValidationError, match=name):
                Trajectory.model_validate_json(json.dumps(record | {name: value}))


class TestClaims:
    def test_one_success_per_call(self) -> None:
        with pytest.raises(RecordError, match="2 exec_successes for 1 tool_calls"):
            changed(trajectory(calls=[ok_call("f")]), exec_successes=(True, False))

    def test_defect_harness_faults_are_not_trainable(self) -> None:
        assert {t.value for t in HARNESS_TERMINATIONS} == {
            "deadline",
            "environment_error",
            "engine_error",
        }
        for termination in Termination:
            told = trajectory(termination=termination)
            assert told.is_trainable == (termination not in HARNESS_TERMINATIONS), termination

    def test_nothing_sampled_is_not_trainable(self) -> None:
        base = trajectory()
        quiet = changed(
            base,
            spans=(base.spans[0],),
            token_ids=base.token_ids[: base.spans[0].end],
            loss_mask=base.loss_mask[: base.spans[0].end],
            rollout_logprobs=base.rollout_logprobs[: base.spans[0].end],
        )
        assert not quiet.is_trainable
        assert quiet.sampled_spans == ()
        assert quiet.oldest_version == 0

    def test_the_oldest_of_all_versions_counts(self) -> None:
        assert trajectory(version=7).oldest_version == 7
        assert with_span(trajectory(), 1, weight_versions=(4, 9)).oldest_version == 4

    def test_it_does_not_change(self) -> None:
        told = trajectory()
        with pytest.raises(ValidationError, match="frozen"):
            told.reward = 1.0  # type: ignore[misc]
