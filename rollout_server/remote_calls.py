"""What travels between an episode and an OpenAI-compatible server: messages, tools, calls.

Two forms. ``tools``: the request declares the tools, the reply's ``tool_calls`` are the calls.
``text``: the system text describes our wire format, the model writes it, our parser reads it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from miniverl_dist.errors import RecordError
from miniverl_dist.generate_api.chat import ChatMessage, ChatToolCall
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
    text = without_thinking(without_surrogates(message.content or ""))
    calls = tuple(_read_call(call, is_cut=is_cut) for call in message.tool_calls or ())
    return ParsedMessage(text=text.strip(), calls=calls)


def _read_call(call: ChatToolCall, *, is_cut: bool) -> ParsedCall:
    name = without_surrogates(call.function.name or "").strip()
    given = call.function.arguments
    written = given if isinstance(given, str) else json.dumps(given if given is not None else {})
    raw = f"{name}({without_surrogates(written)})"
    if not name:
        return ParsedCall(
            status=ParseStatus.MISSING_NAME, raw=raw, error="the call does not name a function"
        )
    try:
        text = write_hermes_json([ToolCall(name=name, arguments=_arguments(written))])
    except (ValueError, RecursionError, RecordError) as error:
        status = ParseStatus.TRUNCATED if is_cut else ParseStatus.MALFORMED
        return ParsedCall(
            status=status, raw=raw, error=f"the arguments are no valid JSON object: {error}"
        )
    # Read back from what our writer made of it: the same rules as for a call in text.
    [read] = parse_hermes_json(text).calls
    return read.model_copy(update={"raw": raw})


def _arguments(written: str) -> dict[str, Any]:
    """Arguments as JSON text; raises ``ValueError``."""
    # Some servers send nothing at all for a call without arguments.
    arguments = json.loads(written) if written.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError(f"found {type(arguments).__name__}")  # noqa: TRY004 - as json.loads raises
    return arguments


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
