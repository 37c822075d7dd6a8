"""What the engines of this process do alike, beyond the contract: `engines.queued`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest

from miniverl_dist.errors import EngineError, GenerateApiError, PublishError
from miniverl_dist.generate_api.wire import GenerateReply, WeightVersion
from miniverl_dist.ports import WeightSnapshot
from rollout_server.engines.hf import HFEngine
from rollout_server.engines.toy import ToyEngine
from tests.support import tiny_hf, toy_engine
from tests.support.toy import VOCABULARY_IDS, request

AnyEngine = ToyEngine | HFEngine


@dataclass(frozen=True)
class Kind:
    """An engine, its prompts and its weights."""

    make: Callable[..., Awaitable[AnyEngine]]
    """With weights; sizes are those of the engine's config."""
    prompts: Callable[[int, Sequence[int]], list[tuple[int, ...]]]
    """Of a seed, by length."""
    ids: Sequence[int]
    weights: Callable[[], WeightSnapshot]
    name: str


KINDS = {
    "toy": Kind(toy_engine.engine, toy_engine.prompts, VOCABULARY_IDS, toy_engine.weights, "toy-0"),
    "hf": Kind(
        tiny_hf.loaded_engine,
        tiny_hf.hf_prompts,
        tiny_hf.VOCABULARY.ids.tolist(),
        lambda: tiny_hf.snapshot("qwen3"),
        "hf-0",
    ),
}


@pytest.fixture(params=sorted(KINDS))
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = KINDS[request.param]
    return found


async def until_decoded(made: AnyEngine, num_tokens: int) -> None:
    """Let the engine go on until it has decoded that many tokens."""
    async with asyncio.timeout(20):
        while made.counters.num_decoded_tokens < num_tokens:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)


def finish_of(reply: GenerateReply) -> Any:
    assert reply.meta_info.finish_reason is not None
    return reply.meta_info.finish_reason


async def test_a_reply_holds_what_was_asked_for(kind: Kind) -> None:
    made = await kind.make()
    assert (made.name, made.weight_version) == (kind.name, 1)
    [prompt] = kind.prompts(0, [20])
    reply = await made.generate(request(prompt))
    meta = reply.meta_info
    assert len(reply.output_ids) == meta.completion_tokens == 12
    assert set(reply.output_ids) <= set(kind.ids)
    assert meta.prompt_tokens == 20
    assert (finish_of(reply).type, finish_of(reply).length) == ("length", 12)
    assert (meta.weight_version, meta.weight_versions) == ("1", (WeightVersion("1", 0, 12),))
    assert meta.output_token_logprobs is not None
    assert [entry[1] for entry in meta.output_token_logprobs] == list(reply.output_ids)
    assert all(entry[0] is not None and entry[0] < 0 for entry in meta.output_token_logprobs)
    assert meta.e2e_latency is not None
    assert msgspec.json.decode(msgspec.json.encode(reply), type=GenerateReply) == reply
    quiet = msgspec.structs.replace(request(prompt), return_logprob=False, rid="mine")
    meta = (await made.generate(quiet)).meta_info
    assert (meta.output_token_logprobs, meta.id) == (None, "mine")


async def test_a_text_ends_where_the_context_does_and_a_longer_prompt_is_refused(
    kind: Kind,
) -> None:
    made = await kind.make(max_context_tokens=24)
    reply = await made.generate(request(kind.prompts(2, [20])[0], max_new_tokens=100))
    assert (finish_of(reply).type, len(reply.output_ids)) == ("length", 4)
    for length in (0, 24):
        with pytest.raises(GenerateApiError, match=f"prompt of {length} tokens.*1 to 23 tokens"):
            await made.generate(request(kind.prompts(2, [length])[0]))


async def test_a_refusal_says_what_was_wrong(kind: Kind) -> None:
    made = await kind.make()
    [prompt] = kind.prompts(3, [5])
    with pytest.raises(GenerateApiError, match="input_ids: token id 11 at position 1"):
        await made.generate(request([10, 11]))
    with pytest.raises(GenerateApiError, match=r"temperature is -1"):
        await made.generate(request(prompt, temperature=-1.0))
    for field in ("logprob_start_len", "top_logprobs_num"):
        scoring = msgspec.structs.replace(request(prompt), **{field: 2})
        with pytest.raises(GenerateApiError, match="score inputs with a teacher server"):
            await made.generate(scoring)
    assert len((await made.generate(request(prompt))).output_ids) == 12


async def test_the_seed_decides_and_none_is_fresh(kind: Kind) -> None:
    made = await kind.make()
    [prompt] = kind.prompts(5, [10])
    replies = [await made.generate(request(prompt, seed)) for seed in (1, 1, 2, None, None)]
    ids = [reply.output_ids for reply in replies]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


async def test_more_requests_than_slots_are_served_in_order(kind: Kind) -> None:
    made = await kind.make(batch_slots=2)
    ended: list[int] = []

    async def ask(index: int) -> None:
        await made.generate(request(kind.prompts(index, [5])[0], max_new_tokens=6))
        ended.append(index)

    await asyncio.gather(*(ask(index) for index in range(7)))
    assert ended == list(range(7))


async def test_a_cancelled_request_frees_its_slot(kind: Kind) -> None:
    made = await kind.make(batch_slots=1)
    [prompt] = kind.prompts(16, [10])
    wanted = request(prompt, max_new_tokens=100)
    tasks = [asyncio.create_task(made.generate(wanted)) for _ in range(3)]
    await until_decoded(made, 2)
    tasks[0].cancel()  # running
    tasks[1].cancel()  # waiting
    reply = await tasks[2]
    assert [task.cancelled() for task in tasks] == [True, True, False]
    # Neither was decoded any further: some tokens of the first, 99 of the third.
    assert made.counters.num_decoded_tokens < 120
    alone = await (await kind.make(batch_slots=1)).generate(wanted)
    assert len(reply.output_ids) == 100
    assert reply.output_ids == alone.output_ids


async def test_closing_aborts_what_runs_and_what_waits(kind: Kind) -> None:
    made = await kind.make(batch_slots=1)
    [prompt] = kind.prompts(17, [10])
    tasks = [
        asyncio.create_task(made.generate(request(prompt, max_new_tokens=100))) for _ in range(2)
    ]
    await until_decoded(made, 3)
    await made.close()
    replies = await asyncio.gather(*tasks)
    assert [finish_of(reply).type for reply in replies] == ["abort", "abort"]
    assert 0 < len(replies[0].output_ids) < 100
    assert (replies[1].output_ids, replies[1].meta_info.weight_versions) == ((), ())
    await made.close()
    with pytest.raises(EngineError, match="is closed"):
        await made.generate(request(prompt))
    with pytest.raises(PublishError, match="is closed"):
        await made.load_weights(kind.weights())
