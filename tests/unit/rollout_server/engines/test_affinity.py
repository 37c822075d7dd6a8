"""Requests go where their prefix is cached, and nowhere else when an engine is lost."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import EngineError, EngineLostError, PublishError
from miniverl_dist.generate_api.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    SamplingParams,
)
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines.affinity import AffinityEngine, PromptRoots, prefix_hashes, ranked

PROMPTS = st.lists(st.integers(0, 300_000), min_size=1, max_size=40).map(tuple)


class ScriptedEngine:
    """Implements ``Engine``: answers at once, or when it is told to."""

    def __init__(self, name: str) -> None:
        self.name, self.weight_version = name, -1
        self.asked: list[tuple[int, ...]] = []
        self.is_lost = self.refuses = self.confuses = self.is_closed = False
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.asked.append(request.input_ids)
        await self.may_answer.wait()
        if self.is_lost:
            raise EngineLostError(f"{self.name} is gone")
        meta = MetaInfo(self.name, FinishReason("length", length=0), len(request.input_ids), 0)
        return GenerateReply(meta)

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        if self.refuses:
            raise PublishError(f"{self.name} refuses")
        self.weight_version = snapshot.policy_version
        return "other" if self.confuses else snapshot.checksum

    async def close(self) -> None:
        self.is_closed = True


def fleet(num_engines: int = 4, **changes: float) -> tuple[AffinityEngine, list[ScriptedEngine]]:
    engines = [ScriptedEngine(f"engine-{index}") for index in range(num_engines)]
    return AffinityEngine(engines, **changes), engines  # type: ignore[arg-type]


async def ask(engine: AffinityEngine, *prompt: int) -> str:
    reply = await engine.generate(GenerateRequest(prompt, SamplingParams(max_new_tokens=1)))
    return reply.meta_info.id


@given(prompt=PROMPTS, others=st.lists(PROMPTS, max_size=5), tail=PROMPTS)
@settings(deadline=None)
def test_hashes_are_equal_where_prefixes_are(
    prompt: tuple[int, ...], others: list[tuple[int, ...]], tail: tuple[int, ...]
) -> None:
    hashes = prefix_hashes(prompt)
    assert (prefix_hashes(prompt + tail)[: len(prompt)] == hashes).all()
    for other in others:
        found = prefix_hashes(other)
        for length in range(1, min(len(prompt), len(other)) + 1):
            same = prompt[:length] == other[:length]
            assert (found[length - 1] == hashes[length - 1]) == same


def test_the_order_of_tokens_counts() -> None:
    assert prefix_hashes((1, 2, 3))[-1] != prefix_hashes((2, 1, 3))[-1]
    assert prefix_hashes((7, 7))[-1] != prefix_hashes((7, 7, 7))[-1]


@given(prompt=PROMPTS, tails=st.lists(PROMPTS, max_size=4))
@settings(deadline=None)
def test_whatever_extends_a_prompt_shares_its_root(
    prompt: tuple[int, ...], tails: list[tuple[int, ...]]
) -> None:
    roots = PromptRoots()
    first = roots.root(prompt)
    text = prompt
    for tail in tails:
        text += tail
        assert roots.root(text) == first
    assert roots.root(prompt) == first


def test_prompts_that_share_only_a_beginning_have_their_own_roots() -> None:
    roots = PromptRoots()
    system = tuple(range(200))
    assert len({roots.root((*system, 1000 + task, 5)) for task in range(50)}) == 50


def test_forgotten_roots_are_forgotten_whole() -> None:
    roots = PromptRoots(max_roots=2)
    first = roots.root((1, 2))
    roots.root((3,))
    assert roots.root((1, 2, 9)) == first
    roots.root((4, 4, 4))  # (3,) was used least recently
    assert roots.root((3, 8)) == (2, int(prefix_hashes((3, 8))[-1]))
    assert roots.root((1, 2, 9)) != first


@given(
    roots=st.lists(st.tuples(st.integers(1, 99), st.integers(0, 2**64 - 1)), max_size=30),
    num_engines=st.integers(2, 8),
    lost=st.integers(0, 7),
)
@settings(deadline=None)
def test_a_lost_engine_moves_its_own_share_only(
    roots: list[tuple[int, int]], num_engines: int, lost: int
) -> None:
    names = [f"engine-{index}" for index in range(num_engines)]
    gone = names[lost % num_engines]
    rest = [name for name in names if name != gone]
    for root in roots:
        before, after = ranked(root, names), ranked(root, rest)
        assert after == [name for name in before if name != gone]
        assert ranked(root, list(reversed(names))) == before


def test_shares_are_even() -> None:
    names = [f"engine-{index}" for index in range(4)]
    shares = Counter(ranked((10, seed), names)[0] for seed in range(4000))
    assert all(850 < shares[name] < 1150 for name in names)


async def test_siblings_and_later_turns_go_to_one_engine() -> None:
    engine, engines = fleet()
    for group in range(12):
        prompt = (1, 2, 3, 100 + group)
        homes = {await ask(engine, *prompt) for _ in range(4)}
        homes |= {await ask(engine, *prompt, 50 + member, 7) for member in range(4)}
        assert len(homes) == 1
    assert sum(bool(each.asked) for each in engines) > 1


async def test_an_engine_with_a_long_queue_is_passed_over() -> None:
    engine, engines = fleet(max_load_ratio=2.0)
    for each in engines:
        each.may_answer.clear()
    siblings = [asyncio.create_task(ask(engine, 1, 2, 3)) for _ in range(40)]
    await asyncio.sleep(0)
    counts = sorted(len(each.asked) for each in engines)
    assert sum(counts) == 40
    assert counts[-1] <= 2 * (40 + 1) / 4
    for each in engines:
        each.may_answer.set()
    await asyncio.gather(*siblings)


async def test_a_request_of_a_lost_engine_is_answered_by_the_next() -> None:
    engine, engines = fleet()
    prompts = [(task, task + 1) for task in range(30)]
    before = [await ask(engine, *prompt) for prompt in prompts]
    lost = next(each for each in engines if each.name == before[0])
    lost.is_lost = True
    after = [await ask(engine, *prompt) for prompt in prompts]
    assert lost.name not in engine.standing
    for was, now in zip(before, after, strict=True):
        assert now != lost.name
        assert was in (now, lost.name)
    # Asked once when it was found out, and never again.
    assert lost.asked.count(prompts[0]) == 2
    assert len(lost.asked) == before.count(lost.name) + 1


async def test_without_engines_the_error_says_so() -> None:
    engine, engines = fleet(2)
    for each in engines:
        each.is_lost = True
    with pytest.raises(EngineLostError, match="engine-0, engine-1"):
        await ask(engine, 1)
    with pytest.raises(EngineError, match="distinct names"):
        AffinityEngine([ScriptedEngine("a"), ScriptedEngine("a")])
    with pytest.raises(EngineError, match="distinct names"):
        AffinityEngine([])


async def test_weights_go_everywhere_and_bring_lost_engines_back() -> None:
    engine, engines = fleet(3)
    assert engine.weight_version == -1
    engines[0].is_lost = True
    while len(engine.standing) == 3:
        await ask(engine, len(engines[1].asked) + len(engines[2].asked))
    engines[0].is_lost = False
    engines[1].refuses = True
    engines[2].confuses = True
    assert await engine.load_weights(WeightSnapshot(4, {}, "sum")) == "sum"
    assert engine.standing == ("engine-0",)
    assert engine.weight_version == 4
    engines[1].refuses = engines[2].confuses = False
    await engine.load_weights(WeightSnapshot(5, {}, "sum"))
    assert len(engine.standing) == 3
    assert engine.weight_version == 5


async def test_weights_that_no_engine_takes_are_an_error() -> None:
    engine, engines = fleet(2)
    for each in engines:
        each.refuses = True
    with pytest.raises(PublishError, match="engine-0 refuses; engine-1 refuses"):
        await engine.load_weights(WeightSnapshot(4, {}, "sum"))
    engines[0].refuses = False
    engines[0].confuses = True
    assert await engine.load_weights(WeightSnapshot(4, {}, "sum")) == "other"
    await engine.close()
    assert all(each.is_closed for each in engines)
