"""Names that servers give to their models: what a terminal, a table and a page can show."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from typing import Final

from miniverl_dist.errors import ConfigError

_MAX_CHARS: Final = 200
_MAX_LISTED: Final = 20
_SIGNS: Final = frozenset(" ._-/:@+=,~#%()[]\\")
_LEFT_TO_RIGHT: Final = frozenset({"L", "EN"})


def shown_name(name: str) -> str:
    """The name with a question mark for each character that a table cannot show, and cut."""
    shown = "".join(c if _can_be_shown(c) else "?" for c in name[:_MAX_CHARS])
    return shown + "..." * (len(name) > _MAX_CHARS)


def shown_names(names: Sequence[str]) -> str:
    """The first names of a list."""
    listed = [*map(shown_name, names[:_MAX_LISTED])]
    if len(names) > _MAX_LISTED:
        listed.append(f"and {len(names) - _MAX_LISTED} more")
    return ", ".join(listed) or "none"


def checked_name(name: str, server: str) -> str:
    """The name as it is.

    Args:
        name: As the server gives it.
        server: Who it is, for the error.

    Raises:
        ConfigError: it is empty, long, or holds what would break a table or a terminal's line.
    """
    shown = shown_name(name)
    if shown != name or not name.strip():
        raise ConfigError(
            f"{server} calls its model {shown!r} (? stands for what cannot be shown), expected 1 "
            f"to {_MAX_CHARS} letters, digits, blanks and {''.join(sorted(_SIGNS - {' '}))}: start "
            "it with another name for the model (--served-model-name, --alias)"
        )
    return name


def _can_be_shown(char: str) -> bool:
    if char.isascii():
        return char.isalnum() or char in _SIGNS
    return char.isalnum() and unicodedata.bidirectional(char) in _LEFT_TO_RIGHT
