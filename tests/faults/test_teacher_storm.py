"""2,000 scores from a server that fails in every way: none guessed, none hangs, all counted."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence

import pytest

from miniverl_dist.generate_api.breaker import BreakerLimits, BreakerState
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.transport import TryOutcome
from miniverl_dist.schemas.teacher import (
    RefusalReason,
    TeacherRefusal,
    TeacherResult,
    TeacherScore,
)
from miniverl_dist.schemas.trajectory import Trajectory
from teacher_server.client import HttpTeacher, Renderer
from teacher_server.rendering import TeacherRendering
from tests.support.faulty_server import VOCAB_SIZE, Fault, faulty_server, truth
from tests.support.teachers import IDENTITY, rendering, trajectory

NUM_REQUESTS = 2000
LIMITS = ClientLimits(
    request_deadline_s=0.5,
    request_deadline_s_per_1k_tokens=0.0,
    max_retries=4,
    retry_backoff_s=0.01,
    max_inflight_tokens=48 * 30,
    # What hangs and breaks is a share of all requests here, not a time of outage.
    breaker=BreakerLimits(failures_in_a_row=50, failure_share=0.9, window=50),
)
MIX: dict[Fault, float] = dict.fromkeys(Fault, 2.0) | {
    Fault.NONE: 40,
    Fault.BUSY_503: 10,
    Fault.SLOW_DOWN_429: 10,
    Fault.HANG: 3,
    Fault.DRIP: 1,
}
REASONS: Mapping[Fault, RefusalReason | None] = {
    Fault.NONE: None,
    Fault.SLOW_BUT_RIGHT: None,
    Fault.REJECTED: RefusalReason.REJECTED,
    Fault.NAN: RefusalReason.NOT_FINITE,
    Fault.MINUS_INFINITY: RefusalReason.NOT_FINITE,
    Fault.POSITIVE: RefusalReason.NOT_FINITE,
    Fault.WRONG_IDS: RefusalReason.MISMATCH,
    Fault.SHORT: RefusalReason.MISMATCH,
    Fault.LONG: RefusalReason.MISMATCH,
    Fault.SHIFTED: RefusalReason.MISMATCH,
}
"""What is not asked for again: None is a score; all other faults, in the end, ``unavailable``."""
OTHER = RefusalReason.UNAVAILABLE


def random_text(name: str) -> TeacherRendering:
    """10 to 60 tokens with one or two scored spans; the text belongs to the name."""
    rng = random.Random(name)
    ids = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(10, 60))]
    first, second = sorted(rng.sample(range(2, len(ids)), 2))
    return rendering(ids, (1, first), (first, second), (second, len(ids)))


def texts(num: int, prefix: str) -> tuple[list[Trajectory], Renderer]:
    """Trajectories and their renderer, made beforehand: nothing else holds up the event loop."""
    asked = [trajectory(f"{prefix}{index}") for index in range(num)]
    rendered = {each.trajectory_id: random_text(each.trajectory_id) for each in asked}
    return asked, lambda each: rendered[each.trajectory_id]


def guessed(score: TeacherScore) -> list[tuple[float, float]]:
    """(said, truth) wherever they differ; a score of another length is a failure of its own."""
    text = random_text(score.trajectory_id)
    assert len(score.spans) == len(text.spans)
    pairs = []
    for span, place in zip(score.spans, text.spans, strict=True):
        expected = [truth(text.token_ids, i) for i in range(place.start, place.end)]
        assert len(span.logprobs) == len(expected)
        pairs += list(zip(span.logprobs, expected, strict=True))
    return [pair for pair in pairs if pair[0] != pair[1]]


async def storm(
    teacher: HttpTeacher,
    asked: Sequence[Trajectory],
    *,
    cancelled: frozenset[int],
    rng: random.Random,
) -> tuple[list[TeacherResult], int]:
    """All at once; gives what was answered, and how many calls were cancelled."""
    tasks = [asyncio.create_task(teacher.score(each)) for each in asked]

    async def cancel(index: int) -> None:
        await asyncio.sleep(rng.uniform(0, 1.0))
        tasks[index].cancel()

    await asyncio.gather(*(cancel(index) for index in cancelled))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    answered = [each for each in results if isinstance(each, TeacherScore | TeacherRefusal)]
    others = [each for each in results if not isinstance(each, TeacherScore | TeacherRefusal)]
    assert all(isinstance(each, asyncio.CancelledError) for each in others), others
    assert len(others) <= len(cancelled)
    return answered, len(others)


@pytest.mark.parametrize("cancelled_share", [0.0, 0.1])
async def test_a_storm_of_faults_leaves_no_guess_no_hang_and_no_slot(
    cancelled_share: float,
) -> None:
    rng = random.Random(7)
    cancelled = frozenset(rng.sample(range(NUM_REQUESTS), int(cancelled_share * NUM_REQUESTS)))
    started = time.monotonic()
    asked, renderer = texts(NUM_REQUESTS, "t")
    async with (
        asyncio.timeout(60),
        faulty_server(MIX, seed=1) as server,
        GenerateClient(server.url, limits=LIMITS, rng=random.Random(3)) as client,
    ):
        teacher = HttpTeacher(client, renderer, IDENTITY, max_prefill_tokens=100, deadline_s=30)
        answered, num_cancelled = await storm(teacher, asked, cancelled=cancelled, rng=rng)
        assert client.num_inflight_tokens == client.budget.outstanding == 0
        tries = client.tries
    seconds = time.monotonic() - started
    scores = [each for each in answered if isinstance(each, TeacherScore)]
    refusals = Counter(each.reason for each in answered if isinstance(each, TeacherRefusal))
    assert len(answered) + num_cancelled == NUM_REQUESTS
    assert [pair for score in scores for pair in guessed(score)] == []
    assert len(scores) > NUM_REQUESTS / 4
    assert server.num_trapped == 0
    # Typed and counted: by the teacher, and one for one by what the server did.
    assert teacher.refusals == refusals
    assert set(server.served) == set(Fault)
    assert set(refusals) == set(RefusalReason) - {RefusalReason.TOO_LONG}
    if not cancelled:
        assert num_cancelled == 0
        # On a machine with much else to do a sound answer may come too late as well.
        num_late = tries[TryOutcome.TIMEOUT] - server.served[Fault.HANG] - server.served[Fault.DRIP]
        assert 0 <= num_late < NUM_REQUESTS / 20
        for reason in set(REASONS.values()):
            count = len(scores) if reason is None else refusals[reason]
            kinds = [fault for fault in Fault if REASONS.get(fault, OTHER) is reason]
            served = sum(server.served[fault] for fault in kinds)
            assert served - num_late <= count <= served
        assert tries[TryOutcome.CONNECTION] >= server.served[Fault.RESET]
    assert seconds < 30


async def test_an_outage_in_the_storm_opens_the_breaker_and_ends_it() -> None:
    """While nothing answers, calls fail at once; when it is back, all scores are right again."""
    states: list[BreakerState] = []
    limits = ClientLimits(
        request_deadline_s=0.25,
        max_retries=1,
        retry_backoff_s=0.01,
        max_inflight_tokens=1000,
        breaker=BreakerLimits(failures_in_a_row=5, open_s=0.3),
    )
    lost, render_lost = texts(400, "lost")
    later, render_later = texts(200, "later")
    async with (
        asyncio.timeout(30),
        faulty_server({Fault.HANG: 1}) as server,
        GenerateClient(
            server.url, limits=limits, on_breaker=lambda url, state: states.append(state)
        ) as client,
    ):
        teacher = HttpTeacher(client, render_lost, IDENTITY, max_prefill_tokens=100, deadline_s=20)
        down = await asyncio.gather(*(teacher.score(each) for each in lost))
        assert {type(each) for each in down} == {TeacherRefusal}
        assert teacher.refusals == {RefusalReason.UNAVAILABLE: len(lost)}
        # Those in flight when it opened, and no more: the others never held a token.
        assert sum(server.served.values()) < len(lost) / 2
        assert client.endpoints[0].breaker.num_opened == 1
        server.weights = {Fault.NONE: 1}
        # What is asked now must come: a machine that stands still for a while is no second outage.
        client.limits = dataclasses.replace(limits, request_deadline_s=15.0)
        waiting = HttpTeacher(
            client, render_later, IDENTITY, max_prefill_tokens=100, deadline_s=20, wait=True
        )
        back = await asyncio.gather(*(waiting.score(each) for each in later))
        assert client.num_inflight_tokens == 0
    assert states == [BreakerState.OPEN, BreakerState.HALF_OPEN, BreakerState.CLOSED]
    scores = [each for each in back if isinstance(each, TeacherScore)]
    assert len(scores) == len(later)
    assert [pair for score in scores for pair in guessed(score)] == []
