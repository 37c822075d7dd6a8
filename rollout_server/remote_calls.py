"""What travels between an episode and an OpenAI-compatible server: messages, tools, calls.

Two forms. ``tools``: the request declares the tools, the reply's ``tool_calls`` are the calls.
``text``: the system text describes our wire format, the model writes it, our parser reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miniverl_dist.errors import RecordError
from miniverl_dist.generate_api.chat import ChatMessage, FunctionCall
from miniverl_dist.schemas.messages import (
    Message,
    ParsedCall,
    ParsedMessage,
    ParseStatus,
    ToolCall,
    ToolSchema,
)
from miniverl_dist.tokens.byte_table import without_surrogates
from rollout_server.chat_format import tools_text
from rollout_server.tool_calls import (
    ToolCallParser,
    ToolCallWriter,
    parse_hermes_json,
    write_hermes_json,
)

_MAX_LEVELS = 64
"""Deeper arguments are malformed: no tool takes them, and readers of JSON give up on them."""
_MAX_SHOWN_CHARS = 16 * 2**10
"""Of a call that could not be read: it is there to be looked at, and costs tokens."""
_THINKING_END = "</think>"
_THINKING_START = "<think>"


def declared_tools(schemas: Mapping[str, ToolSchema]) -> list[dict[str, Any]]:
    """The ``tools`` of a request."""
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.parameters or {"type": "object", "properties": {}},
            },
        }
        for tool in schemas.values()
    ]


def text_history(
    messages: Sequence[Message], schemas: Mapping[str, ToolSchema]
) -> list[dict[str, Any]]:
    """The episode as chat messages with the calls as text, under a system text with the tools."""
    history = [_said("system", tools_text(list(schemas.values())))]
    for message, results in _with_results(messages):
        history.append(_said(message.role, message.content))
        if results:
            history.append(_said("user", _as_text(results)))
    return history


def tools_history(messages: Sequence[Message], parse: ToolCallParser) -> list[dict[str, Any]]:
    """The episode as chat messages with structured calls.

    A message with a call that could not be read goes back as the text it was recorded as: servers
    refuse a history whose arguments are not JSON.
    """
    history: list[dict[str, Any]] = []
    for message, results in _with_results(messages):
        if message.role != "assistant" or len(message.tool_calls) != len(results):
            history.append(_said(message.role, message.content))
            if results:
                history.append(_said("user", _as_text(results)))
            continue
        said: dict[str, Any] = _said("assistant", parse(message.content).text)
        ids = [f"call_{len(history)}_{index}" for index in range(len(results))]
        if ids:
            said["tool_calls"] = [
                _sent(call, name) for call, name in zip(message.tool_calls, ids, strict=True)
            ]
        history.append(said)
        history += [
            _said("tool", result.content) | {"tool_call_id": name}
            for result, name in zip(results, ids, strict=True)
        ]
    return history


def _with_results(messages: Sequence[Message]) -> Iterator[tuple[Message, list[Message]]]:
    """Each message that is no result, with the results that follow it."""
    index = 0
    while index < len(messages):
        end = index + 1
        while end < len(messages) and messages[end].role == "tool":
            end += 1
        yield messages[index], list(messages[index + 1 : end])
        index = end


def _said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": without_surrogates(content)}


def _as_text(results: Sequence[Message]) -> str:
    return "\n".join(f"<tool_response>\n{r.content}\n</tool_response>" for r in results)


def _sent(call: ToolCall, call_id: str) -> dict[str, Any]:
    arguments = json.dumps(call.arguments, ensure_ascii=False)
    function = {"name": call.name, "arguments": arguments}
    return {"id": call_id, "type": "function", "function": function}


def without_thinking(text: str) -> str:
    """A reply without its reasoning; one that is cut within it says nothing."""
    head, end, rest = text.rpartition(_THINKING_END)
    if end:
        return rest.lstrip("\n")
    return "" if head == "" and rest.lstrip().startswith(_THINKING_START) else text


def read_message(message: ChatMessage, *, is_cut: bool) -> ParsedMessage:
    """A structured reply as text and calls; never raises.

    Args:
        message: Of the reply.
        is_cut: Its token limit ended it: unreadable arguments then count as cut off.
    """
    text = without_thinking(without_surrogates(message.text))
    calls = tuple(_read_call(call, is_cut=is_cut) for call in message.calls)
    return ParsedMessage(text=text.strip(), calls=calls)


def _read_call(call: FunctionCall, *, is_cut: bool) -> ParsedCall:
    name = without_surrogates(call.name or "").strip()
    raw = _shown(f"{name}({_written(call.arguments)})")
    if not name:
        return ParsedCall(
            status=ParseStatus.MISSING_NAME, raw=raw, error="the call does not name a function"
        )
    try:
        text = write_hermes_json([ToolCall(name=name, arguments=_arguments(call.arguments))])
    except (ValueError, RecordError) as error:
        status = ParseStatus.TRUNCATED if is_cut else ParseStatus.MALFORMED
        return ParsedCall(
            status=status, raw=raw, error=f"the arguments are no valid JSON object: {error}"
        )
    # Read back from what our writer made of it: the same rules as for a call in text.
    [read] = parse_hermes_json(text).calls
    return read.model_copy(update={"raw": raw})


def _written(given: Any) -> str:  # noqa: ANN401 - any JSON
    """Arguments as text, for the record."""
    if isinstance(given, str):
        return without_surrogates(given)
    too_deep = given is not None and _is_deeper(given, _MAX_LEVELS)
    return "{...}" if too_deep else json.dumps({} if given is None else given)


def _shown(raw: str) -> str:
    num_left_out = len(raw) - _MAX_SHOWN_CHARS
    if num_left_out <= 0:
        return raw
    half = _MAX_SHOWN_CHARS // 2
    return f"{raw[:half]} [{num_left_out} characters are left out here] {raw[-half:]}"


def _arguments(given: Any) -> dict[str, Any]:  # noqa: ANN401 - any JSON
    """Arguments as JSON text, or as the value itself; raises ``ValueError``."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}  # some servers send nothing at all for a call without arguments
    try:
        value = json.loads(given) if isinstance(given, str) else given
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(value, dict):
        raise ValueError(f"found {type(value).__name__}")  # noqa: TRY004 - as json.loads raises
    if _is_deeper(value, _MAX_LEVELS):
        raise _too_deep()
    return value


def _too_deep() -> ValueError:
    return ValueError(f"nested more than {_MAX_LEVELS} levels deep")


def _is_deeper(value: Any, levels: int) -> bool:  # noqa: ANN401 - any JSON
    """Whether lists and objects stand in each other more than ``levels`` times."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deeper(part, levels - 1) for part in inner)


def as_wire_text(parsed: ParsedMessage, write_calls: ToolCallWriter) -> str:
    """A structured turn as it is recorded: text and calls in the run's wire format.

    What that format cannot express is written as JSON, a call that could not be read as it came.
    """
    parts = [parsed.text] if parsed.text else []
    for call in parsed.calls:
        if call.call is None:
            parts.append(f"<tool_call>\n{call.raw}\n</tool_call>")
            continue
        try:
            parts.append(write_calls([call.call]))
        except RecordError:
            parts.append(write_hermes_json([call.call]))
    return "\n".join(parts)
