"""The client with deadlines by length, a breaker, and more than one server."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from miniverl_dist.errors import (
    DeadlineError,
    MalformedReplyError,
    NotFiniteError,
    ReplyMismatchError,
    RequestRejectedError,
    ServerUnavailableError,
)
from miniverl_dist.generate_api.breaker import BreakerLimits, BreakerState
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.transport import TryOutcome
from miniverl_dist.generate_api.wire import GenerateRequest, SamplingParams, scoring_request
from tests.support.faulty_server import entries_of, reply_with, truth
from tests.support.http_faults import (
    HANG,
    RESET,
    Act,
    FakeClock,
    GateClock,
    ScriptedServer,
    reply,
    scripted_server,
)

IDS = tuple(range(100, 120))
MANY_GROUPS = 64
"""Where a group goes hangs on the servers' ports, which differ from run to run: by chance, one of
two gets less than an eighth of so many once in 10^10 runs."""
BUSY = reply(503, {"error": {"message": "The request queue is full."}})


def right(body: dict[str, Any]) -> Act:
    return reply(body=reply_with(body, entries_of(body)))


def limits(**changes: Any) -> ClientLimits:
    fields: dict[str, Any] = {
        "deadline_s": 20,
        "request_deadline_s": 5,
        "max_retries": 0,
        "breaker": BreakerLimits(failures_in_a_row=2, open_s=10),
    }
    return ClientLimits(**fields | changes)


def urls_of(*servers: ScriptedServer) -> list[str]:
    return [server.url for server in servers]


async def until_received(count: int, *servers: ScriptedServer) -> None:
    async with asyncio.timeout(60):
        while sum(len(server.received) for server in servers) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


# ---- deadlines by length


@pytest.mark.parametrize(
    ("num_prompt", "num_new", "seconds"), [(0, 0, 2.0), (500, 0, 3.5), (1000, 3000, 14.0)]
)
def test_a_request_gets_time_by_its_length(num_prompt: int, num_new: int, seconds: float) -> None:
    found = ClientLimits(request_deadline_s=2.0, request_deadline_s_per_1k_tokens=3.0)
    assert found.request_deadline_for(num_prompt + num_new) == pytest.approx(seconds)


async def test_a_long_request_may_take_longer_than_a_short_one() -> None:
    found = limits(
        request_deadline_s=0.03,
        request_deadline_s_per_1k_tokens=1.0,
        breaker=BreakerLimits(failures_in_a_row=9),
    )
    async with scripted_server(HANG) as server, GenerateClient(server.url, limits=found) as client:
        for num_tokens, said in ((20, "0.05 s"), (120, "0.15 s")):
            params = SamplingParams(max_new_tokens=num_tokens - 3)
            with pytest.raises(ServerUnavailableError, match=f"no answer within {said}"):
                await client.generate(GenerateRequest((1, 2, 3), params))
        # The deadline of the call bounds it.
        with pytest.raises(ServerUnavailableError, match=r"no answer within 0.0[34]"):
            await client.generate(scoring_request(range(50_000), 1), deadline_s=0.04)


# ---- the breaker


async def test_peer_33_hangs_open_the_breaker_and_then_calls_fail_at_once() -> None:
    clock, told = FakeClock(), list[tuple[str, BreakerState]]()
    found = limits(request_deadline_s=0.03)
    async with (
        scripted_server(HANG) as server,
        GenerateClient(
            server.url, limits=found, clock=clock, on_breaker=lambda *state: told.append(state)
        ) as client,
    ):
        for _ in range(2):
            with pytest.raises(ServerUnavailableError, match="no answer within"):
                await client.score(IDS, 5)
        for _ in range(3):
            with pytest.raises(ServerUnavailableError, match=r"left alone .* let through in 10 s"):
                await client.score(IDS, 5)
        assert len(server.received) == 2
        assert client.tries == {TryOutcome.TIMEOUT: 2}
        clock.time += 10
        server.script, client.limits = [right], limits()
        await client.score(IDS, 5)
        await client.score(IDS, 5)
        assert client.num_inflight_tokens == 0
        url = server.url
    assert told == [
        (url, BreakerState.OPEN),
        (url, BreakerState.HALF_OPEN),
        (url, BreakerState.CLOSED),
    ]


@pytest.mark.parametrize(
    ("act", "opens"),
    [
        (RESET, True),
        (reply(502, {}), True),
        (reply(504, {}), True),
        (reply(body={"text": ""}, missing_bytes=50), True),
        (BUSY, False),
        (reply(429, {}), False),
        (reply(500, {}), False),
        (reply(400, {}), False),
        (reply(body=b"<html>", content_type="text/html"), False),
        (Act(b"+OK ready\r\n\r\n", "close"), False),
    ],
)
async def test_only_hangs_and_broken_connections_open_it(act: Act, opens: bool) -> None:
    async with (
        scripted_server(act) as server,
        GenerateClient(server.url, limits=limits(), clock=FakeClock()) as client,
    ):
        for _ in range(4):
            with pytest.raises((ServerUnavailableError, RequestRejectedError, MalformedReplyError)):
                await client.score(IDS, 5)
        state = client.endpoints[0].breaker.state
    assert state is (BreakerState.OPEN if opens else BreakerState.CLOSED)
    assert len(server.received) == (2 if opens else 4)


async def test_a_call_with_too_little_time_left_does_not_blame_the_server() -> None:
    found = limits(request_deadline_s=2.0, max_retries=1, retry_backoff_s=0.0)
    async with (
        scripted_server(HANG) as server,
        GenerateClient(server.url, limits=found) as client,
    ):
        # The second try has 0.4 s of 2 s left.
        with pytest.raises((ServerUnavailableError, DeadlineError)):
            await client.score(IDS, 5, deadline_s=2.4)
        assert client.tries[TryOutcome.TIMEOUT] == 2
        assert client.endpoints[0].breaker.state is BreakerState.CLOSED


class LateClock(FakeClock):
    """Each look at it finds it a second later: something holds up the event loop."""

    def now(self) -> float:
        """Fake monotonic seconds."""
        self.time += 1.0
        return self.time


async def test_a_timeout_of_a_busy_event_loop_does_not_blame_the_server() -> None:
    found = limits(request_deadline_s=0.03, deadline_s=1000)
    async with (
        scripted_server(HANG) as server,
        GenerateClient(server.url, limits=found, clock=LateClock()) as client,
    ):
        for _ in range(4):
            with pytest.raises(ServerUnavailableError, match="no answer within"):
                await client.score(IDS, 5)
        assert client.endpoints[0].breaker.state is BreakerState.CLOSED


async def test_a_cancelled_trial_does_not_shut_the_server_out() -> None:
    clock = FakeClock()
    async with (
        scripted_server(RESET, RESET, HANG, right) as server,
        GenerateClient(server.url, limits=limits(), clock=clock) as client,
    ):
        for _ in range(2):
            with pytest.raises(ServerUnavailableError):
                await client.score(IDS, 5)
        clock.time += 10
        trial = asyncio.create_task(client.score(IDS, 5))
        await until_received(3, server)
        with pytest.raises(ServerUnavailableError, match="a trial is out"):
            await client.score(IDS, 5)
        trial.cancel()
        await asyncio.gather(trial, return_exceptions=True)
        assert len(await client.score(IDS, 5)) == 15


async def test_who_waits_for_tokens_learns_that_the_breaker_has_opened() -> None:
    found = limits(request_deadline_s=0.5, max_inflight_tokens=40)
    async with (
        scripted_server(HANG) as server,
        GenerateClient(server.url, limits=found, clock=FakeClock()) as client,
    ):
        calls = [client.score(IDS, 5) for _ in range(20)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(each) for each in results} == {ServerUnavailableError}
        assert sum("left alone" in str(each) for each in results) == 18
        assert len(server.received) == 2
        assert client.budget.outstanding == 0


# ---- several servers


async def test_siblings_go_to_one_server_and_groups_to_both() -> None:
    async with (
        scripted_server(right) as first,
        scripted_server(right) as second,
        GenerateClient(urls_of(first, second), limits=limits()) as client,
    ):
        for group in range(MANY_GROUPS):
            before = len(first.received)
            for member in range(3):
                ids = (group, *IDS, member)
                await client.score(ids, 5, key=f"g{group}")
            assert len(first.received) - before in (0, 3)
        assert len(first.received) + len(second.received) == 3 * MANY_GROUPS
        assert min(len(first.received), len(second.received)) >= 3 * MANY_GROUPS // 8


async def test_without_a_key_what_is_not_scored_decides() -> None:
    async with (
        scripted_server(right) as first,
        scripted_server(right) as second,
        GenerateClient(urls_of(first, second), limits=limits()) as client,
    ):
        for group in range(MANY_GROUPS):
            before = len(first.received)
            for member in range(3):
                await client.score((group, *IDS, member), 21)
            assert len(first.received) - before in (0, 3)
        assert min(len(first.received), len(second.received)) >= 3 * MANY_GROUPS // 8


async def test_a_retry_asks_another_server_and_does_not_wait_for_the_first() -> None:
    slow = reply(429, {"error": {"message": "slow down"}}, headers={"Retry-After": "30"})
    clock = FakeClock()
    async with (
        scripted_server(slow) as first,
        scripted_server(slow) as second,
        GenerateClient(
            urls_of(first, second), limits=limits(max_retries=2, deadline_s=100), clock=clock
        ) as client,
    ):
        with pytest.raises(ServerUnavailableError, match="3 tries"):
            await client.score(IDS, 5)
        assert sorted(len(server.received) for server in (first, second)) == [1, 2]
    # Only when both had refused was there nobody else to ask.
    assert clock.sleeps[0] < 1
    assert 30 <= clock.sleeps[1] < 32


async def test_a_server_that_is_down_costs_no_score_and_is_left_alone() -> None:
    async with (
        scripted_server(RESET) as down,
        scripted_server(right) as up,
        GenerateClient(
            urls_of(down, up), limits=limits(max_retries=1), clock=FakeClock()
        ) as client,
    ):
        for group in range(30):
            assert len(await client.score((group, *IDS), 5, key=f"g{group}")) == 16
        assert len(down.received) == 2
        assert len(up.received) == 30


async def test_a_full_share_sends_siblings_to_the_other_server() -> None:
    async with (
        scripted_server(HANG) as first,
        scripted_server(HANG) as second,
        GenerateClient(urls_of(first, second), limits=limits(max_inflight_tokens=40)) as client,
    ):
        tasks = [asyncio.create_task(client.score(IDS, 5, key="g")) for _ in range(3)]
        await until_received(3, first, second)
        assert sorted(len(server.received) for server in (first, second)) == [1, 2]
        assert client.num_inflight_tokens == 60
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert client.num_inflight_tokens == 0


async def test_health_and_model_info_of_several_servers() -> None:
    one, two = reply(body={"model_path": "one"}), reply(body={"model_path": "two"})
    async with (
        scripted_server(one) as first,
        scripted_server(two) as second,
        GenerateClient(urls_of(first, second), clock=FakeClock()) as client,
    ):
        infos = await client.model_infos()
        assert {url: info.model_path for url, info in infos.items()} == {
            first.url: "one",
            second.url: "two",
        }
        assert (await client.model_info()).model_path == "one"
        assert (await client.only(client.endpoints[1]).model_info()).model_path == "two"
        first.script = [BUSY]
        assert await client.health()
        second.script = [BUSY]
        assert not await client.health()


# ---- scores


async def test_a_score_is_checked_and_complete() -> None:
    async with scripted_server(right) as server, GenerateClient(server.url) as client:
        scores = await client.score(IDS, 5, extra_key="policy-3")
    np.testing.assert_array_equal(scores, [truth(IDS, i) for i in range(5, 20)])
    (sent,) = server.received
    assert sent.json["extra_key"] == "policy-3"
    assert sent.json["return_text_in_logprobs"] is False
    assert sent.json["logprob_start_len"] == 4
    assert sent.json["sampling_params"]["max_new_tokens"] == 0


@pytest.mark.parametrize(
    ("entries", "finish", "error"),
    [
        (lambda e: e[:-1], None, ReplyMismatchError),
        (lambda e: [*e[:-1], [-0.1, 7, "text"]], None, ReplyMismatchError),
        (lambda e: [[-0.1, e[0][1], None], *e[1:]], None, ReplyMismatchError),
        (lambda e: [*e[:-1], [None, e[-1][1], None]], None, NotFiniteError),
        (lambda e: [*e[:-1], [float("nan"), e[-1][1], None]], None, NotFiniteError),
        (lambda e: [*e[:-1], [0.2, e[-1][1], None]], None, NotFiniteError),
        (lambda e: [*e[:-1], [-0.1]], None, MalformedReplyError),
        (lambda e: None, None, ReplyMismatchError),
        (lambda e: e, {"type": "abort", "message": "weights"}, ServerUnavailableError),
    ],
)
async def test_a_reply_that_does_not_hold_is_no_score(
    entries: Any, finish: dict[str, str] | None, error: type[Exception]
) -> None:
    def spoilt(body: dict[str, Any]) -> Act:
        return reply(body=reply_with(body, entries(entries_of(body)), finish))

    async with scripted_server(spoilt) as server, GenerateClient(server.url) as client:
        with pytest.raises(error):
            await client.score(IDS, 5)
        assert client.budget.used == 0
        assert client.tries == {TryOutcome.ANSWERED: 1}


async def test_a_pause_holds_no_tokens_of_any_server() -> None:
    clock = GateClock()
    async with (
        scripted_server(BUSY, right) as first,
        scripted_server(BUSY, right) as second,
        GenerateClient(urls_of(first, second), limits=limits(max_retries=2), clock=clock) as client,
    ):
        task = asyncio.create_task(client.score(IDS, 5))
        await clock.asleep.wait()
        assert client.num_inflight_tokens == 0
        clock.gate.set()
        await task
