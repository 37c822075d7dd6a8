"""The client against a loopback server that fails in every way a real one does."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    GenerateApiError,
    MalformedReplyError,
    RequestRejectedError,
    ServerUnavailableError,
)
from miniverl_dist.generate_api.client import (
    ClientLimits,
    GenerateClient,
)
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest, scoring_request
from tests.support.http_faults import (
    HANG,
    RESET,
    Act,
    FakeClock,
    GateClock,
    reply,
    scripted_server,
)

RECORDED = Path(__file__).parents[3] / "fixtures" / "sglang_replies" / "lp_mid.json"
OK = reply(body=RECORDED.read_bytes())
BUSY = reply(503, {"error": {"message": "The request queue is full."}})
REQUEST = scoring_request((39, 68, 75, 75, 78), 3)
FAST = ClientLimits(deadline_s=20, request_deadline_s=5, max_retries=3, retry_backoff_s=0.5)


class UpperEnd(random.Random):
    """Draws the upper end of every interval."""

    def uniform(self, a: float, b: float) -> float:
        del a
        return b


def client_of(
    url: str, limits: ClientLimits = FAST, clock: FakeClock | None = None, **others: object
) -> GenerateClient:
    rng = others.get("rng", UpperEnd())
    assert isinstance(rng, random.Random)
    return GenerateClient(url, limits=limits, clock=clock or FakeClock(), rng=rng)


async def ask(*script: Act, limits: ClientLimits = FAST) -> tuple[GenerateReply, list[float], int]:
    """One call; gives the reply, the pauses, and the number of requests."""
    clock = FakeClock()
    async with scripted_server(*script) as server, client_of(server.url, limits, clock) as client:
        try:
            answer = await client.generate(REQUEST)
        finally:
            assert client.budget.used == 0
        return answer, clock.sleeps, len(server.received)


# ---- what goes right


async def test_an_answer_and_what_was_sent() -> None:
    async with scripted_server(OK) as server:
        headers = {"Authorization": "Bearer abcdefgh"}
        async with GenerateClient(server.url + "/", headers=headers) as client:
            answer = await client.generate(REQUEST)
    assert answer.meta_info.input_token_logprobs is not None
    (sent,) = server.received
    assert sent.line == "POST /generate HTTP/1.1"
    assert sent.headers["content-type"] == "application/json"
    assert sent.headers["authorization"] == "Bearer abcdefgh"
    assert sent.json["input_ids"] == [39, 68, 75, 75, 78]
    assert sent.json["logprob_start_len"] == 2


async def test_one_connection_serves_many_requests() -> None:
    async with scripted_server(OK) as server, client_of(server.url) as client:
        for _ in range(5):
            await client.generate(REQUEST)
    assert (server.num_connections, len(server.received)) == (1, 5)


async def test_a_closed_client_opens_a_new_session() -> None:
    async with scripted_server(OK) as server, client_of(server.url) as client:
        await client.generate(REQUEST)
        await client.close()
        await client.generate(REQUEST)
    assert server.num_connections == 2


async def test_health_and_model_info() -> None:
    info = {"model_path": "teacher", "is_generation": True, "weight_version": "v1", "more": 1}
    script = (reply(body=b""), reply(body=info), BUSY)
    async with scripted_server(*script) as server, client_of(server.url) as client:
        assert await client.health()
        assert (await client.model_info()).weight_version == "v1"
        assert not await client.health()
        with pytest.raises(ServerUnavailableError, match="queue is full"):
            await client.model_info()
    assert [each.line for each in server.received[:2]] == [
        "GET /health HTTP/1.1",
        "GET /model_info HTTP/1.1",
    ]


# ---- what is asked for again


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_what_a_server_can_mend_is_asked_for_again(status: int) -> None:
    _, sleeps, num_requests = await ask(reply(status, {"error": {"message": "busy"}}), OK)
    assert (sleeps, num_requests) == ([0.5], 2)


async def test_a_connection_that_breaks_is_asked_for_again() -> None:
    assert (await ask(RESET, OK))[2] == 2
    assert (await ask(Act(then="close"), OK))[2] == 2


async def test_a_body_that_ends_early_is_asked_for_again() -> None:
    assert (await ask(reply(body={"text": "cut"}, missing_bytes=100), OK))[2] == 2


async def test_a_hang_ends_at_the_request_deadline_and_is_asked_for_again() -> None:
    limits = ClientLimits(request_deadline_s=2.0, max_retries=1, retry_backoff_s=0.5)
    assert (await ask(HANG, OK, limits=limits))[2] == 2


async def test_half_an_answer_and_then_silence_ends_at_the_request_deadline() -> None:
    limits = ClientLimits(request_deadline_s=2.0, max_retries=1)
    half = reply(body={"text": "cut"}, missing_bytes=100)
    assert (await ask(Act(half.payload, "hang"), OK, limits=limits))[2] == 2


async def test_pauses_double_and_retries_end() -> None:
    clock = FakeClock()
    async with scripted_server(BUSY) as server, client_of(server.url, clock=clock) as client:
        with pytest.raises(ServerUnavailableError, match=r"4 tries; last: .*503.*queue is full"):
            await client.generate(REQUEST)
    assert clock.sleeps == [0.5, 1.0, 2.0]
    assert len(server.received) == 4


async def test_a_refused_connection_is_unavailable() -> None:
    async with scripted_server(OK) as server:
        url = server.url
    async with client_of(url) as client:
        with pytest.raises(ServerUnavailableError, match="cannot connect: Connection refused"):
            await client.generate(REQUEST)


async def test_pauses_are_drawn_from_the_whole_interval() -> None:
    clock = FakeClock()
    limits = ClientLimits(max_retries=400, retry_backoff_s=1e-9, deadline_s=1e9)
    async with (
        scripted_server(BUSY) as server,
        client_of(server.url, limits, clock, rng=random.Random(0)) as client,
    ):
        with pytest.raises(ServerUnavailableError):
            await client.generate(REQUEST)
    late = [pause / (1e-9 * 2**16) for pause in clock.sleeps[16:]]
    assert 0 <= min(late) < 0.05
    assert 0.95 < max(late) <= 1


async def test_retry_after_is_honoured_on_top_of_the_jitter() -> None:
    slow = reply(429, {"error": {"message": "slow down"}}, headers={"Retry-After": "3"})
    _, sleeps, _ = await ask(slow, slow, OK)
    assert sleeps == [3.5, 4.0]


async def test_retry_after_past_the_deadline_fails_at_once() -> None:
    clock = FakeClock()
    slow = reply(503, {"error": {"message": "later"}}, headers={"Retry-After": "3600"})
    async with scripted_server(slow) as server, client_of(server.url, clock=clock) as client:
        with pytest.raises(DeadlineError, match=r"would start in 3.6e\+03 s, past the deadline"):
            await client.generate(REQUEST)
    assert clock.sleeps == []
    assert len(server.received) == 1


async def test_the_deadline_counts_pauses() -> None:
    clock = FakeClock()
    limits = ClientLimits(deadline_s=4, max_retries=100, retry_backoff_s=0.5)
    async with scripted_server(BUSY) as server, client_of(server.url, limits, clock) as client:
        with pytest.raises(DeadlineError, match="queue is full"):
            await client.generate(REQUEST)
        assert sum(clock.sleeps) == 3.5
        with pytest.raises(DeadlineError):
            await client.generate(REQUEST, deadline_s=0.2)
    assert sum(clock.sleeps) == 3.5


async def test_a_retry_gets_a_rid_of_its_own() -> None:
    async with scripted_server(BUSY, BUSY, OK) as server, client_of(server.url) as client:
        await client.generate(GenerateRequest((1,), rid="r"))
    assert [each.json["rid"] for each in server.received] == ["r", "r_retry1", "r_retry2"]


# ---- what is an error at once


async def test_400_is_not_swallowed_and_not_asked_for_again() -> None:
    refusal = reply(400, {"error": {"message": "too long: 5000"}})
    async with scripted_server(refusal) as server, client_of(server.url) as client:
        with pytest.raises(RequestRejectedError, match="HTTP 400: too long: 5000") as caught:
            await client.generate(REQUEST)
    assert caught.value.status == 400
    assert len(server.received) == 1


async def fails_at_once(act: Act, error: type[GenerateApiError], message: str) -> GenerateApiError:
    async with scripted_server(act, OK) as server, client_of(server.url) as client:
        with pytest.raises(error, match=message) as caught:
            await client.generate(REQUEST)
        assert type(caught.value) is error
        assert client.budget.used == 0
        assert len(server.received) == 1
    return caught.value


@pytest.mark.parametrize("status", [401, 403, 404, 413, 422])
async def test_other_4xx_keep_status_and_words(status: int) -> None:
    page = reply(status, b"<html>no\n way</html>", content_type="text/html")
    found = await fails_at_once(page, RequestRejectedError, "<html>no way</html>")
    assert isinstance(found, RequestRejectedError)
    assert found.status == status


async def test_an_error_inside_the_server_is_unavailable_at_once() -> None:
    broken = reply(500, {"error": {"message": "CUDA error"}})
    await fails_at_once(broken, ServerUnavailableError, "HTTP 500: CUDA error")


async def test_a_redirect_is_not_followed() -> None:
    moved = reply(307, b"", headers={"Location": "http://127.0.0.1:9/elsewhere"})
    await fails_at_once(moved, ServerUnavailableError, "HTTP 307")


async def test_a_html_answer_is_malformed() -> None:
    page = reply(200, b"<h1>It works!</h1>", content_type="text/html; charset=utf-8")
    await fails_at_once(page, MalformedReplyError, "text/html, .*It works!")


async def test_truncated_json_is_malformed() -> None:
    cut = reply(body=RECORDED.read_bytes()[:-50])
    await fails_at_once(cut, MalformedReplyError, "truncated.*starts with b'{")


async def test_json_of_another_form_is_malformed() -> None:
    await fails_at_once(reply(body={"choices": []}), MalformedReplyError, "missing .*meta_info")


async def test_something_that_is_no_http_is_malformed() -> None:
    await fails_at_once(Act(b"+OK ready\r\n\r\n"), MalformedReplyError, "generate")


# ---- deadlines


async def test_peer_32_no_timeout_wedges_a_call() -> None:
    limits = ClientLimits(deadline_s=0.1, request_deadline_s=60, max_retries=100)
    async with scripted_server(HANG) as server, GenerateClient(server.url, limits=limits) as client:
        async with asyncio.timeout(30):
            with pytest.raises(DeadlineError, match=r"past the deadline.* no answer within"):
                await client.generate(REQUEST)
        assert client.budget.used == 0


async def test_peer_33_a_healthy_server_that_never_answers_fails_by_the_request_deadline() -> None:
    limits = ClientLimits(request_deadline_s=0.04, max_retries=1)
    script = (HANG, HANG, reply(body=b""))
    async with scripted_server(*script) as server, client_of(server.url, limits) as client:
        with pytest.raises(ServerUnavailableError, match=r"2 tries.*no answer within 0.045 s"):
            await client.generate(REQUEST)
        client.limits = FAST
        assert await client.health()


async def test_the_wait_for_tokens_has_a_deadline() -> None:
    limits = ClientLimits(max_inflight_tokens=8)
    async with scripted_server(OK) as server, client_of(server.url, limits) as client:
        held = await client.budget.acquire(8, timeout_s=1)
        with pytest.raises(DeadlineError, match=r"5 tokens did not become free.*8 of 8 in flight"):
            await client.generate(REQUEST, deadline_s=0.04)
        client.budget.release(held)
        await client.generate(REQUEST)
        assert client.budget.used == 0
    assert len(server.received) == 1


# ---- tokens in flight


async def test_no_slot_is_held_while_sleeping() -> None:
    clock = GateClock()
    limits = ClientLimits(max_inflight_tokens=5)
    async with scripted_server(BUSY, OK) as server, client_of(server.url, limits, clock) as client:
        refused = asyncio.create_task(client.generate(REQUEST))
        async with asyncio.timeout(60):
            await clock.asleep.wait()
            assert client.budget.used == 0
            await client.generate(REQUEST)  # needs all 5 tokens
        assert not refused.done()
        clock.gate.set()
        await refused
    assert len(server.received) == 3


async def test_the_weight_of_a_request_is_its_prompt_and_its_new_tokens() -> None:
    async with scripted_server(HANG) as server, client_of(server.url) as client:
        task = asyncio.create_task(client.generate(GenerateRequest((1, 2, 3))))
        async with asyncio.timeout(60):
            await server.arrived.wait()
        assert client.budget.used == 3 + 128
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert client.budget.used == 0


# ---- secrets


async def test_a_secret_that_a_server_repeats_does_not_reach_the_error() -> None:
    secret = "sk-0123456789"
    for act in (
        reply(401, {"error": {"message": "x" * 488 + f"bad {secret}"}}),
        reply(503, {"error": {"message": f"bad key {secret}"}}),
        reply(200, f"{secret} <html>".encode(), content_type="text/html"),
        reply(200, {"you sent": secret}),
    ):
        async with scripted_server(act) as server:
            client = GenerateClient(
                server.url,
                limits=ClientLimits(max_retries=0),
                headers={"Authorization": f"Bearer {secret}"},
            )
            async with client:
                with pytest.raises(GenerateApiError, match=r"\[redacte") as caught:
                    await client.generate(REQUEST)
        assert "0123" not in str(caught.value)
        assert secret not in repr(client) + repr(vars(caught.value))


def test_credentials_in_the_url_are_refused() -> None:
    with pytest.raises(ConfigError, match="headers file") as caught:
        GenerateClient("http://me:secret@host")
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"expected http\(s\)://"):
        GenerateClient("host:80")
