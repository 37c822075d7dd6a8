"""Which texts go together, and what becomes of those that wait."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher_server.batching import (
    MAX_PADDING,
    OneByOne,
    ScoredBatch,
    ScoreJob,
    ScoreQueue,
    ScoreResult,
    choose_behind,
    choose_similar,
)
from tests.support.teachers import SumScorer

sizes = st.lists(st.integers(1, 50), min_size=1, max_size=12)


@given(sizes, st.integers(1, 300))
def test_a_padded_batch_has_the_first_text_and_little_padding(sizes: list[int], most: int) -> None:
    chosen = choose_similar(sizes, max_tokens=most)
    assert chosen[0] == 0
    assert len(set(chosen)) == len(chosen)
    padded = max(sizes[i] for i in chosen) * len(chosen)
    if len(chosen) > 1:
        assert padded <= most
        assert padded - sum(sizes[i] for i in chosen) <= MAX_PADDING * padded


def test_the_closest_in_length_are_chosen() -> None:
    assert choose_similar([20, 40, 19, 21, 5], max_tokens=63) == [0, 2, 3]
    assert choose_similar([20, 40, 19, 21, 5], max_tokens=1000) == [0, 2, 3, 4]
    assert choose_similar([500, 20], max_tokens=63) == [0]


@given(sizes, st.integers(0, 300))
def test_a_row_takes_texts_in_order_while_they_fit(sizes: list[int], most: int) -> None:
    chosen = choose_behind(sizes, max_tokens=most)
    assert chosen[0] == 0
    assert chosen == sorted(set(chosen))
    assert len(chosen) == 1 or sum(sizes[i] for i in chosen) <= most
    if sum(sizes) <= most:
        assert len(chosen) == len(sizes)


def job(*ids: int) -> ScoreJob:
    return ScoreJob(np.array(ids, dtype=np.int64), 1)


class Gated:
    """Takes everything that waits once the gate is open; a job's score is its first token."""

    def __init__(self) -> None:
        self.gate, self.started = threading.Event(), threading.Event()
        self.seen: list[list[int]] = []

    def score_some(self, waiting: Sequence[ScoreJob]) -> ScoredBatch:
        self.seen.append([int(each.token_ids[0]) for each in waiting])
        self.started.set()
        assert self.gate.wait(5)
        results = {i: ScoreResult(each.token_ids[:1] * 1.0) for i, each in enumerate(waiting)}
        return ScoredBatch(results)


async def test_whoever_waits_is_shown_in_order_and_each_gets_its_own() -> None:
    scorer, told = Gated(), []
    queue = ScoreQueue(scorer, lambda jobs, batch, seconds: told.append(len(jobs)))
    tasks = [asyncio.create_task(queue.score(job(n, 0))) for n in (5, 6, 7)]
    assert await asyncio.to_thread(scorer.started.wait, 5)
    late = asyncio.create_task(queue.score(job(8, 0)))
    tasks[1].cancel()  # already at work: its result has nobody to go to
    scorer.gate.set()
    assert (await tasks[0]).logprobs == [5]
    assert (await tasks[2]).logprobs == [7]
    assert (await late).logprobs == [8]
    assert scorer.seen == [[5, 6, 7], [8]]
    assert told == [3, 1]
    await queue.close()


async def test_a_text_whose_asker_has_gone_is_not_scored() -> None:
    scorer = Gated()
    queue = ScoreQueue(scorer)
    first = asyncio.create_task(queue.score(job(1, 0)))
    assert await asyncio.to_thread(scorer.started.wait, 5)
    gone, stays = (asyncio.create_task(queue.score(job(n, 0))) for n in (2, 3))
    await asyncio.sleep(0)
    gone.cancel()
    scorer.gate.set()
    await asyncio.gather(first, stays)
    assert scorer.seen == [[1], [3]]
    await queue.close()


async def test_closing_cancels_what_waits() -> None:
    scorer = Gated()
    queue = ScoreQueue(scorer)
    first = asyncio.create_task(queue.score(job(1, 0)))
    assert await asyncio.to_thread(scorer.started.wait, 5)
    waiting = asyncio.create_task(queue.score(job(2, 0)))
    await asyncio.sleep(0)
    asyncio.get_running_loop().call_later(0.01, scorer.gate.set)
    await queue.close()
    for task in (first, waiting):
        with pytest.raises(asyncio.CancelledError):
            await task
    assert scorer.seen == [[1]]


async def test_a_batch_that_does_not_end_does_not_hold_up_the_end() -> None:
    scorer = Gated()
    queue = ScoreQueue(scorer)
    first = asyncio.create_task(queue.score(job(1, 0)))
    assert await asyncio.to_thread(scorer.started.wait, 5)
    assert not await queue.close(deadline_s=0.02)
    with pytest.raises(asyncio.CancelledError):
        await first
    scorer.gate.set()
    assert await queue.close(deadline_s=5)
    assert not any(thread.name == "scorer" for thread in threading.enumerate())


def test_a_batch_that_ends_behind_its_loop_is_thrown_away_in_silence(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scorer = Gated()

    async def leave_it() -> None:
        queue = ScoreQueue(scorer)
        first = asyncio.create_task(queue.score(job(1, 0)))
        assert await asyncio.to_thread(scorer.started.wait, 5)
        assert not await queue.close(deadline_s=0.01)
        first.cancel()

    asyncio.run(leave_it())
    (thread,) = (each for each in threading.enumerate() if each.name == "scorer")
    assert thread.daemon
    scorer.gate.set()
    thread.join(5)
    assert not thread.is_alive()
    assert not caplog.records


def test_a_scorer_of_single_texts_takes_the_oldest() -> None:
    scorer = SumScorer()
    batch = OneByOne(scorer).score_some([job(10, 20, 30), job(5, 6)])
    assert list(batch.results) == [0]
    np.testing.assert_allclose(batch.results[0].logprobs, [-0.03, -0.06])
    assert batch.results[0].num_cached_tokens == 0
