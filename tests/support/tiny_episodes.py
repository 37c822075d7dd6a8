"""Episodes over tokenizers small enough to reason about, as a policy would have left them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import pytest

from miniverl_dist.ports import ChatFormat
from miniverl_dist.schemas.messages import Message, ToolSchema
from miniverl_dist.schemas.trajectory import Span, SpanKind, Trajectory
from rollout_server.chat_format import Qwen36ChatFormat
from rollout_server.policies import Turn
from rollout_server.transcript import Transcript
from teacher_server.rendering import DeepSeekV4ChatFormat, TeacherRendering
from tests.reference.tiny_tokenizer import deepseek_like, qwen_like
from tests.support.bare_trajectory import bare_trajectory

pytest.importorskip("tokenizers")

STUDENT = qwen_like("Hello", " Pan", "tom")
TEACHER = deepseek_like("Hel", "lo", " Pantom", "Yes")
CHAT = Qwen36ChatFormat(STUDENT)
TEACHER_CHAT: ChatFormat = DeepSeekV4ChatFormat(TEACHER)
END, OTHER = CHAT.turn_end_id, STUDENT.special_id("<|endoftext|>")
BOS, EOS, USER, ASSISTANT = (
    TEACHER.special_id(f"<｜{name}｜>")
    for name in ("begin▁of▁sentence", "end▁of▁sentence", "User", "Assistant")
)
Step = tuple[Literal["user", "tool", "written", "sampled", "cut"], Any]


def play(*steps: Step, tools: Sequence[ToolSchema] = ()) -> Trajectory:
    """An episode: texts of user, tool (a list) and written turns; ids of sampled and cut ones."""
    transcript = Transcript(CHAT, tools)
    for kind, content in steps:
        if kind in ("sampled", "cut"):
            transcript.open_assistant()
            finish: Literal["length", "turn_end"] = "length" if kind == "cut" else "turn_end"
            turn = Turn(tuple(content), (-1.0,) * len(content), (0,), finish)
            text = STUDENT.decode(content)
            transcript.add_turn(turn, SpanKind.ASSISTANT_TEXT, text, [])
        elif kind == "tool":
            results = [Message(role="tool", content=text) for text in content]
            transcript.add_tool_results(results)
        else:
            role: Literal["user", "assistant"] = "user" if kind == "user" else "assistant"
            transcript.add_messages([Message(role=role, content=content)])
    spans, ids = tuple(transcript.spans), tuple(transcript.token_ids)
    return record(ids, spans, tuple(transcript.messages), list(transcript.rollout_logprobs))


def record(
    ids: tuple[int, ...],
    spans: tuple[Span, ...],
    messages: tuple[Message, ...],
    logprobs: list[float],
) -> Trajectory:
    return bare_trajectory(
        "t",
        ids,
        spans,
        tokenizer_fingerprint=STUDENT.fingerprint,
        rollout_logprobs=logprobs,
        messages=messages,
    )


def scored(rendering: TeacherRendering, index: int = 0) -> list[int]:
    span = rendering.spans[index]
    return list(rendering.token_ids[span.start : span.end])


def pieces(ids: Sequence[int]) -> list[bytes]:
    return [TEACHER.byte_table.pieces[i] for i in ids]


def shown(ids: Sequence[int]) -> str:
    """The teacher's ids as text, control tokens as letters."""
    marks = {BOS: "[B]", EOS: "[E]", USER: "[U]", ASSISTANT: "[A]"}
    data = b"".join(marks[i].encode() if i in marks else pieces([i])[0] for i in ids)
    return data.decode("utf-8", "replace")


def encode(text: str) -> list[int]:
    return STUDENT.encode(text)
