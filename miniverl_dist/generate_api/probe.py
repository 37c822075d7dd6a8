"""Score a short text twice: does an engine answer with the weights that it says it holds?

A prefix cache that survives a weight update gives the old weights' logprobs under the new version's
name, and no field of the reply tells. A key that nobody has used before shuts the cache out, so a
score under such a key is the truth, and one without it has to agree.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import ConfigError
from miniverl_dist.generate_api.client import GenerateClient

Scores = NDArray[np.float64]


class StaleKind(StrEnum):
    """What a probe has found."""

    UNSTABLE = "unstable"
    """The same text under the same weights has two scores."""
    PREFIX_CACHE = "prefix_cache"
    """With the prefix cache the scores are not those of the weights."""
    SERVERS_DIFFER = "servers_differ"
    """Two servers of one model score the same text differently."""
    OLD_WEIGHTS = "old_weights"
    """The weights should have changed, and every score is what it was before."""


@dataclass(frozen=True)
class StaleScore:
    """Two scores that contradict what the engine claims."""

    kind: StaleKind
    url: str
    difference: float
    """Nats; the largest over the probe's tokens."""
    tolerance: float
    """Nats."""

    def __str__(self) -> str:
        """One sentence for an event or an error."""
        return f"{self.url}: {_WHAT[self.kind]} ({self._figures()})"

    def _figures(self) -> str:
        return f"largest difference {self.difference:.3g} nats, tolerated {self.tolerance:.3g}"


_WHAT = {
    StaleKind.UNSTABLE: "the same text scored twice under the same weights has two scores; "
    "is the server one model, and nobody updating it?",
    StaleKind.SERVERS_DIFFER: "scores are not those of the first server; all URLs of a teacher "
    "must serve one model",
    StaleKind.PREFIX_CACHE: "scores with the prefix cache are not those of the loaded weights; "
    "flush the cache at a publish, or send an extra_key per policy version",
    StaleKind.OLD_WEIGHTS: "all scores are those of the former weights; the update loaded nothing",
}


@dataclass(frozen=True)
class ProbeText:
    """A short text in the engine's tokens; ``[start:]`` is scored, what lies before is cacheable.

    Engines reuse whole pages of a prefix only, so it should not be too short (64 tokens will do).
    """

    token_ids: tuple[int, ...]
    start: int

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.token_ids):
            raise ConfigError(
                f"a probe of {len(self.token_ids)} tokens scores from token {self.start}, expected "
                f"1 to {len(self.token_ids) - 1}"
            )


class ScoreProbe:
    """Probes one server.

    Args:
        client: of one server; see ``GenerateClient.only``.
        text: scored by every question.
        tolerance: nats; two scores of a token this close are equal (rounding differs with the
            batch a prefill happens to be in).
        deadline_s: for one question, retries included.
    """

    def __init__(
        self, client: GenerateClient, text: ProbeText, *, tolerance: float, deadline_s: float
    ) -> None:
        self._client = client
        self._text = text
        self._tolerance = tolerance
        self._deadline_s = deadline_s

    async def score(self, *, extra_key: str | None = None) -> Scores:
        """[tokens scored] nats; raises what the client and the checks of a reply raise."""
        return await self._client.score(
            self._text.token_ids,
            self._text.start,
            extra_key=extra_key,
            deadline_s=self._deadline_s,
        )

    def compare(self, kind: StaleKind, first: Scores, second: Scores) -> StaleScore | None:
        """The problem, of this kind, where two scores of the text differ."""
        difference = float(np.max(np.abs(first - second)))
        return self._problem(kind, difference) if difference > self._tolerance else None

    async def check_published(
        self, before: Scores, *, extra_key: str | None = None, expects_change: bool = False
    ) -> StaleScore | None:
        """Ask after a publish, as requests do and under a key of its own.

        Args:
            before: what ``score`` gave before the publish; it has also filled the prefix cache.
            extra_key: what requests send now: ``version_key``, or None where the cache is flushed.
            expects_change: the weights must have moved (a learning rate above 0).
        """
        fresh = await self.score(extra_key=f"probe-{uuid.uuid4().hex}")
        usual = await self.score(extra_key=extra_key)
        stale = self.compare(StaleKind.PREFIX_CACHE, usual, fresh)
        if stale is None and expects_change and np.array_equal(before, fresh):
            return self._problem(StaleKind.OLD_WEIGHTS, 0.0)
        return stale

    def _problem(self, kind: StaleKind, difference: float) -> StaleScore:
        return StaleScore(kind, self._client.base_url, difference, self._tolerance)


async def check_frozen(
    client: GenerateClient, text: ProbeText, *, tolerance: float, deadline_s: float
) -> StaleScore | None:
    """Weights that stay: every server scores the text twice, the second time from its prefix cache.

    Args:
        client: of one server or several of one model.
        text: scored by every question.
        tolerance: nats, as in ``ScoreProbe``.
        deadline_s: for one question.
    """
    expected: Scores | None = None
    for endpoint in client.endpoints:
        probe = ScoreProbe(client.only(endpoint), text, tolerance=tolerance, deadline_s=deadline_s)
        first, second = await probe.score(), await probe.score()
        expected = first if expected is None else expected
        problem = probe.compare(StaleKind.UNSTABLE, first, second) or probe.compare(
            StaleKind.SERVERS_DIFFER, expected, first
        )
        if problem is not None:
            return problem
    return None


def probe_text(token_ids: Sequence[int]) -> ProbeText:
    """Score the second half."""
    return ProbeText(tuple(token_ids), len(token_ids) // 2)
