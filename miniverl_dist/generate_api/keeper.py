"""Runs a command, and ends it with everything it has started once our stdin closes.

``generate_api.process`` runs this file as the leader of a process group of its own. A parent that
is killed outright cannot end its servers; the closed pipe does, and no GPU stays taken. A watcher
reads the pipe, no direct child of the parent: Ray, for one, kills the direct children of an actor
that it ends, and would leave the command without anybody who watches.

It is run by its path and imports the standard library only: the command's environment is not ours.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

EXIT_NOT_STARTED = 127
"""The shells' code for a command that cannot be run."""


def main() -> int:
    """Run ``sys.argv[1:]``; returns its exit status, 128 + n where signal n ended it."""
    watcher = os.fork()
    if watcher == 0:
        _end_with_parent()
    # A handler is not inherited, unlike SIG_IGN: the command ends on SIGTERM, and we wait for it.
    signal.signal(signal.SIGTERM, _leave_it_to_the_command)
    try:
        status = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL).wait()
    except OSError as exc:
        sys.stderr.write(f"{exc}\n")
        return EXIT_NOT_STARTED
    finally:
        os.kill(watcher, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _leave_it_to_the_command(number: int, frame: FrameType | None) -> None:
    del number, frame


def _end_with_parent() -> NoReturn:
    """Wait for the pipe to close, then end the group, which this process belongs to."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.killpg(0, signal.SIGKILL)
    raise SystemExit  # not reached


if __name__ == "__main__":
    sys.exit(main())
