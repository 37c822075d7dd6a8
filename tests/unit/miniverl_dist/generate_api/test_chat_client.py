from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
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

BODY = {"model": "m", "messages": [], "seed": 3, "max_tokens": 8}
REPLY = {"choices": [{"message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}]}
Answer = Callable[[], web.StreamResponse]


def failing(status: int, **headers: str) -> Answer:
    return lambda: web.json_response({"error": {"message": "no"}}, status=status, headers=headers)


class Server:
    """Gives one answer after the other, then always a good one."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.bodies: list[bytes] = []
        self.num_written = 0

    async def complete(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.read())
        answer = self.answers.pop(0)() if self.answers else web.json_response(REPLY)
        if not isinstance(answer, web.Response):
            await self._without_end(request, answer)
        return answer

    async def _without_end(self, request: web.Request, answer: web.StreamResponse) -> None:
        await answer.prepare(request)
        with suppress(ConnectionError):
            while True:
                await answer.write(b"[" * 4096)
                self.num_written += 4096

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


def said(finish: str = "stop", **message: Any) -> Answer:
    choice = {"message": {"role": "assistant", **message}, "finish_reason": finish}
    return lambda: web.json_response({"choices": [choice], "usage": {"completion_tokens": 5.5}})


CALL = {"name": "ls", "arguments": "{}"}


class TestWhatIsRead:
    @pytest.mark.parametrize("call_id", [5, None, "c", ["x"]])
    @pytest.mark.parametrize("arguments", ["{}", {}, [1], None, 5, True])
    async def test_fields_that_nobody_needs_may_hold_anything(
        self, call_id: Any, arguments: Any
    ) -> None:
        call = {"id": call_id, "type": 3, "function": {"name": "ls", "arguments": arguments}}
        reply = said(content=None, tool_calls=[call], refusal=None, function_call=None)
        async with Server(reply).client() as (client, _):
            message = (await client.complete(BODY)).choices[0].message
        assert [(c.name, c.arguments) for c in message.calls] == [("ls", arguments)]

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            ({"content": "so"}, "so"),
            ({"content": None}, ""),
            ({"content": [{"type": "text", "text": "s"}, {"type": "text", "text": "o"}]}, "so"),
            (
                {
                    "content": [
                        {"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]},
                        {"type": "text", "text": "so"},
                    ]
                },
                "so",
            ),
            ({"content": [{"type": "reasoning", "text": "hm"}]}, ""),
            ({"content": None, "refusal": "I will not."}, "I will not."),
            ({"content": [{"type": "refusal", "refusal": "No."}]}, "No."),
        ],
    )
    async def test_text_in_every_form(self, message: dict[str, Any], text: str) -> None:
        async with Server(said(**message)).client() as (client, _):
            assert (await client.complete(BODY)).choices[0].message.text == text

    async def test_one_call_in_the_older_form(self) -> None:
        replies = (said(function_call=CALL), said(function_call=CALL, tool_calls=[]))
        both = said(function_call=CALL, tool_calls=[{"function": CALL}])
        async with Server(*replies, both).client() as (client, _):
            for _ in range(3):
                message = (await client.complete(BODY)).choices[0].message
                assert [call.name for call in message.calls] == ["ls"]

    @pytest.mark.parametrize(
        "message",
        [
            {"content": [{"type": "image_url", "image_url": "x"}]},
            {"content": 5},
            {"tool_calls": [{"type": "custom", "custom": {}}]},
            {"function_call": "ls"},
        ],
    )
    async def test_what_has_no_meaning_is_no_reply(self, message: dict[str, Any]) -> None:
        async with Server(said(**message)).client() as (client, _):
            with pytest.raises(MalformedReplyError):
                await client.complete(BODY)

    @pytest.mark.parametrize("kind", ["application/json", "application/problem+json"])
    async def test_a_kind_of_json(self, kind: str) -> None:
        answer = said(content="so")
        async with Server(lambda: _as(answer(), kind)).client() as (client, _):
            assert (await client.complete(BODY)).choices[0].message.text == "so"


def _as(answer: web.StreamResponse, kind: str) -> web.StreamResponse:
    answer.content_type = kind
    return answer


class TestLongReplies:
    @pytest.mark.parametrize("status", [200, 400])
    async def test_the_rest_of_a_reply_that_is_too_long_is_not_read(self, status: int) -> None:
        server = Server(
            lambda: web.StreamResponse(status=status, headers={"Content-Type": "application/json"})
        )
        error = MalformedReplyError if status == 200 else RequestRejectedError
        async with server.client(reply_bytes=50_000, reply_bytes_per_token=100) as (client, _):
            with pytest.raises(error, match=r"more than 50800 bytes|HTTP 400") as found:
                await client.complete(BODY)
        assert len(str(found.value)) < 1000
        assert server.num_written < 20_000_000
        assert len(server.bodies) == 1

    async def test_a_longer_turn_may_have_a_longer_reply(self) -> None:
        long = said(content="x" * 60_000)
        async with Server(long, long).client(reply_bytes=50_000, reply_bytes_per_token=100) as (
            client,
            _,
        ):
            with pytest.raises(MalformedReplyError, match="more than 50800 bytes"):
                await client.complete(BODY)
            reply = await client.complete({**BODY, "max_tokens": 200})
        assert len(reply.choices[0].message.text) == 60_000


async def test_a_servers_words_cannot_steer_a_terminal() -> None:
    words = "\u202eno\x1b[31m\x07\nnever\x9b"
    server = Server(
        lambda: web.json_response({"error": {"message": words}}, status=400),
        lambda: web.Response(text=words, content_type="text/html"),
    )
    async with server.client() as (client, _):
        for _ in range(2):
            with pytest.raises((RequestRejectedError, MalformedReplyError)) as found:
                await client.complete(BODY)
            assert "?no?[31m? never?" in str(found.value)
            assert str(found.value).isprintable()
