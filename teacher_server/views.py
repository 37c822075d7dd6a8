"""Where student and teacher stand at the same token: the rows that two distributions can share.

A unit of one token on each side spells the same bytes for both, from the same beginning: there the
two predict the same thing, each from its own text. Units of several tokens have no such row.

Shapes: P tokens of a teacher's text, c rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.alignment.mau import align
from miniverl_dist.errors import AlignmentError
from miniverl_dist.schemas.running_episode import TokenRecord
from miniverl_dist.tokens.tokenizer import TokenizerLike
from teacher_server.canvas import RenderedSpan, TeacherRendering

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class TeacherView:
    """A teacher's text and the rows in it."""

    context_ids: IntArray
    """[P] teacher ids, up to the last row's token."""
    student_positions: IntArray
    """[c] rising places in the trajectory's ``token_ids``, at least 1."""
    teacher_positions: IntArray
    """[c] rising places in ``context_ids``, at least 1."""


def teacher_view(
    trajectory: TokenRecord,
    rendering: TeacherRendering,
    *,
    student: TokenizerLike,
    teacher: TokenizerLike,
    turn_ends: tuple[int, int] | None,
) -> TeacherView:
    """Find the rows of all spans that the rendering has located.

    Args:
        trajectory: What was rendered.
        rendering: Its text for the teacher.
        student: The trajectory's tokenizer.
        teacher: The rendering's.
        turn_ends: Ids of student and teacher that end a turn, as the rendering wrote them; None
            where it wrote none.

    Raises:
        AlignmentError: a unit whose two tokens do not stand for the same bytes: the rendering is
            not of this trajectory, or was made with other tokenizers.
    """
    empty = np.zeros(0, dtype=np.int64)
    ours, theirs = [empty], [empty]
    for span in rendering.spans:
        start = trajectory.spans[span.span_index].start
        student_units, teacher_units = _one_to_one(span)
        ours.append(start + student_units)
        theirs.append(span.start + teacher_units)
    view = TeacherView(
        np.asarray(rendering.token_ids, dtype=np.int64),
        np.concatenate(ours),
        np.concatenate(theirs),
    )
    _require_equal_bytes(trajectory, view, student, teacher, turn_ends)
    is_predicted = (view.student_positions > 0) & (view.teacher_positions > 0)
    teacher_positions = view.teacher_positions[is_predicted]
    size = int(teacher_positions[-1]) + 1 if len(teacher_positions) else 0
    return TeacherView(
        view.context_ids[:size], view.student_positions[is_predicted], teacher_positions
    )


def _one_to_one(span: RenderedSpan) -> tuple[IntArray, IntArray]:
    """Places within the span, of student and teacher, of units with one token on each side."""
    units = align(span.student_byte_ends, span.byte_ends)
    sides = (units.student_unit, units.teacher_unit)
    counts = [np.bincount(side + 1, minlength=units.num_units + 1)[1:] for side in sides]
    is_single = np.append((counts[0] == 1) & (counts[1] == 1), False)  # the last: unit -1
    ours, theirs = (np.flatnonzero(is_single[side]) for side in sides)
    return ours.astype(np.int64), theirs.astype(np.int64)


def _require_equal_bytes(
    trajectory: TokenRecord,
    view: TeacherView,
    student: TokenizerLike,
    teacher: TokenizerLike,
    turn_ends: tuple[int, int] | None,
) -> None:
    our_ids = np.asarray(trajectory.token_ids, dtype=np.int64)[view.student_positions].tolist()
    their_ids = view.context_ids[view.teacher_positions].tolist()
    ours, theirs = student.byte_table.pieces, teacher.byte_table.pieces
    for row, (our_id, their_id) in enumerate(zip(our_ids, their_ids, strict=True)):
        piece = ours[our_id]
        if (our_id, their_id) == turn_ends or (piece and piece == theirs[their_id]):
            continue
        raise AlignmentError(
            f"trajectory {trajectory.trajectory_id}: token {view.student_positions[row]} of the "
            f"student stands for {piece!r}, token {view.teacher_positions[row]} of the teacher's "
            f"text for {theirs[their_id]!r}, in a unit of their own; the rendering is of another "
            "trajectory or tokenizer"
        )
