from __future__ import annotations

import pytest
from jsonschema import Draft202012Validator

from miniverl_dist.errors import RecordError
from rollout_server.bfcl.schemas import to_json_schema, to_tool_schema

DOCUMENT = {
    "name": "store",
    "description": "Stores things.",
    "parameters": {
        "type": "dict",
        "properties": {
            "default": {"type": "string", "description": "a property of this name", "default": "x"},
            "weight": {"type": "float", "default": "None"},
            "names": {"type": "list", "items": {"type": "tuple", "items": {"type": "integer"}}},
            "options": {
                "type": "dict",
                "properties": {"default": {"type": "boolean", "default": False}},
            },
        },
        "required": ["default"],
    },
    "response": {"type": "dict"},
}


def test_types_are_mapped_and_default_keywords_dropped_where_they_are_not_properties() -> None:
    tool = to_tool_schema(DOCUMENT)
    assert (tool.name, tool.description) == ("store", "Stores things.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "default": {"type": "string", "description": "a property of this name"},
            "weight": {"type": "number"},
            "names": {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
            "options": {"type": "object", "properties": {"default": {"type": "boolean"}}},
        },
        "required": ["default"],
    }
    Draft202012Validator.check_schema(tool.parameters)


def test_the_document_is_not_changed() -> None:
    to_tool_schema(DOCUMENT)
    assert DOCUMENT["parameters"]["type"] == "dict"  # type: ignore[index]


def test_unknown_type() -> None:
    with pytest.raises(RecordError, match="unknown type 'matrix'"):
        to_json_schema({"type": "dict", "properties": {"a": {"type": "matrix"}}})
