"""Servers that go away and come back: a call that may wait for them does, within its deadline."""

from __future__ import annotations

import asyncio
import errno
import random
import socket
from typing import Any

import aiohttp
import pytest

from miniverl_dist.errors import ServerUnavailableError
from miniverl_dist.generate_api.breaker import BreakerLimits, BreakerState
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.transport import connection_problem
from tests.support.faulty_server import entries_of, reply_with
from tests.support.http_faults import RESET, Act, FakeClock, reply, scripted_server

IDS = tuple(range(100, 120))
DOWN = [RESET] * 12
"""Refused tries until the server is back."""


def right(body: dict[str, Any]) -> Act:
    return reply(body=reply_with(body, entries_of(body)))


def limits(**changes: Any) -> ClientLimits:
    fields: dict[str, Any] = {
        "deadline_s": 600,
        "request_deadline_s": 5,
        "max_retries": 4,
        "retry_backoff_s": 0.5,
        "breaker": BreakerLimits(failures_in_a_row=5, open_s=10),
        "outlast_breaker": True,
    }
    return ClientLimits(**fields | changes)


@pytest.mark.parametrize("num_texts", [1, 30])
async def test_a_server_that_was_away_costs_no_score(num_texts: int) -> None:
    clock = FakeClock()
    async with (
        scripted_server(*DOWN, right) as server,
        GenerateClient(server.url, limits=limits(), clock=clock, rng=random.Random(0)) as client,
    ):
        scores = await asyncio.gather(*(client.score(IDS, 5) for _ in range(num_texts)))
        assert [len(each) for each in scores] == [15] * num_texts
        assert client.endpoints[0].breaker.state is BreakerState.CLOSED
        assert client.budget.outstanding == 0
        # While it was away, one text at a time tried it: all others waited.
        assert len(server.received) <= num_texts + len(DOWN) + 30


async def test_without_leave_to_wait_it_fails_at_once() -> None:
    async with (
        scripted_server(*DOWN, right) as server,
        GenerateClient(
            server.url, limits=limits(outlast_breaker=False), clock=FakeClock()
        ) as client,
    ):
        with pytest.raises(ServerUnavailableError, match="no answer after 5 tries"):
            await client.score(IDS, 5)
        with pytest.raises(ServerUnavailableError, match=r"left alone .* let through in 10 s"):
            await client.score(IDS, 5)
        assert len(server.received) == 5


async def test_the_deadline_of_the_call_ends_the_wait_and_the_cause_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    clock = FakeClock()
    async with GenerateClient(
        f"http://127.0.0.1:{port}", limits=limits(deadline_s=95), clock=clock
    ) as client:
        with pytest.raises(ServerUnavailableError) as caught:
            await client.score(IDS, 5)
    assert "cannot connect: Connection refused" in str(caught.value)
    assert "past the 95 s of this call" in str(caught.value)
    assert 80 < sum(clock.sleeps) < 95


async def test_retries_of_a_server_that_answers_stay_limited() -> None:
    busy = reply(503, {"error": {"message": "full"}})
    async with (
        scripted_server(*[RESET] * 6, busy) as server,
        GenerateClient(server.url, limits=limits(), clock=FakeClock()) as client,
    ):
        with pytest.raises(ServerUnavailableError, match="HTTP 503: full"):
            await client.score(IDS, 5)
        # Five that opened the breaker, a trial that failed, then one that closed it and its four
        # retries.
        assert len(server.received) == 11


def test_a_name_that_nobody_knows_is_told_in_words() -> None:
    """As the resolver says it: its numbers are below 0 and none of the system's."""
    key: Any = None
    unknown = aiohttp.ClientConnectorError(key, OSError(-2, "Name or service not known"))
    assert connection_problem(unknown) == "cannot connect: Name or service not known"
    refused = aiohttp.ClientConnectorError(key, OSError(errno.ECONNREFUSED, "Connect call failed"))
    assert connection_problem(refused) == "cannot connect: Connection refused"
    assert connection_problem(ConnectionResetError("x")) == "ConnectionResetError: x"
