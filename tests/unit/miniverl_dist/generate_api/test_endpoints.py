"""Which of several servers a request goes to."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from miniverl_dist.errors import ConfigError, ServerUnavailableError
from miniverl_dist.generate_api.breaker import BreakerLimits
from miniverl_dist.generate_api.endpoints import Endpoint, Endpoints
from tests.support.http_faults import FakeClock

URLS = ("http://a", "http://b", "http://c")
KEYS = [f"group-{n}".encode() for n in range(300)]


def endpoints(*urls: str, clock: FakeClock | None = None, capacity: int = 100) -> Endpoints:
    return Endpoints(
        [
            Endpoint(
                url,
                max_inflight_tokens=capacity,
                breaker=BreakerLimits(failures_in_a_row=1, open_s=10),
                clock=clock or FakeClock(),
            )
            for url in urls
        ]
    )


def fail(endpoint: Endpoint) -> None:
    endpoint.breaker.record(endpoint.breaker.admit(), is_failure=True)


def test_a_key_has_its_server_and_keys_spread() -> None:
    found = endpoints(*URLS)
    chosen = [found.choose(1, key).url for key in KEYS]
    assert chosen == [found.choose(1, key).url for key in KEYS]
    assert chosen == [endpoints(*reversed(URLS)).choose(1, key).url for key in KEYS]
    assert min(Counter(chosen).values()) > 60
    assert set(chosen) == set(URLS)


def test_a_server_that_leaves_moves_only_its_own_keys() -> None:
    three, two = endpoints(*URLS), endpoints(*URLS[:2])
    for key in KEYS:
        before, after = three.choose(1, key).url, two.choose(1, key).url
        assert after == before or before == URLS[2]


def test_a_server_left_alone_is_passed_over_until_it_is_tried_again() -> None:
    clock = FakeClock()
    found = endpoints(*URLS, clock=clock)
    first = found.choose(1, b"k")
    fail(first)
    second = found.choose(1, b"k")
    assert second is not first
    clock.time += 10
    assert found.choose(1, b"k") is first  # on trial


def test_all_left_alone_is_an_error_that_says_for_how_long() -> None:
    clock = FakeClock()
    found = endpoints(*URLS, clock=clock)
    for endpoint in found.all:
        fail(endpoint)
        clock.time += 1
    with pytest.raises(ServerUnavailableError, match=r"http://a, .*let through in 7 s"):
        found.choose(1, b"k")
    clock.time += 7
    found.all[0].breaker.admit()
    with pytest.raises(ServerUnavailableError, match="a trial is out"):
        found.choose(1, b"k")
    one = endpoints("http://a")
    fail(one.all[0])
    with pytest.raises(ServerUnavailableError, match="let through in 10 s"):
        one.choose(1, b"")


async def test_a_server_without_room_is_passed_over_and_the_least_loaded_one_queued_at() -> None:
    found = endpoints(*URLS)
    order = []
    for _ in URLS:
        endpoint = found.choose(60, b"k")
        order.append(endpoint)
        await endpoint.budget.acquire(60, timeout_s=1)
    assert {endpoint.url for endpoint in order} == set(URLS)
    assert found.choose(40, b"k") is order[0]
    # None has room for 60 more: the queue is shortest where the least is in flight or waits.
    await order[1].budget.acquire(5, timeout_s=1)
    await order[2].budget.acquire(5, timeout_s=1)
    assert found.choose(60, b"k") is order[0]
    waiting = asyncio.ensure_future(order[0].budget.acquire(60, timeout_s=5))
    await asyncio.sleep(0)
    assert found.choose(60, b"k") is order[1]
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert order[0].budget.outstanding == 60


def test_what_has_failed_this_call_comes_last() -> None:
    found = endpoints(*URLS)
    first = found.choose(1, b"k")
    second = found.choose(1, b"k", failed={first.url})
    assert second is not first
    assert found.has_other({first.url, second.url})
    third = found.choose(1, b"k", failed={first.url, second.url})
    assert {first, second, third} == set(found.all)
    assert not found.has_other(set(URLS))
    assert found.choose(1, b"k", failed=set(URLS)) is first
    fail(third)
    assert not found.has_other({first.url, second.url})


def test_urls_are_checked() -> None:
    with pytest.raises(ConfigError, match="each once"):
        endpoints("http://a", "http://a/")
    with pytest.raises(ConfigError, match="one or more"):
        endpoints()
    with pytest.raises(ConfigError, match=r"expected http\(s\)://"):
        endpoints("http://")
