"""How calls and observations are written, shared by the environments."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from miniverl_dist.schemas.messages import ToolCall

CallWriter = Callable[[Sequence[ToolCall]], str]
"""Writes calls as the chat format's wire text."""

_CUT = " ...[cut]"


def write_json_lines(calls: Sequence[ToolCall]) -> str:
    """Calls as JSON objects, one a line."""
    return "\n".join(
        json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False)
        for call in calls
    )


def cut(text: str, max_chars: int) -> str:
    """``text`` if it fits, else its beginning and a mark, ``max_chars`` in all."""
    if len(text) <= max_chars:
        return text
    mark = _CUT[:max_chars]
    return text[: max_chars - len(mark)] + mark
