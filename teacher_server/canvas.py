"""A teacher's text while it grows: its tokens, what they stand for, and what is scored in it.

Shapes: S student tokens, R teacher tokens of one span.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from miniverl_dist.alignment.spans import byte_ends, split_turn_end, student_byte_ends
from miniverl_dist.errors import RecordError
from miniverl_dist.schemas.running_episode import TokenRecord
from miniverl_dist.schemas.trajectory import Span
from miniverl_dist.tokens.tokenizer import TokenizerLike

PRIVILEGED_KEY = "privileged"
"""Key of what the student has not read; no span of a trajectory has it."""


@dataclass(frozen=True)
class RenderedSpan:
    """One model-written span in the teacher's tokens; the arrays are what alignment needs."""

    span_index: int
    """Index into ``Trajectory.spans``."""
    start: int
    """The span's teacher tokens are ``token_ids[start:end]``; ``start`` >= 1 unless empty."""
    end: int
    byte_ends: tuple[int, ...]
    """[R] from the span's start; a turn end counts as one byte."""
    student_byte_ends: tuple[int, ...]
    """[S] by the same rule."""


@dataclass(frozen=True)
class Segment:
    """A stretch of a teacher's text and the span of the trajectory that it stands for."""

    key: str
    """The span's ``segment_key``, or ``PRIVILEGED_KEY``. A span may stand in several stretches,
    and context that is tokenised as one has the key of its first span."""
    start: int
    end: int


@dataclass(frozen=True)
class TeacherRendering:
    """One prefill for the teacher, and where the scored tokens are in it."""

    token_ids: tuple[int, ...]
    spans: tuple[RenderedSpan, ...]
    """One per located span, in order."""
    segments: tuple[Segment, ...] = ()
    """They tile the tokens; none is empty."""

    def behind(self, token_ids: tuple[int, ...]) -> TeacherRendering:
        """The same text behind these tokens, which count to its first segment's span."""
        if not token_ids or not self.segments:
            return self
        size = len(token_ids)
        return TeacherRendering(
            (*token_ids, *self.token_ids),
            tuple(replace(s, start=s.start + size, end=s.end + size) for s in self.spans),
            (
                Segment(self.segments[0].key, 0, size),
                *(replace(s, start=s.start + size, end=s.end + size) for s in self.segments),
            ),
        )


@dataclass(frozen=True)
class OracleBlock:
    """What a teacher with privileged context reads more than the student."""

    text: str
    before_message: int
    """Index of the first message that the policy wrote: the block stands before its turn."""


class Canvas:
    """The prefill while it grows.

    Args:
        trajectory: What is rendered.
        student: The tokenizer of its ids.
        teacher: The tokenizer that the prefill is made for.
        turn_ends: Turn end ids of student and teacher; None where turn ends are not written.
        block: What is to stand before the policy's first turn.
        every_written: Locate all assistant spans, not only those that the policy sampled.
    """

    def __init__(
        self,
        trajectory: TokenRecord,
        student: TokenizerLike,
        teacher: TokenizerLike,
        *,
        turn_ends: tuple[int, int] | None,
        block: OracleBlock | None,
        every_written: bool,
    ) -> None:
        self.trajectory, self.student, self.teacher = trajectory, student, teacher
        self._turn_ends, self._every_written = turn_ends, every_written
        self._due = block
        self._ids: list[int] = []
        self._spans: list[RenderedSpan] = []
        self._segments: list[Segment] = []

    def context(self, key: str, token_ids: Sequence[int]) -> None:
        """Append tokens that are not scored, in the stead of the span of this key."""
        start = len(self._ids)
        self._ids.extend(token_ids)
        if token_ids:
            self._segments.append(Segment(key, start, len(self._ids)))

    def block_before(self, span: Span) -> str | None:
        """The block's text where it is due before this assistant span; given out once."""
        block = self._due
        is_due = (
            block is not None
            and span.message_index is not None
            and span.message_index >= block.before_message
        )
        if block is None or not is_due:
            return None
        self._due = None
        return block.text

    def written(self, index: int, span: Span) -> bool:
        """Append a model-written span, tokenised on its own; whether it had its turn end."""
        student_turn_end, teacher_turn_end = self._turn_ends or (None, None)
        span_ids = self.trajectory.token_ids[span.start : span.end]
        text_ids, has_turn_end = split_turn_end(span_ids, student_turn_end)
        teacher_ids = self.teacher.encode_bytes(self.student.byte_table.join(text_ids))
        ends = byte_ends(teacher_ids, self.teacher, has_turn_end=has_turn_end)
        if has_turn_end and teacher_turn_end is not None:
            teacher_ids.append(teacher_turn_end)
        self._append_span(index, span, teacher_ids, tuple(ends.tolist()))
        return has_turn_end

    def copied(self, index: int, span: Span) -> None:
        """Append a model-written span in the student's very ids: every token a unit of its own."""
        self._append_span(
            index,
            span,
            self.trajectory.token_ids[span.start : span.end],
            self._student_byte_ends(span),
        )

    def finish(self) -> TeacherRendering:
        """Freeze; nothing may be scored at position 0, where nothing predicts it."""
        for span in self._spans:
            if span.start == 0 and span.end > 0:
                raise RecordError(
                    f"trajectory {self.trajectory.trajectory_id}: nothing stands before span "
                    f"{span.span_index} in the teacher's text, so its first token has no logprob; "
                    "use teacher.rendering: native"
                )
        return TeacherRendering(tuple(self._ids), tuple(self._spans), tuple(self._segments))

    def _append_span(
        self, index: int, span: Span, teacher_ids: Sequence[int], ends: tuple[int, ...]
    ) -> None:
        start = len(self._ids)
        self.context(span.segment_key, teacher_ids)
        if span.sampled or self._every_written:
            self._spans.append(
                RenderedSpan(
                    span_index=index,
                    start=start,
                    end=len(self._ids),
                    byte_ends=ends,
                    student_byte_ends=self._student_byte_ends(span),
                )
            )

    def _student_byte_ends(self, span: Span) -> tuple[int, ...]:
        ids = self.trajectory.token_ids[span.start : span.end]
        turn_end = None if self._turn_ends is None else self._turn_ends[0]
        return tuple(student_byte_ends(ids, self.student, turn_end).tolist())
