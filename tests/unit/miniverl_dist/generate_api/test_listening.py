"""Connections that are silent, slow, too many, or speak no HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace

import pytest

from miniverl_dist.generate_api.app import ServerLimits, build_app, serving
from miniverl_dist.generate_api.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    ModelInfo,
)

LIMITS = ServerLimits(vocab_size=512, max_context_tokens=200)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Echo:
    """Answers every prompt with nothing."""

    def model_info(self) -> ModelInfo:
        return ModelInfo(model_path="echo")

    def check(self, request: GenerateRequest) -> None:
        del request

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        finish = FinishReason("length", length=0)
        return GenerateReply(MetaInfo("x", finish, len(request.input_ids), 0))


@asynccontextmanager
async def port_of(limits: ServerLimits) -> AsyncIterator[int]:
    async with asyncio.timeout(20), serving(build_app(Echo(), limits=limits)) as url:
        yield int(url.rsplit(":", 1)[1])


async def connect(port: int, data: bytes = b"") -> Streams:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    await writer.drain()
    return reader, writer


async def answer(streams: Streams) -> tuple[int, dict[str, str], bytes]:
    """Status, headers, body."""
    reader, _ = streams
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in head[1:] if line)
    return (
        int(head[0].split()[1]),
        headers,
        await reader.readexactly(int(headers["Content-Length"])),
    )


async def test_a_head_that_trickles_ends_with_the_deadline() -> None:
    async with port_of(replace(LIMITS, idle_deadline_s=0.2)) as port:
        slow = await connect(port, b"POST /generate HTTP/1.1\r\nHost: x\r\nX-a: ")
        silent = await connect(port)

        async def trickle() -> None:
            while True:
                slow[1].write(b"b")
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        with suppress(ConnectionResetError):  # what came too late is thrown away
            assert await slow[0].read() == b""
        assert await silent[0].read() == b""
        trickling.cancel()
        # A connection that has had an answer may be silent as long, and not longer.
        used = await connect(port, HEALTH)
        assert (await answer(used))[0] == 200
        assert await used[0].read() == b""


async def test_one_connection_too_many_is_told_so() -> None:
    async with port_of(replace(LIMITS, max_connections=2)) as port:
        first, second = await connect(port, HEALTH), await connect(port)
        assert (await answer(first))[0] == 200
        third = await connect(port)
        status, headers, body = await answer(third)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert json.loads(body)["error"]["message"] == "too many connections"
        assert await third[0].read() == b""
        second[1].close()
        await second[1].wait_closed()
        while True:  # the server takes notice a moment later
            again = await connect(port, HEALTH)
            if (await answer(again))[0] == 200:
                break


@pytest.mark.parametrize(
    "data",
    [
        b"GET /health HTTP/1.1\r\nHost: x\r\nbad header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-a: " + b"a" * 20_000 + b"\r\n\r\n",
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
    ],
    ids=["header", "long header", "no request", "TLS", "length"],
)
async def test_what_is_no_request_gets_a_400_in_the_form_of_the_others(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with port_of(LIMITS) as port:
        with caplog.at_level(logging.WARNING):
            status, headers, body = await answer(await connect(port, data))
    assert (status, headers["Content-Type"]) == (400, "application/json")
    error = json.loads(body)["error"]
    assert error["code"] == 400
    assert error["message"]
    assert "\n" not in error["message"]
    assert not caplog.records


async def test_bodies_that_arrive_together_have_a_common_limit() -> None:
    limits = replace(LIMITS, max_buffered_bytes=3000, max_body_bytes=2000)
    post = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 1500\r\n\r\n"
    body = json.dumps({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}).encode()
    async with port_of(limits) as port:
        waiting = await connect(port, post + body)
        second = await connect(port, post + body.ljust(1490))
        third = await connect(port, post + b" " * 1499)
        status, headers, text = await answer(third)
        assert (status, headers["Retry-After"]) == (503, "1")
        assert b"too many large bodies" in text
        # What has gone wrong counts no longer, and what waits is not disturbed.
        second[1].write(b" " * 10)
        assert (await answer(second))[0] == 200
        waiting[1].write(b" " * (1500 - len(body)))
        assert (await answer(waiting))[0] == 200
        for _ in range(4):
            status, _, _ = await answer(await connect(port, post + body.ljust(1500)))
            assert status == 200
