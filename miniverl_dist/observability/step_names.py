"""How a step is called in the names of files and in tags: ``step-000010``."""

from __future__ import annotations

import re
from typing import Final

_NAME: Final = re.compile(r"step-([0-9]{6,})")


def step_name(step: int) -> str:
    """The name of a step; names of fewer than a million steps sort as their numbers do."""
    return f"step-{step:06d}"


def named_step(name: str) -> int | None:
    """The step that ``step_name`` gives this name to; None where there is none."""
    found = _NAME.fullmatch(name)
    if found is None or step_name(step := int(found[1])) != name:
        return None
    return step
