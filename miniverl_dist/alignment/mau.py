"""Minimally aligned units: the finest pieces of text that two tokenisations both respect.

Shapes: S student tokens, R teacher tokens, of one span.

Worked example: the bytes of ``ok <tool>`` (9), spelled ``ok| |<tool>`` and ``ok |<|tool|>``:

    student_ends  2 3 9        student_unit  0 0 1
    teacher_ends  3 4 8 9      teacher_unit  0 1 1 1      num_units 2
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import AlignmentError

ByteEnds = Sequence[int] | NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Units:
    """Which unit each token of one span belongs to; the arrays are read-only."""

    student_unit: NDArray[np.int32]
    """[S] non-decreasing where it is not -1; -1 for a token that carries no bytes."""
    teacher_unit: NDArray[np.int32]
    """[R] the same for the teacher's tokens."""
    num_units: int


def align(student_ends: ByteEnds, teacher_ends: ByteEnds) -> Units:
    """Cut a span where both tokenisations have a boundary.

    Time and memory grow with S + R, whatever the length of the text in bytes. A token whose end
    equals the one before it (the first: 0) carries no bytes and belongs to no unit.

    Args:
        student_ends: [S] offset in bytes from the span's start at which each token ends,
            non-decreasing; may be empty.
        teacher_ends: [R] the same for the teacher.

    Raises:
        AlignmentError: the two do not end at the same byte, or an end is negative, decreasing or
            not an integer.

    Source:
        Oracle tests/reference/alignment.py; units in docs/math.md section 2.
    """
    student, student_wide = _checked(student_ends, "student")
    teacher, teacher_wide = _checked(teacher_ends, "teacher")
    student_total, teacher_total = _total(student), _total(teacher)
    if student_total != teacher_total:
        raise AlignmentError(
            f"student tokens end at byte {student_total}, teacher tokens at byte {teacher_total}; "
            "both must spell the same bytes of one span: tokenise the span's bytes, not its text"
        )
    student_shared, teacher_shared = _shared(student[student_wide], teacher[teacher_wide])
    return Units(
        student_unit=_number(student_wide, student_shared),
        teacher_unit=_number(teacher_wide, teacher_shared),
        num_units=int(np.count_nonzero(student_shared)),
    )


def _checked(ends: ByteEnds, whose: str) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The ends, and whether each token carries bytes."""
    array = np.asarray(ends)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise AlignmentError(
            f"{whose} byte ends have shape {array.shape} and dtype {array.dtype}; expected one "
            "row of integers, the offset at which each token ends"
        )
    array = array.astype(np.int64, copy=False)
    starts = np.zeros_like(array)
    starts[1:] = array[:-1]
    falls = array < starts
    if falls.any():
        where = int(falls.argmax())
        raise AlignmentError(
            f"{whose} token {where} ends at byte {array[where]}, before byte {starts[where]} where "
            "it starts; expected non-decreasing ends from the span's start"
        )
    return array, array > starts


def _total(ends: NDArray[np.int64]) -> int:
    return int(ends[-1]) if ends.size else 0


def _shared(
    student: NDArray[np.int64], teacher: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether the other side has a boundary where each token ends; both inputs strictly rise.

    A stable sort of two ascending runs is one merge, hence linear; an end that stands in both
    runs then stands twice in a row.
    """
    both = np.concatenate((student, teacher))
    order = np.argsort(both, kind="stable")
    merged = both[order]
    twice = np.flatnonzero(merged[1:] == merged[:-1])
    shared = np.zeros(both.size, dtype=np.bool_)
    shared[order[twice]] = True
    shared[order[twice + 1]] = True
    return shared[: student.size], shared[student.size :]


def _number(wide: NDArray[np.bool_], shared: NDArray[np.bool_]) -> NDArray[np.int32]:
    """[S] unit of each token: the number of shared boundaries before its own end."""
    unit = np.full(wide.size, -1, dtype=np.int32)
    unit[wide] = np.cumsum(shared, dtype=np.int32) - shared
    unit.setflags(write=False)
    return unit
