"""What the client is made of: the token budget, Retry-After, the headers file."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import ConfigError
from miniverl_dist.generate_api.budget import TokenBudget
from miniverl_dist.generate_api.headers import read_headers_file, retry_after_s


async def test_the_cap_counts_tokens_and_an_oversized_request_goes_alone() -> None:
    budget = TokenBudget(10)
    first = await budget.acquire(4, timeout_s=1)
    giant = asyncio.create_task(budget.acquire(1000, timeout_s=1))
    small = asyncio.create_task(budget.acquire(1, timeout_s=1))
    await asyncio.sleep(0)
    assert not giant.done()
    assert not small.done()  # would fit, but came later
    budget.release(first)
    assert await giant == 10
    await asyncio.sleep(0)
    assert not small.done()
    budget.release(10)
    assert await small == 1


async def test_a_cancelled_wait_lets_the_next_one_pass() -> None:
    budget = TokenBudget(10)
    held = await budget.acquire(6, timeout_s=1)
    giant = asyncio.create_task(budget.acquire(10, timeout_s=1))
    small = asyncio.create_task(budget.acquire(4, timeout_s=1))
    await asyncio.sleep(0)
    giant.cancel()
    assert await small == 4
    # Cancelled in the same moment as admitted: the tokens come back.
    late = asyncio.create_task(budget.acquire(6, timeout_s=1))
    await asyncio.sleep(0)
    budget.release(held)
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert budget.used == 4


async def test_a_wait_that_is_cancelled_while_tokens_come_back_ends_cleanly() -> None:
    """The entry still stands in the queue when `release` looks at it."""
    budget = TokenBudget(10)
    held = await budget.acquire(10, timeout_s=1)
    gone = asyncio.create_task(budget.acquire(10, timeout_s=1))
    behind = asyncio.create_task(budget.acquire(3, timeout_s=1))
    await asyncio.sleep(0)
    assert budget.outstanding == 23
    gone.cancel()
    budget.release(held)
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert await behind == 3
    assert budget.outstanding == budget.used == 3


async def test_room_is_what_an_arrival_would_not_wait_for() -> None:
    budget = TokenBudget(10)
    assert budget.has_room(1000)  # goes alone
    await budget.acquire(6, timeout_s=1)
    assert [budget.has_room(n) for n in (4, 5, 1000)] == [True, False, False]
    waiting = asyncio.create_task(budget.acquire(5, timeout_s=1))
    await asyncio.sleep(0)
    assert not budget.has_room(1)  # somebody came first
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert budget.has_room(4)


@settings(deadline=None, max_examples=150)
@given(
    capacity=st.integers(1, 20),
    weights=st.lists(st.integers(0, 30), min_size=1, max_size=12),
    cancelled=st.sets(st.integers(0, 11)),
)
def test_the_budget_never_overflows_and_serves_in_order(
    capacity: int, weights: list[int], cancelled: set[int]
) -> None:
    async def run() -> tuple[list[int], int]:
        budget, order = TokenBudget(capacity), []

        async def hold(index: int) -> None:
            weight = await budget.acquire(weights[index], timeout_s=1)
            order.append(index)
            assert weight <= budget.used <= capacity
            try:
                await asyncio.sleep(0)
            finally:
                budget.release(weight)

        tasks = [asyncio.create_task(hold(index)) for index in range(len(weights))]
        await asyncio.sleep(0)
        for index in cancelled & set(range(len(tasks))):
            tasks[index].cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        assert {type(each) for each in ended} <= {type(None), asyncio.CancelledError}
        return order, budget.used + budget.outstanding

    order, used = asyncio.run(run())
    assert used == 0
    assert order == sorted(order)
    assert set(range(len(weights))) - set(order) <= cancelled


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({}, None),
        ({"Retry-After": "7"}, 7.0),
        ({"Retry-After": " 0.5 "}, 0.5),
        ({"Retry-After": "-3"}, 0.0),
        ({"Retry-After": "nan"}, None),
        ({"Retry-After": "inf"}, None),
        ({"Retry-After": "soon"}, None),
        (
            {
                "Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT",
                "Date": "Fri, 31 Dec 1999 23:59:49 GMT",
            },
            10.0,
        ),
        ({"Retry-After": "Fri, 31 Dec 1999 23:59:59 GMT"}, 0.0),
        ({"Retry-After": f"Mon, 1 Jan {10**20} 00:00:00 GMT"}, None),
        ({"Retry-After": "Mon, 1 Jan 2020 00:00:00 +999999999999"}, None),
        ({"Retry-After": "Mon, 1 Jan 1990 00:00:00 GMT", "Date": f"1 Jan {10**20} 0:0:0 GMT"}, 0.0),
        ({"Retry-After": "1e999"}, None),
    ],
)
def test_retry_after_forms(headers: dict[str, str], seconds: float | None) -> None:
    assert retry_after_s(headers) == seconds


def test_headers_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "headers"
    path.write_text("# for the gateway\nAuthorization: Bearer a:b c\n\nX-Tenant:  lab \r\n")
    assert read_headers_file(path) == {"Authorization": "Bearer a:b c", "X-Tenant": "lab"}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("Authorization Bearer s3cret", "no colon"),
        ("My Name: s3cret", "no header name"),
        (": s3cret", "no header name"),
        ("X-Key:", "X-Key is empty"),
        ("X-Key: s3cret\u00e9", "printable ASCII"),
        ("X-Key: s3cret\tb", "printable ASCII"),
        ("Content-Length: 3", "set by the client itself"),
        ("Content-Encoding: gzip", "set by the client itself"),
        ("connection: close", "set by the client itself"),
        ("Expect: 100-continue", "set by the client itself"),
        ("A: s3cret\x0cHost: evil", "printable ASCII"),
        ("A: s3cret\x1eHost: evil", "printable ASCII"),
        ("A: s3cret\u2028Host: evil", "printable ASCII"),
        ("A: s3cret\x85Host: evil", "printable ASCII"),
        ("x-tenant: s3cret", "occurs twice"),
    ],
)
def test_a_bad_header_line_is_a_config_error_that_does_not_quote_it(
    tmp_path: Path, line: str, problem: str
) -> None:
    path = tmp_path / "headers"
    path.write_text(f"X-Tenant: lab\n{line}\n")
    with pytest.raises(ConfigError, match=f"line 2: .*{problem}") as caught:
        read_headers_file(path)
    assert "s3cret" not in str(caught.value)


def test_a_headers_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_headers_file(tmp_path / "missing")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_headers_file(tmp_path / "binary")
