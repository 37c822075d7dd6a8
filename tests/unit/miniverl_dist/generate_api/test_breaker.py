"""The breaker: when it opens, what it lets through, what it ignores."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import ServerUnavailableError
from miniverl_dist.generate_api.breaker import BreakerLimits, BreakerState, CircuitBreaker
from tests.support.http_faults import FakeClock

LIMITS = BreakerLimits(failures_in_a_row=3, failure_share=0.5, window=8, open_s=10.0)
CLOSED, OPEN, HALF_OPEN = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.HALF_OPEN


def breaker(
    limits: BreakerLimits = LIMITS,
) -> tuple[CircuitBreaker, FakeClock, list[BreakerState]]:
    clock, told = FakeClock(), list[BreakerState]()
    return CircuitBreaker(limits, clock=clock, on_change=told.append), clock, told


def outcomes(found: CircuitBreaker, text: str) -> None:
    """F a failure, A an answer, N nothing learnt; one after the other."""
    for letter in text:
        found.record(found.admit(), is_failure={"F": True, "A": False, "N": None}[letter])


@pytest.mark.parametrize(
    ("text", "state"),
    [
        ("FF", CLOSED),
        ("FFF", OPEN),
        ("FFAFF", CLOSED),
        ("FFNF", OPEN),  # what says nothing breaks no row
        ("NNNNNNNN", CLOSED),
        ("FAFAFAA", CLOSED),  # 3 of 7: not a full window
        ("FAFAFAFA", CLOSED),  # a full window with an answer last is looked at with the next
        ("AFAFAFAF", OPEN),  # 4 of 8
        ("AAFAFAFAF", OPEN),  # the oldest has left the window
        ("AAAFAFAF", CLOSED),  # 3 of 8
    ],
)
def test_it_opens_by_a_row_or_by_a_share(text: str, state: BreakerState) -> None:
    found, _, told = breaker()
    outcomes(found, text)
    assert found.state is state
    assert told == ([OPEN] if state is OPEN else [])
    assert found.num_opened == len(told)


def test_while_open_nothing_is_let_through() -> None:
    found, clock, _ = breaker()
    outcomes(found, "FFF")
    clock.time += 9.9
    assert not found.is_admitting
    assert found.trial_in_s == pytest.approx(0.1)
    with pytest.raises(ServerUnavailableError, match=r"for 0\.1 s more"):
        found.admit()


def test_then_one_call_tries_and_an_answer_closes_it() -> None:
    found, clock, told = breaker()
    outcomes(found, "FFF")
    clock.time += 10
    assert found.state is HALF_OPEN
    trial = found.admit()
    assert not found.is_admitting
    with pytest.raises(ServerUnavailableError):
        found.admit()
    found.record(trial, is_failure=False)
    assert found.state is CLOSED
    assert told == [OPEN, HALF_OPEN, CLOSED]
    outcomes(found, "FF")  # former failures are forgotten
    assert found.state is CLOSED


def test_a_trial_that_fails_opens_it_again_at_once() -> None:
    found, clock, told = breaker()
    outcomes(found, "FFF")
    clock.time += 10
    outcomes(found, "F")
    assert found.trial_in_s == 10
    assert told == [OPEN, HALF_OPEN, OPEN]
    assert found.num_opened == 2


def test_a_cancelled_trial_leaves_the_next_one_its_chance() -> None:
    found, clock, _ = breaker()
    outcomes(found, "FFF")
    clock.time += 10
    outcomes(found, "N")
    assert found.state is HALF_OPEN
    assert found.is_admitting
    outcomes(found, "A")
    assert found.state is CLOSED


def test_calls_from_before_it_opened_say_nothing_any_more() -> None:
    found, clock, _ = breaker()
    early = [found.admit() for _ in range(6)]
    for admission in early[:3]:
        found.record(admission, is_failure=True)
    found.record(early[3], is_failure=False)
    assert found.state is OPEN
    clock.time += 10
    trial = found.admit()
    found.record(early[4], is_failure=False)
    assert found.state is HALF_OPEN
    found.record(early[5], is_failure=None)
    assert not found.is_admitting
    found.record(trial, is_failure=False)
    assert found.state is CLOSED


@settings(deadline=None, max_examples=200)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["admit", "end", "wait"]), st.integers(0, 8))),
    outcome=st.lists(st.sampled_from([True, False, None]), min_size=1),
)
def test_half_open_lets_one_through_and_an_answer_always_brings_it_back(
    steps: list[tuple[str, int]], outcome: list[bool | None]
) -> None:
    found, clock, _ = breaker()
    out: list[int] = []
    for number, (step, which) in enumerate(steps):
        if step == "admit" and found.is_admitting:
            was = found.state
            out.append(found.admit())
            assert not (was is HALF_OPEN and found.is_admitting)
        elif step == "end" and out:
            admission = out.pop(which % len(out))
            found.record(admission, is_failure=outcome[number % len(outcome)])
        elif step == "wait":
            clock.time += which
    # Whatever has happened: when all calls have ended and time has passed, one answer closes it.
    for admission in out:
        found.record(admission, is_failure=None)
    clock.time += 10
    found.record(found.admit(), is_failure=False)
    assert found.state is CLOSED
