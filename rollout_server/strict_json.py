"""JSON of tool calls: whatever is read can be written again."""

from __future__ import annotations

import json
import math
from typing import Any

from miniverl_dist.errors import RecordError
from miniverl_dist.tokens.byte_table import without_surrogates

_MAX_DEPTH = 64
"""Deeper JSON is refused: writing it again would exceed what serialisers accept."""


def dumps(value: Any) -> str:  # noqa: ANN401 - any JSON
    """A value as text. Raises ``RecordError`` where it is not JSON."""
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise RecordError(f"an argument of a tool call is not JSON: {error}") from error


def loads(text: str) -> Any:  # noqa: ANN401 - any JSON
    """A text's value. Raises ``ValueError`` also where it could not be written again."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    _check_json(value, _MAX_DEPTH)
    return value


def _check_json(value: Any, depth: int) -> None:  # noqa: ANN401 - any JSON
    if depth == 0:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("a number is not finite")
    if isinstance(value, str) and not value.isascii() and without_surrogates(value) != value:
        raise ValueError("a string holds half of a surrogate pair")
    if isinstance(value, dict):
        for key, inner in value.items():
            _check_json(key, depth)
            _check_json(inner, depth - 1)
    elif isinstance(value, list):
        for inner in value:
            _check_json(inner, depth - 1)
