"""Texts that wait for the teacher, and which of them are computed together.

All that waits stands before one thread. Each time it is free, it is shown everything that waits and
takes the oldest text, with whatever goes well with it. There is no pause to collect more: under
load texts pile up by themselves, without load nobody should wait.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

LOOK_AHEAD = 256
"""Texts at the head of the queue that are considered for one batch."""
CLOSE_DEADLINE_S = 1.0
"""For the forward pass at work when the queue is closed."""
MAX_PADDING = 0.25
"""Of a batch's positions, at most."""


class TextScorer(Protocol):
    """What scores texts; ``teacher_server.scorer.PrefillScorer``, without torch in sight."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def vocab_size(self) -> int:
        """Ids are below; not every id need be known."""

    @property
    def max_context_tokens(self) -> int:
        """Longest text."""

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Whose ids it reads; None where the model does not say."""

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise ``RequestRejectedError`` for a text that cannot be scored."""

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.floating[Any]]:
        """[L - start] nats of ``token_ids[start:]``; blocks, and takes one call at a time."""


@dataclass(frozen=True, eq=False)
class ScoreJob:
    """One text to score."""

    token_ids: NDArray[np.int64]
    """[L]."""
    start: int
    """First token whose logprob is asked for, 1 to L - 1."""
    num_top: int = 0
    """Most likely tokens to name at each of these positions."""

    @property
    def max_reused_tokens(self) -> int:
        """A score needs the state before its token computed anew, so the text up to there."""
        return self.start - 1


@dataclass(frozen=True)
class TopTokens:
    """The most likely tokens at each scored position, descending."""

    ids: NDArray[np.int64]
    """[L - start, k]."""
    logprobs: NDArray[np.float64]
    """[L - start, k] nats."""


@dataclass(frozen=True)
class ScoreResult:
    """The scores of one text."""

    logprobs: NDArray[np.float64]
    """[L - start] nats."""
    num_cached_tokens: int = 0
    """Of the text's beginning that were not computed again."""
    top: TopTokens | None = None


@dataclass(frozen=True)
class ScoredBatch:
    """What was computed together."""

    results: Mapping[int, ScoreResult]
    """By index in what waited; always with the first."""
    num_padding_tokens: int = 0


@runtime_checkable
class BatchScorer(TextScorer, Protocol):
    """A scorer that may take several waiting texts at once."""

    @property
    def num_kept_tokens(self) -> int:
        """Tokens of prefixes it remembers."""

    def score_some(self, waiting: Sequence[ScoreJob]) -> ScoredBatch:
        """Score the first text and whatever goes well with it; blocks, one call at a time."""


class OneByOne:
    """Makes a ``BatchScorer`` of a scorer that takes one text at a time."""

    def __init__(self, scorer: TextScorer) -> None:
        self._scorer = scorer

    def score_some(self, waiting: Sequence[ScoreJob]) -> ScoredBatch:
        """The oldest."""
        job = waiting[0]
        scores = self._scorer.score(job.token_ids.tolist(), job.start)
        return ScoredBatch({0: ScoreResult(scores.astype(np.float64))})


@dataclass(frozen=True)
class BatchLimits:
    """What one forward pass may take."""

    max_batch_tokens: int = 8192
    """Positions computed at once, padding included; a longer text goes alone."""
    prefix_cache_tokens: int = 65_536
    """Remembered of recent texts; 0 remembers nothing."""
    min_shared_tokens: int = 32
    """Shorter shared beginnings are computed again rather than waited for."""


def choose_similar(sizes: Sequence[int], *, max_tokens: int) -> list[int]:
    """Texts for one padded batch with the first: those closest to it in length.

    Args:
        sizes: Tokens of each text, >= 1; the first is the one that has to go.
        max_tokens: Of the batch, padding included.

    Returns:
        Indices, 0 first.
    """
    chosen, longest, total = [0], sizes[0], sizes[0]
    for index in sorted(range(1, len(sizes)), key=lambda i: (abs(sizes[i] - sizes[0]), i)):
        longest_then, total_then = max(longest, sizes[index]), total + sizes[index]
        padded = longest_then * (len(chosen) + 1)
        if padded <= max_tokens and padded - total_then <= MAX_PADDING * padded:
            chosen.append(index)
            longest, total = longest_then, total_then
    return chosen


def choose_behind(sizes: Sequence[int], *, max_tokens: int) -> list[int]:
    """Texts for one row with the first, in order of arrival; arguments as ``choose_similar``."""
    chosen, total = [0], sizes[0]
    for index in range(1, len(sizes)):
        if total + sizes[index] <= max_tokens:
            chosen.append(index)
            total += sizes[index]
    return chosen


class _SomeScorer(Protocol):
    def score_some(self, waiting: Sequence[ScoreJob]) -> ScoredBatch: ...


OnBatch = Callable[[Sequence[ScoreJob], ScoredBatch, float], None]
"""Told of each batch: (its jobs, the batch, seconds)."""


class _ScoringThread:
    """One thread; a daemon, since a forward pass cannot be interrupted and a process has to end."""

    def __init__(self, scorer: _SomeScorer) -> None:
        self._scorer = scorer
        self._inbox: queue.SimpleQueue[tuple[Future[ScoredBatch], Sequence[ScoreJob]] | None]
        self._inbox = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="scorer", daemon=True)
        self._ended: Future[None] = Future()
        self._ended.set_running_or_notify_cancel()  # whoever stops waiting does not end it

    def submit(self, jobs: Sequence[ScoreJob]) -> Future[ScoredBatch]:
        """Have the jobs scored behind those before them."""
        if not self._thread.is_alive():
            self._thread.start()
        work: Future[ScoredBatch] = Future()
        self._inbox.put((work, jobs))
        return work

    async def end(self, deadline_s: float) -> bool:
        """End it behind what has been submitted; False where the deadline came first."""
        self._inbox.put(None)
        if not self._thread.is_alive():
            return True
        ended = asyncio.wrap_future(self._ended)
        # Waits for the forward pass at work.
        await asyncio.wait([ended], timeout=deadline_s)
        if not ended.done():
            ended.cancel()  # the loop may be closed by then
            return False
        self._thread.join()
        return True

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            work, jobs = item
            if not work.set_running_or_notify_cancel():
                continue
            try:
                work.set_result(self._scorer.score_some(jobs))
            except BaseException as error:  # noqa: BLE001 - told to whoever waits for it
                work.set_exception(error)
        self._ended.set_result(None)


class ScoreQueue:
    """Texts before one scoring thread; belongs to one event loop.

    Args:
        scorer: Called in the thread only.
        on_batch: Called in the loop after each batch.
    """

    def __init__(self, scorer: _SomeScorer, on_batch: OnBatch = lambda *batch: None) -> None:
        self._on_batch = on_batch
        self._thread = _ScoringThread(scorer)
        self._waiting: dict[ScoreJob, asyncio.Future[ScoreResult]] = {}
        self._work: asyncio.Task[None] | None = None

    async def score(self, job: ScoreJob) -> ScoreResult:
        """Wait for a text's scores; cancelling it takes the text out of the queue."""
        future: asyncio.Future[ScoreResult] = asyncio.get_running_loop().create_future()
        self._waiting[job] = future
        if self._work is None or self._work.done():
            self._work = asyncio.create_task(self._score_all())
        try:
            # Waits for the texts before it; the caller holds the deadline.
            return await future
        finally:
            self._waiting.pop(job, None)

    async def close(self, *, deadline_s: float = CLOSE_DEADLINE_S) -> bool:
        """End the thread after the batch at work; texts that wait are cancelled.

        Returns:
            Whether it has ended. A batch that takes longer than the deadline goes on for nobody,
            and ends with the process.
        """
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            future.cancel()
        has_ended = await self._thread.end(deadline_s)
        if not has_ended and self._work is not None:
            self._work.cancel()
        return has_ended

    async def _score_all(self) -> None:
        while self._waiting:
            jobs = list(self._waiting)[:LOOK_AHEAD]
            error = await self._score_some(jobs)
            if error is not None and len(jobs) > 1:
                # Any text of the batch may be to blame: the oldest answers for itself alone.
                jobs = jobs[:1]
                error = await self._score_some(jobs)
            if error is not None:
                self._settle(jobs[0], error)

    async def _score_some(self, jobs: Sequence[ScoreJob]) -> BaseException | None:
        started = time.monotonic()
        work = asyncio.wrap_future(self._thread.submit(jobs))
        try:
            # Waits for one forward pass, which nothing can interrupt.
            await asyncio.wait([work])
        except asyncio.CancelledError:
            work.cancel()  # the loop may be closed by the time that it ends
            raise
        if (error := work.exception()) is not None:
            return error
        batch = work.result()
        for index, result in batch.results.items():
            self._settle(jobs[index], result)
        self._on_batch([jobs[index] for index in batch.results], batch, time.monotonic() - started)
        return None

    def _settle(self, job: ScoreJob, outcome: ScoreResult | BaseException) -> None:
        future = self._waiting.pop(job, None)
        if future is None or future.done():
            return  # whoever asked has gone
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
