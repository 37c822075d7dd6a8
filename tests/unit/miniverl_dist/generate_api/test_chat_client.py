from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    MalformedReplyError,
    RequestRejectedError,
    ServerUnavailableError,
)
from miniverl_dist.generate_api.chat import ChatClient, ChatLimits
from tests.fakes import FakeClock

BODY = {"model": "m", "messages": [], "seed": 3}
REPLY = {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
Answer = Callable[[], web.Response]


def failing(status: int, **headers: str) -> Answer:
    return lambda: web.json_response({"error": {"message": "no"}}, status=status, headers=headers)


class Server:
    """Gives one answer after the other, then always a good one."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []

    async def complete(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.read())
        return self.answers.pop(0)() if self.answers else web.json_response(REPLY)

    @asynccontextmanager
    async def client(self, **limits: Any) -> AsyncIterator[tuple[ChatClient, FakeClock]]:
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self.complete)
        clock = FakeClock()
        async with TestServer(app) as server:
            client = ChatClient(
                str(server.make_url("/v1")), limits=ChatLimits(**limits), clock=clock
            )
            try:
                yield client, clock
            finally:
                await client.close()


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504])
async def test_what_a_server_can_mend_is_asked_again_word_for_word(status: int) -> None:
    server = Server(failing(status), failing(status))
    async with server.client() as (client, _):
        reply = await client.complete(BODY)
    assert reply.choices[0].message.content == "hi"
    assert len(server.bodies) == 3
    assert len(set(server.bodies)) == 1


async def test_what_it_says_of_the_request_is_final() -> None:
    server = Server(failing(422))
    async with server.client() as (client, _):
        with pytest.raises(RequestRejectedError, match="HTTP 422"):
            await client.complete(BODY)
    assert len(server.bodies) == 1


async def test_retries_end() -> None:
    server = Server(*[failing(503)] * 9)
    async with server.client(max_retries=2) as (client, _):
        with pytest.raises(ServerUnavailableError, match=r"no answer after 3 tries; last: .*503"):
            await client.complete(BODY)
    assert len(server.bodies) == 3


async def test_it_waits_as_long_as_the_server_asks_for_but_not_past_its_deadline() -> None:
    server = Server(failing(429, **{"Retry-After": "7"}))
    async with server.client(deadline_s=60) as (client, clock):
        await client.complete(BODY)
        assert 7 <= clock.time < 8
    server = Server(failing(429, **{"Retry-After": "70"}))
    async with server.client(deadline_s=60) as (client, clock):
        with pytest.raises(DeadlineError, match="past the deadline of 60 s, after 1 tries"):
            await client.complete(BODY)
        assert clock.time == 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda: web.Response(text="<html>", content_type="text/html"), "text/html"),
        (lambda: web.json_response({"choices": []}), "without choices"),
        (lambda: web.json_response({"object": "error"}), "choices"),
    ],
)
async def test_what_is_no_chat_completion(answer: Answer, message: str) -> None:
    server = Server(answer)
    async with server.client() as (client, _):
        with pytest.raises(MalformedReplyError, match=message):
            await client.complete(BODY)
    assert len(server.bodies) == 1


@pytest.mark.parametrize("url", ["127.0.0.1:9", "ftp://host/v1", "http://u:secret@host/v1"])
def test_a_url_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="server URL") as found:
        ChatClient(url)
    assert "secret" not in str(found.value)
