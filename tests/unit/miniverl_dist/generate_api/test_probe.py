"""The score-twice probe, against engines whose prefix cache is sound, stale, or keyed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from miniverl_dist.errors import ConfigError
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.probe import (
    ProbeText,
    ScoreProbe,
    StaleKind,
    StaleScore,
    check_frozen,
    probe_text,
)
from miniverl_dist.generate_api.wire import version_key
from tests.support.http_faults import Act, FakeClock, reply, scripted_server

TEXT = ProbeText(tuple(range(10, 26)), 8)


@dataclass
class CachingEngine:
    """Values depend on weights and prefix; the prefix's share is cached by ``extra_key``."""

    weight: float = 1.0
    noise: float = 0.0
    cache: dict[tuple[str | None, tuple[int, ...]], float] = field(default_factory=dict)
    keys: list[str | None] = field(default_factory=list)

    def __call__(self, body: dict[str, Any]) -> Act:
        ids, start = body["input_ids"], body["logprob_start_len"]
        key = body.get("extra_key")
        self.keys.append(key)
        prefix = self.cache.setdefault((key, tuple(ids[:start])), self.weight * sum(ids[:start]))
        self.weight += self.noise
        scores = [-(prefix + self.weight * ids[i]) / 1000 for i in range(start + 1, len(ids))]
        entries = [[None, ids[start]], *zip(scores, ids[start + 1 :], strict=True)]
        meta = {
            "id": "x",
            "finish_reason": {"type": "length", "length": 0},
            "prompt_tokens": len(ids),
            "completion_tokens": 0,
            "input_token_logprobs": [[*entry, None] for entry in entries],
        }
        return reply(body={"text": "", "output_ids": [], "meta_info": meta})


@asynccontextmanager
async def probing(engine: CachingEngine, tolerance: float = 1e-4) -> AsyncIterator[ScoreProbe]:
    async with (
        scripted_server(engine) as server,
        GenerateClient(server.url, clock=FakeClock()) as client,
    ):
        yield ScoreProbe(client, TEXT, tolerance=tolerance, deadline_s=5)


async def after_publish(
    engine: CachingEngine, *, flush: bool, key: str | None, weight: float = 1.5
) -> StaleScore | None:
    async with probing(engine) as probe:
        before = await probe.score()
        engine.weight = weight
        if flush:
            engine.cache.clear()
        return await probe.check_published(before, extra_key=key, expects_change=True)


async def test_peer_34_a_prefix_cache_that_survives_a_publish_is_found() -> None:
    found = await after_publish(CachingEngine(), flush=False, key=None)
    assert isinstance(found, StaleScore)
    assert found.kind is StaleKind.PREFIX_CACHE
    # The prefix of 7 tokens: 10 to 16, times half a weight, in thousandths.
    assert found.difference == pytest.approx(sum(range(10, 17)) * 0.5 / 1000)
    assert "flush the cache at a publish" in str(found)
    assert "0.0455 nats" in str(found)
    assert found.url in str(found)


@pytest.mark.parametrize(("flush", "key"), [(True, None), (False, version_key(7))])
async def test_a_flush_or_a_key_per_version_is_sound(flush: bool, key: str | None) -> None:
    engine = CachingEngine()
    assert await after_publish(engine, flush=flush, key=key) is None
    assert engine.keys[0] is None
    assert engine.keys[1] is not None
    assert engine.keys[1].startswith("probe-")
    assert engine.keys[2] == key


async def test_weights_that_have_not_changed_are_found_where_they_should_have() -> None:
    found = await after_publish(CachingEngine(), flush=True, key=None, weight=1.0)
    assert isinstance(found, StaleScore)
    assert found.kind is StaleKind.OLD_WEIGHTS
    assert "loaded nothing" in str(found)
    engine = CachingEngine()
    async with probing(engine) as probe:
        assert await probe.check_published(await probe.score()) is None


async def test_every_probe_uses_a_key_of_its_own() -> None:
    engine = CachingEngine()
    async with probing(engine) as probe:
        before = await probe.score()
        for _ in range(3):
            await probe.check_published(before)
    fresh = [key for key in engine.keys if key is not None]
    assert len(set(fresh)) == len(fresh) == 3


@pytest.mark.parametrize(("noise", "kind"), [(0.0, None), (0.5, StaleKind.UNSTABLE)])
async def test_frozen_weights_give_the_same_score_twice(
    noise: float, kind: StaleKind | None
) -> None:
    engine = CachingEngine(noise=noise)
    async with (
        scripted_server(engine) as server,
        GenerateClient(server.url, clock=FakeClock()) as client,
    ):
        found = await check_frozen(client, TEXT, tolerance=1e-3, deadline_s=5)
        assert (found and found.kind) == kind
        # Rounding within the tolerance is no difference.
        assert await check_frozen(client, TEXT, tolerance=1.0, deadline_s=5) is None


async def test_servers_of_one_teacher_must_serve_one_model() -> None:
    async with (
        scripted_server(CachingEngine()) as first,
        scripted_server(CachingEngine()) as same,
        scripted_server(CachingEngine(weight=2.0)) as other,
    ):
        async with GenerateClient((first.url, same.url), clock=FakeClock()) as client:
            assert await check_frozen(client, TEXT, tolerance=1e-3, deadline_s=5) is None
        urls = (first.url, same.url, other.url)
        async with GenerateClient(urls, clock=FakeClock()) as client:
            found = await check_frozen(client, TEXT, tolerance=1e-3, deadline_s=5)
        assert isinstance(found, StaleScore)
        assert found.kind is StaleKind.SERVERS_DIFFER
        assert found.url == other.url
        assert [len(server.received) for server in (first, same, other)] == [4, 4, 2]


async def test_scores_are_of_the_second_part() -> None:
    async with probing(CachingEngine()) as probe:
        scores = await probe.score()
    expected = [-(sum(range(10, 17)) + token) / 1000 for token in TEXT.token_ids[8:]]
    np.testing.assert_allclose(scores, expected)


@pytest.mark.parametrize("start", [0, 16, 17])
def test_a_probe_needs_context_and_something_to_score(start: int) -> None:
    with pytest.raises(ConfigError, match="expected 1 to 15"):
        ProbeText(TEXT.token_ids, start)
    assert probe_text(range(9)) == ProbeText(tuple(range(9)), 4)
