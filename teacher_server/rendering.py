"""What the teacher reads: a student's trajectory in the teacher's own tokens.

    native    BOS, system text, role markers and tool turns as the teacher knows them; what the
              model wrote stays the student's wire bytes, verbatim
    raw       the student's whole text as it stands, without any marker
    verbatim  the student's very ids, for a teacher that has the student's tokenizer

Only model-written spans are scored. Under ``native`` and ``raw`` each is tokenised on its own, in
its place: no teacher token straddles the boundary of a span, and no text is ever rendered again
from parsed calls.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

from miniverl_dist.errors import (
    ConfigError,
    PrivilegedContextError,
    RecordError,
    TokenizerMismatchError,
)
from miniverl_dist.ports import ChatFormat, Piece
from miniverl_dist.schemas.messages import Message, ToolSchema
from miniverl_dist.schemas.running_episode import TokenRecord
from miniverl_dist.schemas.trajectory import ASSISTANT_KINDS, Span, SpanKind
from miniverl_dist.tokens.identity import knows_every_id
from miniverl_dist.tokens.tokenizer import TokenizerLike
from teacher_server.canvas import (
    PRIVILEGED_KEY,
    Canvas,
    OracleBlock,
    RenderedSpan,
    TeacherRendering,
)
from teacher_server.privileged import require_equal_segments

__all__ = [
    "DeepSeekV4ChatFormat",
    "OracleBlock",
    "RenderedSpan",
    "RenderingMode",
    "TeacherRendering",
    "WireFormat",
    "render",
    "turn_ends",
]

RenderingMode = Literal["native", "raw", "verbatim"]
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


def render(
    trajectory: TokenRecord,
    *,
    mode: RenderingMode,
    student_format: ChatFormat,
    teacher_format: ChatFormat | None,
    teacher: TokenizerLike,
    tools: Sequence[ToolSchema],
    every_written: bool = False,
    block: OracleBlock | None = None,
) -> TeacherRendering:
    """Render a trajectory for the teacher.

    Args:
        trajectory: The student's record. That of a running episode is rendered as the beginning of
            what its trajectory will be.
        mode: See the module.
        student_format: Of the student, over the tokenizer that the trajectory was made with. Under
            ``raw`` its turn end has no counterpart and is unscored.
        teacher_format: The teacher's chat format; needed by ``native`` only.
        teacher: The teacher's tokenizer.
        tools: Tools that the student was shown.
        every_written: Locate all assistant spans, not only those that the policy sampled.
        block: What the teacher reads before the policy's first turn and the student does not:
            a user turn of its own, or under ``raw`` a paragraph behind the context.

    Raises:
        ConfigError: ``native`` without a format, or a format of another tokenizer.
        TokenizerMismatchError: the student's tokenizer did not make the trajectory, or under
            ``verbatim`` the teacher does not know its ids.
        RecordError: a context span names no message, or nothing stands before a scored token.
        PrivilegedContextError: the text with the block differs by more than the block.
    """
    _require_ids_of(trajectory, student_format.tokenizer)
    painter = _painter(mode, student_format, teacher_format, teacher, tools)

    def painted(block: OracleBlock | None) -> TeacherRendering:
        canvas = Canvas(
            trajectory,
            student_format.tokenizer,
            teacher,
            turn_ends=turn_ends(mode, student_format, teacher_format),
            block=block,
            every_written=every_written,
        )
        painter(canvas)
        return canvas.finish()

    rendering = painted(None)
    if block is None:
        return rendering
    privileged = painted(block)
    require_equal_segments(trajectory, rendering, privileged)
    return privileged


def turn_ends(
    mode: RenderingMode, student_format: ChatFormat, teacher_format: ChatFormat | None
) -> tuple[int, int] | None:
    """Turn end ids of student and teacher where they stand for each other; None under ``raw``."""
    if mode == "verbatim":
        return student_format.turn_end_id, student_format.turn_end_id
    if mode == "native" and teacher_format is not None:
        return student_format.turn_end_id, teacher_format.turn_end_id
    return None


def _require_ids_of(trajectory: TokenRecord, student: TokenizerLike) -> None:
    if trajectory.tokenizer_fingerprint != student.fingerprint:
        raise TokenizerMismatchError(
            f"trajectory {trajectory.trajectory_id} holds ids of tokenizer "
            f"{trajectory.tokenizer_fingerprint[:12]}, the student's is {student.name} "
            f"({student.fingerprint[:12]}): its ids would spell other bytes"
        )


def _painter(
    mode: RenderingMode,
    student_format: ChatFormat,
    teacher_format: ChatFormat | None,
    teacher: TokenizerLike,
    tools: Sequence[ToolSchema],
) -> Callable[[Canvas], None]:
    """What fills the canvas, after a check of who can read what."""
    if mode == "raw":
        return _raw
    if mode == "verbatim":
        student = student_format.tokenizer
        if not knows_every_id(teacher, student):
            raise TokenizerMismatchError(
                f"verbatim rendering hands the ids of {student.name} ({student.fingerprint[:12]}) "
                f"to a teacher that reads those of {teacher.name} ({teacher.fingerprint[:12]}); "
                "give the teacher the student's tokenizer, or use teacher.rendering: native"
            )
        return partial(_verbatim, chat=student_format)
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
    return partial(_native, chat=teacher_format, tools=tools)


def _raw(canvas: Canvas) -> None:
    """The bytes of all spans; context between two model-written spans is tokenised as one."""
    trajectory, table, teacher = canvas.trajectory, canvas.student.byte_table, canvas.teacher
    context, key = b"", ""
    for index, span in enumerate(trajectory.spans):
        if span.kind in ASSISTANT_KINDS:
            canvas.context(key, teacher.encode_bytes(context))
            context, key = b"", ""
            text = canvas.block_before(span)
            if text is not None:
                canvas.context(PRIVILEGED_KEY, teacher.encode_bytes(f"{text}\n\n".encode()))
            canvas.written(index, span)
        else:
            context += table.join(trajectory.token_ids[span.start : span.end])
            key = key or span.segment_key
    canvas.context(key, teacher.encode_bytes(context))


def _native(canvas: Canvas, chat: ChatFormat, tools: Sequence[ToolSchema]) -> None:
    trajectory = canvas.trajectory
    canvas.context("system:0", chat.system(tools).token_ids)
    closing: Sequence[int] = ()  # of the assistant turn before; written when something follows
    previous: Span | None = None
    for index, span in enumerate(trajectory.spans):
        key = span.segment_key
        if span.kind in ASSISTANT_KINDS:
            if not _same_message(previous, span):
                canvas.context(key, closing)
                text = canvas.block_before(span)
                if text is not None:
                    canvas.context(PRIVILEGED_KEY, chat.user(text).token_ids)
                canvas.context(key, chat.assistant_opening().token_ids)
            has_turn_end = canvas.written(index, span)
            cut = () if has_turn_end else (chat.turn_end_id,)
            closing = [*cut, *chat.assistant_closing().token_ids]
        elif span.message_index is not None or span.kind is not SpanKind.SYSTEM:
            canvas.context(key, [*closing, *_context_piece(trajectory, index, chat)])
            closing = ()
        previous = span


def _verbatim(canvas: Canvas, chat: ChatFormat) -> None:
    """The ids as they are. An opening is the end of the span before; the block goes in between."""
    spans = canvas.trajectory.spans
    for index, span in enumerate(spans):
        if span.kind in ASSISTANT_KINDS:
            canvas.copied(index, span)
            continue
        ids = tuple(canvas.trajectory.token_ids[span.start : span.end])
        following = spans[index + 1] if index + 1 < len(spans) else span
        text = canvas.block_before(following) if following.kind in ASSISTANT_KINDS else None
        if text is not None:
            cut = len(ids) - len(_opening(canvas.trajectory, span, ids, chat))
            canvas.context(span.segment_key, ids[:cut])
            canvas.context(PRIVILEGED_KEY, chat.user(text).token_ids)
            ids = ids[cut:]
        canvas.context(span.segment_key, ids)


def _opening(
    trajectory: TokenRecord, span: Span, ids: tuple[int, ...], chat: ChatFormat
) -> tuple[int, ...]:
    opening = chat.assistant_opening().token_ids
    if ids[len(ids) - len(opening) :] != opening:
        raise PrivilegedContextError(
            f"trajectory {trajectory.trajectory_id}: segment {span.segment_key!r} does not end "
            "with the opening of an assistant turn in the student's chat format, so there is no "
            "place for the oracle's calls before it"
        )
    return opening


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
