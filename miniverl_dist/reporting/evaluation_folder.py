"""A folder that an evaluation made for itself: it has a manifest and rows, and trains nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

EVALUATION_STATUS: Final = "evaluation_status"
"""Key of the manifest: ``running``, ``finished``, ``stopped`` or ``failed``."""


def is_evaluation(manifest: Mapping[str, Any]) -> bool:
    """Whether a manifest is that of such a folder."""
    return manifest.get("status") == "evaluation"


def evaluation_status(manifest: Mapping[str, Any], *, has_rows: bool) -> str:
    """How far it came; ``running`` may be the last word of a process that was killed.

    Folders of earlier versions do not say it: with a row they count as finished.
    """
    told = manifest.get(EVALUATION_STATUS)
    return str(told) if told is not None else "finished" if has_rows else "stopped"
