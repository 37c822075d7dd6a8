"""Where commands put what nobody gave a folder for: below ``runs``, under the config's name."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

RUNS: Final = Path("runs")


def free_folder(name: str, *, goes_on: Callable[[Path], bool] | None = None) -> Path:
    """``runs/<name>``, or the first ``runs/<name>-<n>``, that does not exist yet.

    Args:
        name: Of the run.
        goes_on: Tells of a folder that exists whether it may be taken nevertheless.
    """
    names = (name if number == 1 else f"{name}-{number}" for number in count(1))
    folders = (RUNS / each for each in names)
    return next(
        folder for folder in folders if not folder.exists() or (goes_on and goes_on(folder))
    )
