"""Lines of a record file from its end: a long run's files are never read whole for their last."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_BLOCK_BYTES: Final = 1 << 18


def num_lines(path: Path) -> int:
    """Finished lines of a file, 0 where there is none; read in blocks, nothing is parsed."""
    try:
        with path.open("rb") as file:
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except OSError:
        return 0


def lines_from_end(path: Path, *, max_bytes: int) -> Iterator[bytes]:
    r"""Lines of a file, the last one first, within its last ``max_bytes``.

    A last line that is not finished comes first, without its ``\n``; all others end with it. The
    file may grow or be cut while it is read: the lines are those of one moment or another, and a
    line may then be damaged, which its reader has to expect anyway.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    with path.open("rb") as file:
        position = file.seek(0, os.SEEK_END)
        floor = max(0, position - max_bytes)
        rest, is_last = b"", True
        while position > floor:
            start = max(floor, position - _BLOCK_BYTES)
            file.seek(start)
            first, *lines = (file.read(position - start) + rest).split(b"\n")
            position, rest = start, first
            for line in reversed(lines):
                if not is_last:
                    yield line + b"\n"
                elif line:
                    yield line
                is_last = False
        if position == 0 and (rest or not is_last):
            yield rest if is_last else rest + b"\n"
