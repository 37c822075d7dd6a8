"""Function documents of bfcl-eval as JSON Schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from miniverl_dist.errors import RecordError
from miniverl_dist.schemas.messages import ToolSchema

_TYPES = {
    "dict": "object",
    "float": "number",
    "list": "array",
    "tuple": "array",
    "string": "string",
    "boolean": "boolean",
    "integer": "integer",
    "array": "array",
    "object": "object",
    "number": "number",
}


def to_json_schema(node: Mapping[str, Any]) -> dict[str, Any]:
    """Translate one schema node of a function document.

    A ``default`` *keyword* is dropped (the documents write null as the string ``'None'``); a
    property that is called ``default`` stays.

    Raises:
        RecordError: a type that is none of the documents' types.
    """
    schema: dict[str, Any] = {}
    for keyword, value in node.items():
        if keyword == "type":
            if value not in _TYPES:
                raise RecordError(
                    f"function document: unknown type {value!r}, expected one of {sorted(_TYPES)}"
                )
            schema["type"] = _TYPES[value]
        elif keyword == "properties":
            schema["properties"] = {name: to_json_schema(child) for name, child in value.items()}
        elif keyword == "items":
            schema["items"] = to_json_schema(value)
        elif keyword != "default":
            schema[keyword] = value
    return schema


def to_tool_schema(document: Mapping[str, Any]) -> ToolSchema:
    """Translate one function document."""
    return ToolSchema(
        name=document["name"],
        description=document["description"],
        parameters=to_json_schema(document["parameters"]),
    )
