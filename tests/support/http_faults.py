"""A loopback HTTP server that answers by a script, faults included, and clocks for its clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Act:
    """Bytes to send, and what to do with the connection afterwards."""

    payload: bytes = b""
    then: Literal["keep", "close", "reset", "hang"] = "keep"


def reply(
    status: int = 200,
    body: object = None,
    *,
    content_type: str = "application/json",
    headers: Mapping[str, str] | None = None,
    missing_bytes: int = 0,
) -> Act:
    """A reply; ``missing_bytes`` are announced and never sent."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [
        f"HTTP/1.1 {status} Scripted",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(raw) + missing_bytes}",
        *(f"{name}: {value}" for name, value in (headers or {}).items()),
    ]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode()
    return Act(head + raw, "close" if missing_bytes else "keep")


HANG = Act(then="hang")
RESET = Act(then="reset")
Answer = Act | Callable[[dict[str, Any]], Act]


@dataclass(frozen=True)
class Received:
    """One request as it arrived."""

    line: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        """The body."""
        parsed: dict[str, Any] = json.loads(self.body)
        return parsed


@dataclass
class ScriptedServer:
    """Answers requests with ``script`` in order; the last answer is repeated for ever."""

    script: list[Answer]
    url: str = ""
    num_connections: int = 0
    received: list[Received] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a request has come in."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while await self._answer(reader, writer):
                pass
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        line, *rest = head.strip().split("\r\n")
        headers = {k.lower(): v for k, v in (each.split(": ", 1) for each in rest)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        self.received.append(Received(line, headers, body))
        self.arrived.set()
        answer = self.script.pop(0) if len(self.script) > 1 else self.script[0]
        act = answer if isinstance(answer, Act) else answer(json.loads(body))
        writer.write(act.payload)
        if act.then == "hang":
            await asyncio.Event().wait()
        if act.then == "reset":
            writer.transport.abort()
        await writer.drain()
        return act.then == "keep"


@asynccontextmanager
async def scripted_server(*script: Answer) -> AsyncIterator[ScriptedServer]:
    """Run a ``ScriptedServer`` for the length of the block."""
    scripted = ScriptedServer(list(script))
    tasks: set[asyncio.Task[None]] = set()

    def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.add(asyncio.ensure_future(scripted._serve(reader, writer)))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    scripted.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield scripted
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class FakeClock:
    """Time that only ``sleep`` moves; it never really waits."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.sleeps: list[float] = []

    def now(self) -> float:
        """Fake monotonic seconds."""
        return self.time

    async def sleep(self, seconds: float) -> None:
        """Move the time."""
        self.sleeps.append(seconds)
        self.time += seconds
        await asyncio.sleep(0)


class GateClock(FakeClock):
    """A clock whose sleepers wait until ``gate`` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.asleep = asyncio.Event()

    async def sleep(self, seconds: float) -> None:
        """Wait for the gate."""
        self.asleep.set()
        await self.gate.wait()
        await super().sleep(seconds)
