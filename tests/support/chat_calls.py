"""One tool, a call of it, and replies that call."""

from __future__ import annotations

from typing import Any

from miniverl_dist.generate_api.chat import ChatMessage, ChatToolCall, FunctionCall
from miniverl_dist.schemas.messages import ToolCall, ToolSchema

SCHEMAS = {
    "cd": ToolSchema(
        name="cd",
        description="Go.",
        parameters={"type": "object", "properties": {"folder": {"type": "string"}}},
    )
}
GO = ToolCall(name="cd", arguments={"folder": "a"})


def said(name: str | None, arguments: Any, content: str | None = None) -> ChatMessage:
    call = ChatToolCall(FunctionCall(name, arguments))
    return ChatMessage(content=content, tool_calls=(call,))
