"""The app as a service: draining, readiness, tokens, what is admitted and what is observed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import aiohttp
import pytest

from miniverl_dist.errors import ConfigError, ServerBusyError
from miniverl_dist.generate_api.app import ServerLimits, build_app, drain, serving
from miniverl_dist.generate_api.bearer import BearerToken, read_token_file
from miniverl_dist.generate_api.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    ModelInfo,
)

LIMITS = ServerLimits(vocab_size=512, max_context_tokens=200)
BODY = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 0}}


class Waiter:
    """Answers nothing until its gate opens; notes who gave up."""

    def __init__(self) -> None:
        self.gate, self.at_work, self.cancelled = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def model_info(self) -> ModelInfo:
        return ModelInfo(model_path="waiter")

    def check(self, request: GenerateRequest) -> None:
        del request

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.at_work.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return GenerateReply(MetaInfo("x", FinishReason("length", length=0), 2, 0))


async def status(session: aiohttp.ClientSession, url: str) -> tuple[int, str | None]:
    async with session.get(url) as response:
        return response.status, response.headers.get("Retry-After")


async def test_a_draining_server_finishes_what_is_at_work_and_takes_nothing_new() -> None:
    waiter = Waiter()
    app = build_app(waiter, limits=LIMITS)
    async with serving(app) as url, aiohttp.ClientSession() as session:
        assert (await status(session, url + "/ready"))[0] == 200
        first = asyncio.create_task(session.post(url + "/generate", json=BODY))
        async with asyncio.timeout(60):
            await waiter.at_work.wait()
        assert not await drain(app, deadline_s=0.01)
        draining = asyncio.create_task(drain(app, deadline_s=5))
        await asyncio.sleep(0)
        assert await status(session, url + "/ready") == (503, "1")
        assert (await status(session, url + "/health"))[0] == 200
        async with session.post(url + "/generate", json=BODY) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert "is stopping" in (await response.json())["error"]["message"]
        assert not draining.done()
        waiter.gate.set()
        assert await draining
        assert (await first).status == 200


async def test_an_idle_server_has_drained_at_once() -> None:
    app = build_app(Waiter(), limits=LIMITS)
    assert await drain(app, deadline_s=0.01)


async def test_what_outlasts_the_drain_gets_a_503_and_one_deadline_holds_for_all() -> None:
    waiter = Waiter()
    async with aiohttp.ClientSession() as session:
        async with serving(build_app(waiter, limits=LIMITS), shutdown_deadline_s=2.0) as url:
            batch = BODY | {"input_ids": [[1], [2], [3]]}
            asked = [
                asyncio.create_task(session.post(url + "/generate", json=body))
                for body in (BODY, batch)
            ]
            async with asyncio.timeout(60):
                await waiter.at_work.wait()
            await asyncio.sleep(0.02)
            started = asyncio.get_running_loop().time()
        took = asyncio.get_running_loop().time() - started
        for response in await asyncio.gather(*asked):
            assert (response.status, response.headers["Retry-After"]) == (503, "1")
            assert "has stopped" in (await response.json())["error"]["message"]
    assert waiter.cancelled.is_set()
    assert 2 <= took < 4, "one deadline for both requests"


async def test_a_body_that_arrives_while_the_server_drains_gets_a_503() -> None:
    app = build_app(Waiter(), limits=LIMITS)
    async with aiohttp.ClientSession() as session, serving(app) as url, asyncio.timeout(60):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 17\r\n\r\n{")
        await writer.drain()
        for _ in range(3):  # by then its head has been read
            assert (await status(session, url + "/health"))[0] == 200
        assert not await drain(app, deadline_s=0.01)
        writer.write(b'"input_ids":[1]}')
        assert b" 503 " in await reader.readline()
        assert await drain(app, deadline_s=5)
        writer.close()


async def test_a_client_that_hangs_up_cancels_its_request() -> None:
    waiter = Waiter()
    seen: list[tuple[str, int]] = []
    app = build_app(
        waiter, limits=LIMITS, observe=lambda path, status, seconds: seen.append((path, status))
    )
    async with serving(app) as url, aiohttp.ClientSession() as session:
        asked = asyncio.create_task(session.post(url + "/generate", json=BODY))
        async with asyncio.timeout(60):
            await waiter.at_work.wait()
            asked.cancel()
            await waiter.cancelled.wait()
        assert await drain(app, deadline_s=5)
    assert seen == [("/generate", 499)]


async def test_what_is_not_admitted_is_a_429_and_observed() -> None:
    held: list[int] = []
    seen: list[int] = []

    @contextmanager
    def admit(prompts: Sequence[GenerateRequest]) -> Iterator[None]:
        if len(prompts) > 1:
            raise ServerBusyError("one at a time", retry_after_s=6.2)
        held.append(len(prompts))
        yield
        held.pop()

    waiter = Waiter()
    waiter.gate.set()
    app = build_app(
        waiter,
        limits=LIMITS,
        admit=admit,
        observe=lambda path, status, seconds: seen.append(status),
    )
    async with serving(app) as url, aiohttp.ClientSession() as session:
        two = BODY | {"input_ids": [[1], [2]]}
        async with session.post(url + "/generate", json=two) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "7")
            assert (await response.json())["error"]["message"] == "one at a time"
        async with session.post(url + "/generate", json=BODY) as response:
            assert response.status == 200
    assert (held, seen) == ([], [429, 200])


# ---- tokens


def test_only_the_whole_token_matches() -> None:
    token = BearerToken("0123456789abcdef")
    assert token.matches("Bearer 0123456789abcdef")
    for wrong in ("", "0123456789abcdef", "bearer 0123456789abcdef", "Bearer 0123456789abcdeg"):
        assert not token.matches(wrong)
    for wrong in ("Bearer 0123456789abcdef ", "Bearer é", "Bearer \udcff"):
        assert not token.matches(wrong)
    assert "0123" not in repr(token)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "at least 16"),
        (b"short", "found 5 characters"),
        (b"two words of a secret", "in 5 words"),
        (b"line-one-of-it\nline-two-of-it", "in 2 words"),
        ("é".encode() * 20, "ASCII"),
    ],
)
def test_a_token_file_without_a_token_is_one_clear_error(
    content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        read_token_file(tmp_path / "token")
    assert "secret" not in str(caught.value)
    assert "line-one" not in str(caught.value)
    with pytest.raises(ConfigError, match="No such file"):
        read_token_file(tmp_path / "nowhere")


def test_blanks_around_a_token_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("  0123456789abcdef\n")
    assert read_token_file(tmp_path / "token").matches("Bearer 0123456789abcdef")
