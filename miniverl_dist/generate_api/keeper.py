"""Runs a command, and ends it with everything it has started once our stdin closes.

``generate_api.process`` runs this file as the leader of a process group of its own. A parent that
is killed outright cannot end its servers; the closed pipe does, and no GPU stays taken. A child
that the parent has forked holds the pipe open, so the parent itself is watched as well. A watcher
does both, no direct child of the parent: Ray, for one, kills the direct children of an actor that
it ends, and would leave the command without anybody who watches.

It is run by its path and imports the standard library only: the command's environment is not ours.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from types import FrameType
from typing import NoReturn

POLL_S = 1.0
"""Between two looks at the parent where it cannot be waited for."""
EXIT_NOT_STARTED = 127
"""The shells' code for a command that cannot be run."""


def main() -> int:
    """Run ``sys.argv[2:]`` until the process ``sys.argv[1]``, our parent, ends.

    Returns:
        The command's exit status, 128 + n where signal n ended it.
    """
    parent = int(sys.argv[1])
    handle = _handle(parent)
    if os.getppid() != parent:
        return EXIT_NOT_STARTED  # it has ended already, and its id may be another's
    watcher = os.fork()
    if watcher == 0:
        _end_with_parent(parent, handle)
    # A handler is not inherited, unlike SIG_IGN: the command ends on SIGTERM, and we wait for it.
    signal.signal(signal.SIGTERM, _leave_it_to_the_command)
    try:
        status = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL).wait()
    except OSError as exc:
        sys.stderr.write(f"{exc}\n")
        return EXIT_NOT_STARTED
    finally:
        os.kill(watcher, signal.SIGKILL)
    return status if status >= 0 else 128 - status


def _leave_it_to_the_command(number: int, frame: FrameType | None) -> None:
    del number, frame


def _handle(parent: int) -> int | None:
    """What becomes readable when the process ends; None where the system has no such thing."""
    try:
        return os.pidfd_open(parent)
    except (AttributeError, OSError):
        return None


def _end_with_parent(parent: int, handle: int | None) -> NoReturn:
    """Wait for the pipe to close or the parent to end; then end the group, this process with it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    pipe = sys.stdin.fileno()
    watched = [pipe] if handle is None else [pipe, handle]
    while _lives(parent, handle):
        ready, _, _ = select.select(watched, [], [], None if handle is not None else POLL_S)
        if handle in ready or (pipe in ready and not os.read(pipe, 1)):
            break
    os.killpg(0, signal.SIGKILL)
    raise SystemExit  # not reached


def _lives(parent: int, handle: int | None) -> bool:
    if handle is not None:
        return True  # it says so itself
    try:
        os.kill(parent, 0)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
