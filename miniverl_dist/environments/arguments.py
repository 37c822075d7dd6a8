"""Limits on the size of a call's arguments, whatever tool they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MAX_ARGUMENT_CHARS = 20_000
"""All text of one call's arguments together; a context of 16k tokens holds little more."""
MAX_ARGUMENT_ITEMS = 5_000
"""Values in one call's arguments, nested ones included."""
MAX_ARGUMENT_DEPTH = 20
MAX_INTEGER_BITS = 1_024
"""As far as a float reaches."""


def size_problem(arguments: Mapping[str, Any]) -> str | None:
    """What is too large about ``arguments``, or None; walks without recursion."""
    chars = items = 0
    pending: list[tuple[Any, int]] = [(dict(arguments), 0)]
    while pending:
        value, depth = pending.pop()
        items += 1
        if isinstance(value, str):
            chars += len(value)
        elif isinstance(value, int) and value.bit_length() > MAX_INTEGER_BITS:
            return f"an integer has more than {MAX_INTEGER_BITS} bits"
        elif isinstance(value, dict):
            chars += sum(len(str(key)) for key in value)
            pending.extend((child, depth + 1) for child in value.values())
        elif isinstance(value, list | tuple):
            pending.extend((child, depth + 1) for child in value)
        if chars > MAX_ARGUMENT_CHARS:
            return f"the arguments hold more than {MAX_ARGUMENT_CHARS} characters"
        if items + len(pending) > MAX_ARGUMENT_ITEMS:
            return f"the arguments hold more than {MAX_ARGUMENT_ITEMS} values"
        if depth > MAX_ARGUMENT_DEPTH:
            return f"the arguments are nested more than {MAX_ARGUMENT_DEPTH} deep"
    return None
