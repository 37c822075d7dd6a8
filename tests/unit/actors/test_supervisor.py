"""All of a pool is started or nothing; a budget is a window that slides, not a total."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.supervisor import all_started
from miniverl_dist.errors import PlacementError
from tests.fakes import FakeClock
from tests.support.pools import restart_budget


def test_restarts_are_granted_up_to_the_maximum() -> None:
    budget = restart_budget(2)
    assert [budget.spend() for _ in range(4)] == [True, True, False, False]


def test_no_restart_may_be_allowed_at_all() -> None:
    assert restart_budget(0).spend() is False


def test_a_restart_is_forgotten_once_it_is_a_window_old() -> None:
    clock = FakeClock()
    budget = restart_budget(2, clock, window_s=10.0)
    granted = []
    for clock.time in (0.0, 6.0, 9.9, 10.0, 11.0, 15.9, 16.0):
        granted.append(budget.spend())
    #                    0     6    9.9     10    11    15.9    16
    assert granted == [True, True, False, True, False, False, True]


def test_a_refusal_does_not_lengthen_the_wait() -> None:
    clock = FakeClock()
    budget = restart_budget(1, clock, window_s=10.0)
    assert budget.spend()
    for clock.time in (3.0, 6.0, 9.0):
        assert not budget.spend()
    clock.time = 10.0
    assert budget.spend()


@given(
    waits=st.lists(st.floats(0, 7), max_size=40), most=st.integers(0, 4), window=st.floats(1, 20)
)
def test_no_window_ever_holds_more(waits: list[float], most: int, window: float) -> None:
    clock = FakeClock()
    budget = restart_budget(most, clock, window_s=window)
    times: list[float] = []
    for wait in waits:
        clock.time += wait
        held = [time for time in times if time > clock.time - window]
        is_granted = budget.spend()
        assert is_granted == (len(held) < most)
        if is_granted:
            times.append(clock.time)


def test_it_names_itself_and_the_fields_to_change() -> None:
    assert str(restart_budget(3, window_s=3600.0)) == (
        "3 restarts in 3600 s (cluster.max_restarts, cluster.restart_window_s)"
    )


class TestAllStarted:
    async def test_gives_what_was_started_in_order(self) -> None:
        async def start(number: int) -> int:
            await asyncio.sleep(0.01 * (3 - number))
            return number

        async def end(number: int) -> None:
            raise AssertionError(number)

        assert await all_started((start(n) for n in range(3)), end) == [0, 1, 2]

    async def test_ends_the_others_when_one_fails(self) -> None:
        ended: list[int] = []

        async def start(number: int) -> int:
            if number == 1:
                raise PlacementError("no room for number 1")
            await asyncio.sleep(0.01)
            return number

        async def end(number: int) -> None:
            ended.append(number)

        with pytest.raises(PlacementError, match="no room for number 1"):
            await all_started((start(n) for n in range(3)), end)
        assert ended == [0, 2]
