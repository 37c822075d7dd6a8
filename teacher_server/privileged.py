"""Privileged context: the teacher also reads the oracle's calls, and nothing else changes.

The block is made for the teacher's text alone. It enters no message and no token of a trajectory,
so the student never reads it and no record of the episode holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from miniverl_dist.errors import PrivilegedContextError
from miniverl_dist.schemas.messages import ToolCall
from miniverl_dist.schemas.running_episode import TokenRecord
from teacher_server.canvas import PRIVILEGED_KEY, RenderedSpan, TeacherRendering

HEADING = "Reference solution:"
NO_CALL = "(no call)"


def solution_text(
    turns: Sequence[Sequence[ToolCall]], write_calls: Callable[[Sequence[ToolCall]], str]
) -> str:
    """The calls still to be made, a paragraph for each user turn from the current one.

    Args:
        turns: As ``Session.expert_tail`` gives them; turns without calls behind the last call are
            left out.
        write_calls: The student's wire form.

    Raises:
        RecordError: a call that the wire form cannot express.
    """
    last = max((number for number, calls in enumerate(turns) if calls), default=0)
    paragraphs = [write_calls(calls) if calls else NO_CALL for calls in turns[: last + 1]]
    return "\n\n".join([HEADING, *(paragraphs or [NO_CALL])])


def require_equal_segments(
    trajectory: TokenRecord, standard: TeacherRendering, privileged: TeacherRendering
) -> None:
    """Compare a rendering with its privileged twin: one block more, and all else token for token.

    Raises:
        PrivilegedContextError: another difference, or a sampled span without the block before it.
    """
    where = f"trajectory {trajectory.trajectory_id}, privileged context"
    blocks = [segment for segment in privileged.segments if segment.key == PRIVILEGED_KEY]
    start = blocks[0].start if blocks else len(privileged.token_ids)
    num_missed = sum(
        span.start < start and trajectory.spans[span.span_index].sampled
        for span in privileged.spans
    )
    if len(blocks) > 1 or num_missed:
        raise PrivilegedContextError(
            f"{where}: found {len(blocks)} blocks of the oracle's calls and {num_missed} sampled "
            "spans that none stands before, expected one block before all of them"
        )
    _compare_segments(where, standard, privileged)
    size = blocks[0].end - start if blocks else 0
    moved = [_moved(span, size if span.start >= start else 0) for span in standard.spans]
    if moved != list(privileged.spans):
        raise PrivilegedContextError(
            f"{where}: spans {list(privileged.spans)}, expected those of the standard rendering "
            f"behind {size} more tokens: {moved}"
        )


def _compare_segments(where: str, standard: TeacherRendering, privileged: TeacherRendering) -> None:
    expected, found = _by_key(standard), _by_key(privileged)
    found.pop(PRIVILEGED_KEY, None)
    for key in [*expected, *found]:
        if expected.get(key) != found.get(key):
            raise PrivilegedContextError(
                f"{where}: segment {key!r} has the teacher's ids {_shown(found.get(key))}, without "
                f"the block {_shown(expected.get(key))}; a chat format must write a message the "
                "same whatever stands before it"
            )


def _by_key(rendering: TeacherRendering) -> dict[str, tuple[int, ...]]:
    """Ids of each segment; what stands in several stretches is joined."""
    ids: dict[str, tuple[int, ...]] = {}
    for segment in rendering.segments:
        here = rendering.token_ids[segment.start : segment.end]
        ids[segment.key] = ids.get(segment.key, ()) + here
    return ids


def _moved(span: RenderedSpan, offset: int) -> RenderedSpan:
    return RenderedSpan(
        span.span_index,
        span.start + offset,
        span.end + offset,
        span.byte_ends,
        span.student_byte_ends,
    )


def _shown(ids: tuple[int, ...] | None) -> str:
    if ids is None:
        return "none"
    return f"{list(ids[:8])}{' ...' if len(ids) > 8 else ''} ({len(ids)})"
