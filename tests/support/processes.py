"""Whether other processes live."""

from __future__ import annotations

import time
from pathlib import Path


def lives(pid: int) -> bool:
    """Whether a process runs; a zombie that nobody has collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def are_gone(*pids: int, deadline_s: float = 60.0) -> bool:
    """Whether all of them end in time."""
    end = time.monotonic() + deadline_s
    while any(lives(pid) for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
