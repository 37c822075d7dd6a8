"""Chat formats of students: messages to tokens, append-only.

Every piece is encoded on its own and its control tokens are put in by id: text that looks like a
marker (``<|im_end|>`` typed by a user) stays text, and a later message never changes the tokens of
an earlier one. Nothing is rendered again from parsed calls: an assistant message is its wire text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from miniverl_dist.ports import Piece
from miniverl_dist.schemas.messages import Message, ToolCall, ToolSchema
from miniverl_dist.schemas.trajectory import SpanKind
from miniverl_dist.tokens.tokenizer import TokenizerLike
from rollout_server.tool_calls import write_qwen_xml

# Our own words around the wire form that the model was trained on. A model folder's own template
# can give the exact text; the form of tools, turns, calls and results is the same.
_TOOLS_HEAD = "# Tools\n\nEach line between the tags describes one function as JSON:\n\n<tools>"
_TOOLS_FOOT = """
</tools>

A call has this form, one block for each parameter; a value may run over several lines:

<tool_call>
<function=NAME>
<parameter=PARAMETER>
value
</parameter>
</function>
</tool_call>

Give every required parameter. Strings stand without quotes, other values as JSON. Several calls \
follow each other, each in a block of its own, and nothing comes after the last one. When no \
function is needed, answer in plain text."""


class Qwen36ChatFormat:
    """Implements `ports.ChatFormat` as Qwen3.6 does with thinking off and its blocks preserved.

    Args:
        tokenizer: Qwen3.6's, a sub-vocabulary of it, or any other with ChatML's control tokens.

    Source:
        Turns, calls and results as in the model's own chat template with ``enable_thinking=False``
        and ``preserve_thinking=True``: without the latter the empty thinking blocks of former
        turns vanish, and the render at K calls is no prefix of the render at K + 1.
    """

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer
        self._turn_start = tokenizer.special_id("<|im_start|>")
        self._turn_end = tokenizer.special_id("<|im_end|>")

    @property
    def tokenizer(self) -> TokenizerLike:
        """The tokenizer all ids belong to."""
        return self._tokenizer

    @property
    def turn_end_id(self) -> int:
        """``<|im_end|>``."""
        return self._turn_end

    def system(self, tools: Sequence[ToolSchema]) -> Piece:
        """The tools and the wire format; nothing at all without tools (prompt ``compact``).

        Tools without description and parameters (prompt ``names``) are listed by name only: toy
        models have small contexts.
        """
        if not tools:
            return Piece(SpanKind.SYSTEM, ())
        if any(tool.description or tool.parameters for tool in tools):
            text = tools_text(tools)
        else:
            text = f"Tools: {', '.join(tool.name for tool in tools)}"
        return Piece(SpanKind.SYSTEM, self._turn(f"system\n{text}"))

    def user(self, content: str) -> Piece:
        """A user turn, without blanks around its text."""
        return Piece(SpanKind.USER, self._turn(f"user\n{content.strip()}"))

    def tool_results(self, contents: Sequence[str]) -> Piece:
        """All results in one user turn, a ``<tool_response>`` block each."""
        blocks = "".join(
            f"\n<tool_response>\n{content.strip()}\n</tool_response>" for content in contents
        )
        return Piece(SpanKind.TOOL_RESULT, self._turn(f"user{blocks}"))

    def assistant_opening(self) -> Piece:
        """The generation prompt, with the empty thinking block that says that thinking is off."""
        text = self._tokenizer.encode("assistant\n<think>\n\n</think>\n\n")
        return Piece(SpanKind.USER, (self._turn_start, *text))

    def assistant_closing(self) -> Piece:
        """The line break behind a turn end."""
        return Piece(SpanKind.USER, tuple(self._tokenizer.encode("\n")))

    def written(self, message: Message) -> Piece:
        """The message's wire text, byte for byte, and the turn end."""
        kind = SpanKind.ASSISTANT_TOOL_CALL if message.tool_calls else SpanKind.ASSISTANT_TEXT
        ids = self._tokenizer.encode_bytes(message.content.encode("utf-8", "replace"))
        return Piece(kind, (*ids, self._turn_end))

    def write_calls(self, calls: Sequence[ToolCall]) -> str:
        """Wire text of calls, as `written` expects it in a message's content.

        Raises:
            RecordError: a value that the format cannot express.
        """
        return write_qwen_xml(calls)

    def _turn(self, text: str) -> tuple[int, ...]:
        line_break = self._tokenizer.encode("\n")
        return (self._turn_start, *self._tokenizer.encode(text), self._turn_end, *line_break)


class PlainChatMLFormat(Qwen36ChatFormat):
    """The same turns for a model that has never seen a thinking block (SmolLM2 and the like)."""

    def assistant_opening(self) -> Piece:
        """The generation prompt alone."""
        return Piece(SpanKind.USER, (self._turn_start, *self._tokenizer.encode("assistant\n")))


def tools_text(tools: Sequence[ToolSchema]) -> str:
    """The system text: every tool in full, and how a call is written."""
    return "\n".join([_TOOLS_HEAD, *(_tool_line(tool) for tool in tools)]) + _TOOLS_FOOT


def _tool_line(tool: ToolSchema) -> str:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
    }
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)
