"""What the teacher reads: a student's trajectory in the teacher's own tokens.

    native   BOS, system text, role markers and tool turns as the teacher knows them; what the
             model wrote stays the student's wire bytes, verbatim
    raw      the student's whole text as it stands, without any marker

Only model-written spans are scored. Each is tokenised on its own, in its place: no teacher token
straddles the boundary of a span, and no text is ever rendered again from parsed calls.

Shapes: S student tokens, R teacher tokens of one span.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from miniverl_dist.alignment.spans import byte_ends, split_turn_end, student_byte_ends
from miniverl_dist.errors import ConfigError, RecordError, TokenizerMismatchError
from miniverl_dist.ports import ChatFormat, Piece
from miniverl_dist.schemas.messages import Message, ToolSchema
from miniverl_dist.schemas.running_episode import TokenRecord
from miniverl_dist.schemas.trajectory import ASSISTANT_KINDS, Span, SpanKind
from miniverl_dist.tokens.tokenizer import TokenizerLike

RenderingMode = Literal["native", "raw"]
WireFormat = Literal["qwen_xml", "hermes_json"]

_CALL_FORMS: dict[WireFormat, str] = {
    "qwen_xml": (
        "<tool_call>\n<function=NAME_OF_TOOL>\n<parameter=NAME_OF_PARAMETER>\nvalue\n"
        "</parameter>\n</function>\n</tool_call>\n\n"
        "with one parameter block per argument. Strings stand as they are, without quotes; every "
        "other value (number, boolean, null, array, object) is written as JSON."
    ),
    "hermes_json": (
        '<tool_call>\n{"name": "NAME_OF_TOOL", "arguments": {"NAME_OF_PARAMETER": value}}\n'
        "</tool_call>\n\nwith every value written as JSON."
    ),
}


class DeepSeekV4ChatFormat:
    """Implements `ports.ChatFormat` for DeepSeek V4 in non-thinking mode.

    Roles, turn ends and tool turns are V4's own. The system text differs on purpose: it asks for
    the *student's* wire format instead of V4's, so that what the student wrote is what this system
    text asks for.

    Args:
        tokenizer: DeepSeek V4's, or a sub-vocabulary of it.
        wire_format: The form of calls that the student writes.

    Source:
        Structure as in DeepSeek's own encoder, the package ``deepseek-recipe``.
    """

    def __init__(self, tokenizer: TokenizerLike, *, wire_format: WireFormat = "qwen_xml") -> None:
        self._tokenizer = tokenizer
        self._call_form = _CALL_FORMS[wire_format]
        self._bos = tokenizer.special_id("<｜begin▁of▁sentence｜>")
        self._user = tokenizer.special_id("<｜User｜>")
        self._assistant = tokenizer.special_id("<｜Assistant｜>")
        self._turn_end = tokenizer.special_id("<｜end▁of▁sentence｜>")

    @property
    def tokenizer(self) -> TokenizerLike:
        """The tokenizer all ids belong to."""
        return self._tokenizer

    @property
    def turn_end_id(self) -> int:
        """``<｜end▁of▁sentence｜>``."""
        return self._turn_end

    def system(self, tools: Sequence[ToolSchema]) -> Piece:
        """BOS and the tools with the form of a call; BOS alone without tools.

        Tools without description and parameters (prompt ``names``) are listed by name only.
        """
        text = self._system_text(tools)
        return Piece(SpanKind.SYSTEM, (self._bos, *self._tokenizer.encode(text)))

    def user(self, content: str) -> Piece:
        """A user turn."""
        return Piece(SpanKind.USER, (self._user, *self._tokenizer.encode(content)))

    def tool_results(self, contents: Sequence[str]) -> Piece:
        """All results in one user turn, a block each."""
        text = "\n\n".join(f"<tool_result>{content}</tool_result>" for content in contents)
        return Piece(SpanKind.TOOL_RESULT, (self._user, *self._tokenizer.encode(text)))

    def assistant_opening(self) -> Piece:
        """The assistant's marker and the end of (no) thinking."""
        thinking_end = self._tokenizer.encode("</think>")
        return Piece(SpanKind.USER, (self._assistant, *thinking_end))

    def assistant_closing(self) -> Piece:
        """Nothing: the next turn follows its predecessor's end at once."""
        return Piece(SpanKind.USER, ())

    def written(self, message: Message) -> Piece:
        """The message's wire text, verbatim, and the turn end."""
        kind = SpanKind.ASSISTANT_TOOL_CALL if message.tool_calls else SpanKind.ASSISTANT_TEXT
        ids = self._tokenizer.encode_bytes(message.content.encode("utf-8", "replace"))
        return Piece(kind, (*ids, self._turn_end))

    def _system_text(self, tools: Sequence[ToolSchema]) -> str:
        if not tools:
            return ""
        if not any(tool.description or tool.parameters for tool in tools):
            return f"Tools: {', '.join(tool.name for tool in tools)}"
        listing = "\n".join(
            json.dumps(
                {"name": t.name, "description": t.description, "parameters": t.parameters},
                ensure_ascii=False,
            )
            for t in tools
        )
        return (
            "## Tools\n\nThese tools can be called, one JSON object each:\n\n"
            f"{listing}\n\n### Form of a call\n\nA call is written in exactly this form:\n\n"
            f"{self._call_form}\n\nSeveral calls follow each other, each in a block of its own; "
            "nothing comes after the last one. Their results are given in the next turn. When no "
            "call is needed, the answer is plain text."
        )


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
class TeacherRendering:
    """One prefill for the teacher, and where the scored tokens are in it."""

    token_ids: tuple[int, ...]
    spans: tuple[RenderedSpan, ...]
    """One per located span, in order."""


def render(
    trajectory: TokenRecord,
    *,
    mode: RenderingMode,
    teacher_format: ChatFormat | None,
    student: TokenizerLike,
    teacher: TokenizerLike,
    tools: Sequence[ToolSchema],
    turn_end_id: int,
    every_written: bool = False,
) -> TeacherRendering:
    """Render a trajectory for the teacher.

    Args:
        trajectory: The student's record. That of a running episode is rendered as the beginning of
            what its trajectory will be.
        mode: See the module.
        teacher_format: The teacher's chat format; needed by ``native`` only.
        student: The tokenizer that the trajectory was made with.
        teacher: The teacher's tokenizer.
        tools: Tools that the student was shown.
        turn_end_id: The student's turn end. Under ``raw`` it has no counterpart and is unscored.
        every_written: Locate all assistant spans, not only those that the policy sampled.

    Raises:
        ConfigError: ``native`` without a format, or a format of another tokenizer.
        TokenizerMismatchError: ``student`` did not make the trajectory.
        RecordError: a context span names no message, or nothing stands before a scored token.
    """
    if trajectory.tokenizer_fingerprint != student.fingerprint:
        raise TokenizerMismatchError(
            f"trajectory {trajectory.trajectory_id} holds ids of tokenizer "
            f"{trajectory.tokenizer_fingerprint[:12]}, the student's is {student.name} "
            f"({student.fingerprint[:12]}): its ids would spell other bytes"
        )
    canvas = _Canvas(trajectory, student, teacher, every_written=every_written)
    if mode == "raw":
        return _raw(canvas)
    if teacher_format is None:
        raise ConfigError(
            f"native rendering needs the teacher's chat format, and there is none for "
            f"{teacher.name}; use teacher.rendering: raw"
        )
    if teacher_format.tokenizer.fingerprint != teacher.fingerprint:
        raise ConfigError(
            f"the teacher's chat format writes ids of {teacher_format.tokenizer.name}, the teacher "
            f"reads ids of {teacher.name}"
        )
    canvas.turn_ends = (turn_end_id, teacher_format.turn_end_id)
    return _native(canvas, teacher_format, tools)


class _Canvas:
    """The prefill while it grows."""

    turn_ends: tuple[int, int] | None = None
    """Turn end ids of student and teacher; None where turn ends are not written."""

    def __init__(
        self,
        trajectory: TokenRecord,
        student: TokenizerLike,
        teacher: TokenizerLike,
        *,
        every_written: bool,
    ) -> None:
        self.trajectory, self.student, self.teacher = trajectory, student, teacher
        self._every_written = every_written
        self._ids: list[int] = []
        self._spans: list[RenderedSpan] = []

    def context(self, token_ids: Sequence[int]) -> None:
        """Append tokens that are not scored."""
        self._ids.extend(token_ids)

    def written(self, index: int, span: Span) -> bool:
        """Append a model-written span, tokenised on its own; whether it had its turn end."""
        student_turn_end, teacher_turn_end = self.turn_ends or (None, None)
        span_ids = self.trajectory.token_ids[span.start : span.end]
        text_ids, has_turn_end = split_turn_end(span_ids, student_turn_end)
        teacher_ids = self.teacher.encode_bytes(self.student.byte_table.join(text_ids))
        start = len(self._ids)
        self._ids.extend(teacher_ids)
        if has_turn_end and teacher_turn_end is not None:
            self._ids.append(teacher_turn_end)
        if span.sampled or self._every_written:
            ends = byte_ends(teacher_ids, self.teacher, has_turn_end=has_turn_end)
            student_ends = student_byte_ends(span_ids, self.student, student_turn_end)
            self._spans.append(
                RenderedSpan(
                    span_index=index,
                    start=start,
                    end=len(self._ids),
                    byte_ends=tuple(ends.tolist()),
                    student_byte_ends=tuple(student_ends.tolist()),
                )
            )
        return has_turn_end

    def finish(self) -> TeacherRendering:
        """Freeze; nothing may be scored at position 0, where nothing predicts it."""
        for span in self._spans:
            if span.start == 0 and span.end > 0:
                raise RecordError(
                    f"trajectory {self.trajectory.trajectory_id}: nothing stands before span "
                    f"{span.span_index} in the teacher's text, so its first token has no logprob; "
                    "use teacher.rendering: native"
                )
        return TeacherRendering(tuple(self._ids), tuple(self._spans))


def _raw(canvas: _Canvas) -> TeacherRendering:
    """The bytes of all spans; context between two model-written spans is tokenised as one."""
    trajectory, table = canvas.trajectory, canvas.student.byte_table
    context = b""
    for index, span in enumerate(trajectory.spans):
        if span.kind in ASSISTANT_KINDS:
            canvas.context(canvas.teacher.encode_bytes(context))
            context = b""
            canvas.written(index, span)
        else:
            context += table.join(trajectory.token_ids[span.start : span.end])
    canvas.context(canvas.teacher.encode_bytes(context))
    return canvas.finish()


def _native(canvas: _Canvas, chat: ChatFormat, tools: Sequence[ToolSchema]) -> TeacherRendering:
    trajectory = canvas.trajectory
    canvas.context(chat.system(tools).token_ids)
    closing: Sequence[int] = ()  # of the assistant turn before; written when something follows
    previous: Span | None = None
    for index, span in enumerate(trajectory.spans):
        if span.kind in ASSISTANT_KINDS:
            if not _same_message(previous, span):
                canvas.context([*closing, *chat.assistant_opening().token_ids])
            has_turn_end = canvas.written(index, span)
            cut = () if has_turn_end else (chat.turn_end_id,)
            closing = [*cut, *chat.assistant_closing().token_ids]
        elif span.message_index is not None or span.kind is not SpanKind.SYSTEM:
            canvas.context([*closing, *_context_piece(trajectory, index, chat)])
            closing = ()
        previous = span
    return canvas.finish()


def _same_message(previous: Span | None, span: Span) -> bool:
    """Whether an assistant span goes on with the message of the span before it."""
    return (
        previous is not None
        and previous.kind in ASSISTANT_KINDS
        and span.message_index is not None
        and previous.message_index == span.message_index
    )


def _context_piece(trajectory: TokenRecord, index: int, chat: ChatFormat) -> tuple[int, ...]:
    """A user turn, or the results that one tool span holds, in the teacher's own way."""
    span, messages = trajectory.spans[index], trajectory.messages
    first = span.message_index
    if first is None or not 0 <= first < len(messages):
        raise RecordError(
            f"trajectory {trajectory.trajectory_id}: span {index} ({span.kind}) names message "
            f"{first} of {len(messages)}; native rendering needs the message of every context span"
        )
    if span.kind is not SpanKind.TOOL_RESULT:
        return chat.user(messages[first].content).token_ids
    contents = [messages[first].content]
    claimed = {other.message_index for other in trajectory.spans if other is not span}
    for number in range(first + 1, len(messages)):
        if messages[number].role != "tool" or number in claimed:
            break
        contents.append(messages[number].content)
    return chat.tool_results(contents).token_ids
