"""Messages, tool calls and tool schemas, as they travel between engine, environment and teacher."""

from __future__ import annotations

from enum import StrEnum
from typing import Any, Literal

from miniverl_dist.config.base import ConfigModel

Role = Literal["system", "user", "assistant", "tool"]


class FrozenModel(ConfigModel):
    """Base of every contract: as strict and frozen as a config section."""


class ParseStatus(StrEnum):
    """How reading one tool call out of model text ended."""

    OK = "ok"
    MALFORMED = "malformed"
    """The wire format is broken (bad JSON, bad XML, arguments that are not an object)."""
    TRUNCATED = "truncated"
    """The text ends inside the call (a token cap, a sampled turn end)."""
    MISSING_NAME = "missing_name"


class CallError(StrEnum):
    """Why a call that could be read failed."""

    UNKNOWN_TOOL = "unknown_tool"
    ARGUMENTS = "arguments"
    """Missing or foreign arguments, or values that are refused before the tool runs."""
    EXECUTION = "execution"
    """The tool ran and reported a failure."""


class ToolCall(FrozenModel):
    """One call: the function's name and its keyword arguments (JSON values)."""

    name: str
    arguments: dict[str, Any]


class ParsedCall(FrozenModel):
    """One attempted call found in model text; ``call`` is None unless ``status`` is OK."""

    status: ParseStatus
    call: ToolCall | None = None
    raw: str
    """The text the call was read from."""
    error: str | None = None
    """What is wrong with it, in words a model can act on."""


class ParsedMessage(FrozenModel):
    """An assistant message taken apart: free text and the calls in their order."""

    text: str
    calls: tuple[ParsedCall, ...] = ()


class ToolSchema(FrozenModel):
    """A tool as the model sees it; ``parameters`` is a JSON Schema object."""

    name: str
    description: str
    parameters: dict[str, Any]


class Message(FrozenModel):
    """One message of an episode.

    For an assistant message ``content`` holds the wire text exactly as the model (or the oracle)
    wrote it, calls included; ``tool_calls`` holds what was parsed from it.
    """

    role: Role
    content: str
    tool_calls: tuple[ToolCall, ...] = ()
