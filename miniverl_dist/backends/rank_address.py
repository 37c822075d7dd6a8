"""Where the ranks of one student meet."""

from __future__ import annotations

import socket
from dataclasses import dataclass


@dataclass(frozen=True)
class RankAddress:
    """One rank's place in the student's process group; alone, it meets nobody."""

    rank: int = 0
    """0 to ``world_size`` - 1."""
    world_size: int = 1
    master_addr: str = "127.0.0.1"
    """Of rank 0's machine, as the others can reach it."""
    master_port: int = 0
    """Where rank 0 listens."""
    listener: socket.socket | None = None
    """Rank 0's open socket of that port, taken over by whoever connects; None binds it anew."""


def listen(host: str) -> socket.socket:
    """An open socket on a free port of ``host``.

    Kept open until the ranks meet: a number that was merely free a moment ago may belong to an
    outgoing connection of another process by then.
    """
    listener = socket.socket()
    listener.bind((host, 0))
    listener.listen()
    return listener
