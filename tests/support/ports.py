"""Ports for servers that a test starts, and that must be told theirs."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

NOBODYS_PORTS = range(20_000, 32_000)
"""Above those of Ray's workers, below those of sockets that ask for any port: servers bind theirs
seconds after they were told, and meanwhile the other tests of the machine open sockets."""


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different, and that no system hands out by itself."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().choice(NOBODYS_PORTS)
        with socket.socket() as one, suppress(OSError):
            one.bind(("127.0.0.1", port))
            found.add(port)
    return list(found)
