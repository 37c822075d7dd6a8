"""A teacher server on a loopback port that answers right, or fails in every way a real one does.

The truth is a function of the ids alone, so a test knows it without asking; which fault a request
meets is drawn from a seed.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from aiohttp import web

VOCAB_SIZE = 50_000


def truth(token_ids: Sequence[int], position: int) -> float:
    """Nats; what the teacher says about the token there, given the one before it."""
    mixed = (token_ids[position - 1] * 7919 + token_ids[position] * 104_729 + position) % 9973
    return -(mixed + 1) / 1000


class Fault(StrEnum):
    """How a request is answered."""

    NONE = "none"
    BUSY_503 = "503"
    SLOW_DOWN_429 = "429 with Retry-After"
    BAD_GATEWAY = "502"
    SERVER_ERROR = "500"
    REJECTED = "400"
    HANG = "hang"
    RESET = "reset"
    RESET_IN_BODY = "reset in the body"
    TRUNCATED = "truncated JSON"
    WRONG_IDS = "wrong ids"
    NAN = "NaN"
    MINUS_INFINITY = "-inf as null"
    POSITIVE = "above 0"
    SHORT = "one entry short"
    LONG = "one entry more"
    SHIFTED = "shifted by one"
    ABORT = "aborted"
    REDIRECT = "redirect"
    HTML = "HTML"
    DRIP = "a byte at a time, for ever"
    SLOW_BUT_RIGHT = "right, in pieces"


Body = dict[str, Any]


def entries_of(body: Body) -> list[list[float | int | None]]:
    """The right answer's list: from ``logprob_start_len`` on, null first."""
    ids, start = body["input_ids"], body["logprob_start_len"]
    rest = [[truth(ids, i), ids[i], None] for i in range(start + 1, len(ids))]
    return [[None, ids[start], None], *rest]


def reply_with(body: Body, entries: object, finish: Mapping[str, object] | None = None) -> bytes:
    """A reply in SGLang's form; NaN is written as Python writes it."""
    meta = {
        "id": "x",
        "finish_reason": finish or {"type": "length", "length": 0},
        "prompt_tokens": len(body["input_ids"]),
        "completion_tokens": 0,
        "input_token_logprobs": entries,
    }
    return json.dumps({"text": "", "output_ids": [], "meta_info": meta}).encode()


def _spoilt(fault: Fault, body: Body) -> bytes:
    entries = entries_of(body)
    last = entries[-1]
    match fault:
        case Fault.WRONG_IDS:
            last[1] = (body["input_ids"][-1] + 1) % VOCAB_SIZE
        case Fault.NAN:
            last[0] = math.nan
        case Fault.MINUS_INFINITY:
            last[0] = None
        case Fault.POSITIVE:
            last[0] = 0.5
        case Fault.SHORT:
            entries.pop()
        case Fault.LONG:
            entries.append(list(last))
        case Fault.SHIFTED:
            values = [entry[0] for entry in entries]
            for entry, value in zip(entries, [*values[1:], -0.1], strict=True):
                entry[0] = value
        case Fault.ABORT:
            return reply_with(body, entries, {"type": "abort", "message": "weights are loading"})
        case Fault.TRUNCATED:
            return reply_with(body, entries)[:-20]
    return reply_with(body, entries)


_PLAIN: Mapping[Fault, tuple[int, str, dict[str, str]]] = {
    Fault.BUSY_503: (503, '{"error": {"message": "the request queue is full"}}', {}),
    Fault.SLOW_DOWN_429: (
        429,
        '{"error": {"message": "slow down"}}',
        {"Retry-After": "0.02"},
    ),
    Fault.BAD_GATEWAY: (502, "<html>bad gateway</html>", {}),
    Fault.SERVER_ERROR: (500, '{"error": {"message": "CUDA error"}}', {}),
    Fault.REJECTED: (400, '{"error": {"message": "the input is longer than the context"}}', {}),
    Fault.REDIRECT: (307, "", {"Location": "/trap"}),
}


@dataclass
class FaultyServer:
    """Counts what it did; ``weights`` may be changed while it runs."""

    weights: dict[Fault, float]
    rng: random.Random
    url: str = ""
    served: Counter[Fault] = field(default_factory=Counter)
    num_trapped: int = 0
    """Redirects that somebody followed."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer, or fail."""
        body = await request.json()
        (fault,) = self.rng.choices(list(self.weights), list(self.weights.values()))
        self.served[fault] += 1
        if fault in _PLAIN:
            status, text, headers = _PLAIN[fault]
            return web.Response(status=status, text=text, headers=headers)
        special = self._special.get(fault)
        if special is not None:
            return await special(self, request, body)
        return web.Response(body=_spoilt(fault, body), content_type="application/json")

    async def trap(self, request: web.Request) -> web.Response:
        """Where redirects lead: scores that are wrong, in the right form."""
        self.num_trapped += 1
        body = await request.json()
        entries = [[value and value - 1.0, token, text] for value, token, text in entries_of(body)]  # type: ignore[operator]
        return web.Response(body=reply_with(body, entries), content_type="application/json")

    async def _hang(self, request: web.Request, body: Body) -> web.StreamResponse:
        del request, body
        # Until the client gives up or the test ends.
        await self.stopping.wait()
        return web.Response(status=503)

    async def _reset(self, request: web.Request, body: Body) -> web.StreamResponse:
        del body
        assert request.transport is not None
        request.transport.abort()
        return web.Response()

    async def _reset_in_body(self, request: web.Request, body: Body) -> web.StreamResponse:
        raw = reply_with(body, entries_of(body))
        response = await self._started(request, len(raw))
        await response.write(raw[: len(raw) // 2])
        if request.transport is not None:
            request.transport.abort()
        return response

    async def _drip(self, request: web.Request, body: Body) -> web.StreamResponse:
        raw = reply_with(body, entries_of(body))
        response = await self._started(request, len(raw))
        for byte in raw:
            if self.stopping.is_set() or request.transport is None:
                break
            await response.write(bytes([byte]))
            await asyncio.sleep(0.02)
        return response

    async def _in_pieces(self, request: web.Request, body: Body) -> web.StreamResponse:
        raw = reply_with(body, entries_of(body))
        response = await self._started(request, len(raw))
        for start in range(0, len(raw), 1 + len(raw) // 3):
            await response.write(raw[start : start + 1 + len(raw) // 3])
            await asyncio.sleep(0.002)
        return response

    async def _html(self, request: web.Request, body: Body) -> web.StreamResponse:
        del request, body
        return web.Response(text="<html>maintenance</html>", content_type="text/html")

    async def _started(self, request: web.Request, length: int) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        response.content_length = length
        await response.prepare(request)
        return response

    _special: Mapping[
        Fault, Callable[[FaultyServer, web.Request, Body], Awaitable[web.StreamResponse]]
    ] = field(
        default_factory=lambda: {
            Fault.HANG: FaultyServer._hang,
            Fault.RESET: FaultyServer._reset,
            Fault.RESET_IN_BODY: FaultyServer._reset_in_body,
            Fault.DRIP: FaultyServer._drip,
            Fault.SLOW_BUT_RIGHT: FaultyServer._in_pieces,
            Fault.HTML: FaultyServer._html,
        }
    )


@asynccontextmanager
async def faulty_server(
    weights: Mapping[Fault, float], *, seed: int = 0
) -> AsyncIterator[FaultyServer]:
    """Serve for the length of the block; ``weights`` are the odds of each fault."""
    server = FaultyServer(dict(weights), random.Random(seed))

    @web.middleware
    async def quiet(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        with suppress(ConnectionError):
            return await handler(request)
        return web.Response()

    app = web.Application(middlewares=[quiet])
    app.router.add_post("/generate", server.generate)
    app.router.add_post("/trap", server.trap)
    runner = web.AppRunner(app, shutdown_timeout=0.5, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        server.url = f"http://{host}:{port}"
        yield server
    finally:
        server.stopping.set()
        await runner.cleanup()
