from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import AlignmentError
from miniverl_dist.schemas.targets import TeacherContext
from miniverl_dist.schemas.trajectory import Span, SpanKind, Trajectory
from miniverl_dist.tokens.tokenizer import TokenizerLike
from teacher_server.rendering import OracleBlock, TeacherRendering, render
from teacher_server.views import TeacherView, teacher_view
from tests.reference.alignment import slow_align
from tests.support.tiny_episodes import (
    CHAT,
    END,
    EOS,
    OTHER,
    STUDENT,
    TEACHER,
    TEACHER_CHAT,
    Step,
    encode,
    play,
    record,
)

ENDS = {"native": (END, EOS), "raw": None, "verbatim": (END, END)}
BLOCK = OracleBlock("solution", before_message=1)


def reader(mode: str) -> TokenizerLike:
    return STUDENT if mode == "verbatim" else TEACHER


def drawn(trajectory: Trajectory, mode: str, block: OracleBlock | None = None) -> TeacherRendering:
    return render(
        trajectory,
        mode=mode,  # type: ignore[arg-type]
        student_format=CHAT,
        teacher_format=TEACHER_CHAT,
        teacher=reader(mode),
        tools=[],
        block=block,
    )


def view_of(
    trajectory: Trajectory, mode: str = "native", block: OracleBlock | None = None
) -> TeacherView:
    rendering = drawn(trajectory, mode, block)
    return teacher_view(
        trajectory, rendering, student=STUDENT, teacher=reader(mode), turn_ends=ENDS[mode]
    )


def pairs(trajectory: Trajectory, view: TeacherView, mode: str) -> list[tuple[bytes, bytes]]:
    """What the two tokens of each row stand for; a turn end is shown as its marker."""
    ours = [trajectory.token_ids[i] for i in view.student_positions]
    theirs = view.context_ids[view.teacher_positions].tolist()
    tables = STUDENT.byte_table.pieces, reader(mode).byte_table.pieces
    return [
        (tables[0][a] or b"[E]", tables[1][b] or b"[E]") for a, b in zip(ours, theirs, strict=True)
    ]


def test_rows_are_the_units_of_one_token_on_each_side() -> None:
    trajectory = play(("user", "q"), ("sampled", [*encode("Hello"), *b"ab Pantom", END]))
    # Hello | a b ␣ P a n t o m | end  against  Hel lo | a b | ␣Pantom | end
    view = view_of(trajectory)
    start = trajectory.spans[-1].start
    assert (view.student_positions - start).tolist() == [1, 2, 10]
    assert pairs(trajectory, view, "native") == [(b"a", b"a"), (b"b", b"b"), (b"[E]", b"[E]")]
    assert len(view.context_ids) == view.teacher_positions[-1] + 1


def test_the_students_very_ids_give_a_row_for_every_token_with_bytes() -> None:
    ids = [*b"Hel", OTHER, *encode("Hello"), END]
    trajectory = play(("user", "q"), ("sampled", ids))
    view = view_of(trajectory, "verbatim")
    assert np.array_equal(view.student_positions, view.teacher_positions)
    start = trajectory.spans[-1].start
    assert (view.student_positions - start).tolist() == [0, 1, 2, 4, 5]


def test_raw_text_has_no_turn_end_to_compare() -> None:
    trajectory = play(("user", "q"), ("sampled", [*b"ab", END]))
    view = view_of(trajectory, "raw")
    assert pairs(trajectory, view, "raw") == [(b"a", b"a"), (b"b", b"b")]


def test_the_block_moves_the_teachers_places_and_no_row() -> None:
    trajectory = play(("user", "q"), ("sampled", [*encode("Hello"), *b"ab", END]))
    for mode in ENDS:
        plain, moved = view_of(trajectory, mode), view_of(trajectory, mode, BLOCK)
        assert np.array_equal(plain.student_positions, moved.student_positions)
        offset = moved.teacher_positions - plain.teacher_positions
        assert len(set(offset.tolist())) == 1
        assert offset[0] > 0


def test_position_0_is_never_a_row() -> None:
    ids = (*b"ab", END)
    span = Span(
        kind=SpanKind.ASSISTANT_TEXT,
        start=0,
        end=3,
        segment_key="assistant:0",
        sampled=True,
        message_index=0,
        weight_versions=(0,),
    )
    message = play(("user", "q"), ("sampled", list(ids))).messages[1]
    trajectory = record(ids, (span,), (message,), [float("nan"), -1.0, -1.0])
    view = view_of(trajectory)
    assert view.student_positions.tolist() == [1, 2]
    assert view.teacher_positions.min() > 1


def test_nothing_written_gives_no_row() -> None:
    view = view_of(play(("user", "q")))
    assert [len(part) for part in (view.context_ids, view.student_positions)] == [0, 0]
    assert view.teacher_positions.dtype == view.student_positions.dtype == np.int64


Spoil = Callable[[Trajectory, TeacherRendering], TeacherRendering]


def other_token(trajectory: Trajectory, rendering: TeacherRendering) -> TeacherRendering:
    ids = list(rendering.token_ids)
    ids[rendering.spans[0].start] = ord("z")
    return replace(rendering, token_ids=tuple(ids))


def other_turn_end(trajectory: Trajectory, rendering: TeacherRendering) -> TeacherRendering:
    ids = list(rendering.token_ids)
    ids[rendering.spans[0].end - 1] = TEACHER.special_id("<｜User｜>")
    return replace(rendering, token_ids=tuple(ids))


def shifted(trajectory: Trajectory, rendering: TeacherRendering) -> TeacherRendering:
    (span,) = rendering.spans
    return replace(rendering, spans=(replace(span, start=span.start - 1, end=span.end - 1),))


def cut_short(trajectory: Trajectory, rendering: TeacherRendering) -> TeacherRendering:
    (span,) = rendering.spans
    return replace(rendering, spans=(replace(span, byte_ends=span.byte_ends[:-1]),))


@pytest.mark.parametrize("spoil", [other_token, other_turn_end, shifted, cut_short])
def test_a_rendering_of_something_else_is_an_error(spoil: Spoil) -> None:
    trajectory = play(("user", "q"), ("sampled", [*b"ab", END]))
    spoilt = spoil(trajectory, drawn(trajectory, "native"))
    with pytest.raises(AlignmentError):
        teacher_view(trajectory, spoilt, student=STUDENT, teacher=TEACHER, turn_ends=ENDS["native"])


def test_two_pieces_without_bytes_are_not_equal() -> None:
    trajectory = play(("user", "q"), ("sampled", [*b"ab", END]))
    rendering = drawn(trajectory, "native")
    with pytest.raises(AlignmentError, match="in a unit of their own"):
        teacher_view(trajectory, rendering, student=STUDENT, teacher=TEACHER, turn_ends=None)


IDS = st.lists(
    st.sampled_from([*b"Hel\xf0\x9f\x98\x80", *encode("Hello Pantom<tool_call>é"), OTHER, END]),
    max_size=10,
)


@pytest.mark.parametrize("mode", list(ENDS))
@pytest.mark.parametrize("block", [None, BLOCK])
@settings(deadline=None, max_examples=50)
@given(turns=st.lists(st.tuples(IDS, st.booleans()), min_size=1, max_size=3))
def test_rows_are_exactly_the_tokens_that_both_cut_alike(
    mode: str, block: OracleBlock | None, turns: list[tuple[list[int], bool]]
) -> None:
    steps: list[Step] = []
    for ids, ended in turns:
        steps += [("user", "é q"), ("sampled" if ended else "cut", [*ids, END] if ended else ids)]
    trajectory = play(*steps)
    rendering = drawn(trajectory, mode, block)
    view = view_of(trajectory, mode, block)
    expected = []
    for span in rendering.spans:
        start = trajectory.spans[span.span_index].start
        student, teacher, num_units = slow_align(span.student_byte_ends, span.byte_ends)
        expected += [
            (start + student.index(unit), span.start + teacher.index(unit))
            for unit in range(num_units)
            if student.count(unit) == teacher.count(unit) == 1
        ]
    found = list(zip(view.student_positions.tolist(), view.teacher_positions.tolist(), strict=True))
    assert found == expected
    assert all(a == b for a, b in pairs(trajectory, view, mode))
    assert all(trajectory.loss_mask[i] for i in view.student_positions)
    TeacherContext(view.context_ids, view.teacher_positions)  # raises where a row is unpredicted
