"""Scores of what a running episode has written so far, so that the last call is short.

    turn ends -> its text so far, in the teacher's tokens -> the spans not scored yet -> kept
    episode ends -> what is kept, if its tokens are those of the trajectory -> one call for the rest

A server reuses a text's prefix only up to the first score that is asked for. So a call which has
all spans scored at the end computes all of them then, whatever was sent before; one that asks for
the last turn alone finds everything before it in the server's cache. This is why scores are kept,
and not only caches warmed.

A score at a position depends on the tokens up to it and on nothing else: kept scores are used where
these are the same, and thrown away where they are not.

Shapes: P tokens of a text.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import MiniverlError
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.schemas.running_episode import RunningEpisode
from teacher_server.rendering import RenderedSpan, TeacherRendering


@dataclass(frozen=True, eq=False)
class ScoredPrefix:
    """The beginning of a text with the scores that were asked for."""

    token_ids: tuple[int, ...]
    logprobs: NDArray[np.float64]
    """[P] nats; NaN where no score was asked for."""

    def fits(self, token_ids: Sequence[int]) -> bool:
        """Whether a text begins with this one, or this one with the text."""
        size = min(len(self.token_ids), len(token_ids))
        return tuple(token_ids[:size]) == self.token_ids[:size]


class KeptScores(Protocol):
    """Where a teacher finds what was scored while an episode ran."""

    def take(self, trajectory_id: str) -> ScoredPrefix | None:
        """What is kept for a finished episode; it is handed out once."""


class PrefixScores:
    """Implements `KeptScores` for episodes that were played elsewhere."""

    def __init__(self) -> None:
        self._kept: dict[str, ScoredPrefix] = {}
        self.counts: Counter[str] = Counter()
        """``taken`` episodes, and ``taken_tokens`` with a score."""

    def keep(self, trajectory_id: str, scored: ScoredPrefix) -> None:
        """Keep scores until they are taken."""
        self._kept[trajectory_id] = scored

    def take(self, trajectory_id: str) -> ScoredPrefix | None:
        """See `KeptScores`."""
        scored = self._kept.pop(trajectory_id, None)
        if scored is not None:
            self.counts["taken"] += 1
            self.counts["taken_tokens"] += int(np.isfinite(scored.logprobs).sum())
        return scored


def with_known(token_ids: Sequence[int], scored: ScoredPrefix | None) -> NDArray[np.float64]:
    """[P] nats of a text as far as they are known, NaN elsewhere."""
    logprobs = np.full(len(token_ids), np.nan)
    if scored is not None and scored.fits(token_ids):
        size = min(len(scored.token_ids), len(token_ids))
        logprobs[:size] = scored.logprobs[:size]
    return logprobs


def first_unknown(spans: Sequence[RenderedSpan], logprobs: NDArray[np.float64]) -> int | None:
    """The first token of the spans without a score; None where all have one."""
    for span in spans:
        unknown = np.flatnonzero(np.isnan(logprobs[span.start : span.end]))
        if len(unknown):
            return span.start + int(unknown[0])
    return None


@dataclass(eq=False)
class _Followed:
    """One running episode."""

    newest: RunningEpisode | None = None
    """Waits for the call before it."""
    scored: ScoredPrefix | None = None
    task: asyncio.Task[None] | None = None


class PrefixScorer:
    """Follows running episodes; implements `rollout_server.episode.EpisodeWatcher`.

    Nothing here waits for a server, and nothing that a server does changes an episode: a call that
    fails is counted, and its spans are asked for again with those of the next turn, or at the end.

    Args:
        client: Of its own, beside the one of final scores, with a smaller cap on tokens in flight
            and without retries: under load these calls are the first to be left out.
        renderer: An episode in the teacher's tokens; called in a thread.
        max_prefill_tokens: Longer texts are not sent.
    """

    def __init__(
        self,
        client: GenerateClient,
        renderer: Callable[[RunningEpisode], TeacherRendering],
        *,
        max_prefill_tokens: int,
    ) -> None:
        self._client, self._renderer = client, renderer
        self._max_prefill_tokens = max_prefill_tokens
        self._followed: dict[str, _Followed] = {}
        self._kept = PrefixScores()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefix-scoring")
        self.counts = self._kept.counts
        """As well: ``calls``, ``superseded`` texts, ``too_long`` ones, ``cancelled`` calls, and
        failures by their class."""

    @property
    def num_running(self) -> int:
        """Episodes of which a text is being rendered or scored."""
        return len(self._tasks)

    def turn(self, episode: RunningEpisode) -> None:
        """Have the text so far scored, after the call at work; a newer text takes its place."""
        followed = self._followed.setdefault(episode.trajectory_id, _Followed())
        if followed.newest is not None:
            self.counts["superseded"] += 1
        followed.newest = episode
        if followed.task is None:
            followed.task = asyncio.get_running_loop().create_task(self._follow(followed))
            self._tasks.add(followed.task)
            followed.task.add_done_callback(self._tasks.discard)

    def end(self, trajectory_id: str, *, will_be_scored: bool) -> None:
        """Stop following an episode; its scores wait to be taken if it will be scored."""
        followed = self._followed.pop(trajectory_id, None)
        if followed is None:
            return
        if followed.task is not None:
            self.counts["cancelled"] += 1
            followed.task.cancel()
        if will_be_scored and followed.scored is not None:
            self._kept.keep(trajectory_id, followed.scored)

    def take(self, trajectory_id: str) -> ScoredPrefix | None:
        """See `KeptScores`."""
        return self._kept.take(trajectory_id)

    async def close(self) -> None:
        """Stop following all episodes and close the client."""
        for task in self._tasks:
            task.cancel()
        # Each ends at its next await.
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._followed.clear()
        self._thread.shutdown(wait=False, cancel_futures=True)
        await self._client.close()

    async def _follow(self, followed: _Followed) -> None:
        """One call after the other, until the newest text has been sent."""
        while (episode := followed.newest) is not None:
            followed.newest = None
            try:
                await self._score(episode, followed)
            except MiniverlError as error:
                self.counts[type(error).__name__] += 1
        followed.task = None

    async def _score(self, episode: RunningEpisode, followed: _Followed) -> None:
        # Waits for the renderings before it in the thread; `end` cancels it.
        rendering = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._renderer, episode
        )
        text = rendering.token_ids
        if len(text) > self._max_prefill_tokens:
            self.counts["too_long"] += 1
            return
        logprobs = with_known(text, followed.scored)
        start = first_unknown(rendering.spans, logprobs)
        if start is None:
            return
        self.counts["calls"] += 1
        # Waits for its share of tokens in flight and for the server; both within the client's
        # deadline, and `end` cancels it.
        logprobs[start:] = await self._client.score(text, start, key=episode.group_id)
        followed.scored = ScoredPrefix(text, logprobs)
