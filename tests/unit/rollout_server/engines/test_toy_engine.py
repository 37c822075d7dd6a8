"""The toy engine: the contract, batch invariance, prefix reuse, weights and endings."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.errors import EngineError, GenerateApiError
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    GenerateRequest,
    SamplingParams,
    WeightVersion,
)
from miniverl_dist.schemas.batch import TrainBatch
from rollout_server.engines.base import Engine
from rollout_server.engines.toy import ToyEngine
from tests.support.toy import (
    VOCABULARY_IDS,
    random_batch,
    request,
    tiny_backend,
    tiny_config,
)
from tests.support.toy_engine import engine, prompts, sampled, steps, weights

ROOT = Path(__file__).resolve().parents[4]


async def test_a_reply_holds_what_the_contract_says() -> None:
    made: Engine = await engine()
    assert (made.name, made.weight_version) == ("toy-0", 1)
    [prompt] = prompts(0, [20])
    reply = await made.generate(request(prompt))
    meta = reply.meta_info
    assert len(reply.output_ids) == meta.completion_tokens == 12
    assert set(reply.output_ids) <= set(VOCABULARY_IDS)
    assert meta.prompt_tokens == 20
    assert meta.finish_reason is not None
    assert (meta.finish_reason.type, meta.finish_reason.length) == ("length", 12)
    assert (meta.weight_version, meta.weight_versions) == ("1", (WeightVersion("1", 0, 12),))
    assert meta.output_token_logprobs is not None
    assert [entry[1] for entry in meta.output_token_logprobs] == list(reply.output_ids)
    assert all(entry[0] is not None and entry[0] < 0 for entry in meta.output_token_logprobs)
    assert meta.e2e_latency is not None
    assert msgspec.json.decode(msgspec.json.encode(reply), type=GenerateReply) == reply
    quiet = msgspec.structs.replace(request(prompt), return_logprob=False, rid="mine")
    reply = await made.generate(quiet)
    assert (reply.meta_info.output_token_logprobs, reply.meta_info.id) == (None, "mine")


async def test_a_stop_token_ends_the_reply_and_stays_in_it() -> None:
    made = await engine()
    [prompt] = prompts(1, [10])
    free = await made.generate(request(prompt, 3))
    stop = free.output_ids[5]
    first = free.output_ids.index(stop)
    # An id that the model cannot sample may stand among the stops.
    reply = await made.generate(request(prompt, 3, stop=(stop, 999_999)))
    assert reply.output_ids == free.output_ids[: first + 1]
    assert reply.meta_info.finish_reason is not None
    assert reply.meta_info.finish_reason.type == "stop"
    assert reply.meta_info.finish_reason.matched == stop
    assert reply.meta_info.output_token_logprobs is not None
    assert len(reply.meta_info.output_token_logprobs) == first + 1


async def test_generation_ends_where_the_context_does() -> None:
    made = await engine(max_context_tokens=24)
    reply = await made.generate(request(prompts(2, [20])[0], max_new_tokens=100))
    assert reply.meta_info.finish_reason is not None
    assert reply.meta_info.finish_reason.type == "length"
    assert len(reply.output_ids) == 4
    for length in (0, 24):
        with pytest.raises(GenerateApiError, match=f"prompt of {length} tokens.*1 to 23 tokens"):
            await made.generate(request(prompts(2, [length])[0]))


async def test_requests_it_cannot_serve_are_refused() -> None:
    made = await engine()
    [prompt] = prompts(3, [5])
    with pytest.raises(GenerateApiError, match="input_ids: token id 11 at position 1"):
        await made.generate(request([10, 11]))
    with pytest.raises(GenerateApiError, match=r"temperature is -1"):
        await made.generate(request(prompt, temperature=-1.0))
    for field in ("logprob_start_len", "top_logprobs_num"):
        scoring = msgspec.structs.replace(request(prompt), **{field: 2})
        with pytest.raises(GenerateApiError, match="score inputs with a teacher server"):
            await made.generate(scoring)


@settings(deadline=None, max_examples=10)
@given(seed=st.integers(0, 2**32 - 1), slots=st.integers(1, 6), turns=st.integers(1, 2))
def test_an_episode_is_the_same_alone_and_in_company(seed: int, slots: int, turns: int) -> None:
    """Groups of siblings in any order, more than there are slots, over one or two turns."""
    rng = np.random.default_rng(seed)
    groups = prompts(seed, rng.integers(1, 70, 3).tolist())
    tails = prompts(seed + 1, [4] * 9)
    # Every engine has the same slots: they are part of the shape that makes the bits.
    episodes = [(groups[i // 3], tails[i], int(rng.integers(2**31))) for i in range(9)]

    async def play(made: ToyEngine, index: int) -> list[tuple[object, ...]]:
        prompt, tail, episode_seed = episodes[index]
        replies = []
        for turn in range(turns):
            reply = await made.generate(
                request(prompt, episode_seed + turn, temperature=0.8, max_new_tokens=9)
            )
            replies.append(sampled(reply))
            prompt = (*prompt, *reply.output_ids, *tail)
        return replies

    async def compare() -> None:
        together, alone = await engine(batch_slots=slots), await engine(batch_slots=slots)
        order = rng.permutation(9).tolist()
        found = await asyncio.gather(*(play(together, index) for index in order))
        for index, replies in zip(order, found, strict=True):
            if index % 4 == 0:
                assert await play(alone, index) == replies

    asyncio.run(compare())


async def test_the_seed_decides_and_none_is_fresh() -> None:
    made = await engine()
    [prompt] = prompts(5, [10])
    replies = [await made.generate(request(prompt, seed)) for seed in (1, 1, 2, None, None)]
    ids = [reply.output_ids for reply in replies]
    assert ids[0] == ids[1]
    assert len(set(ids)) == 4


async def test_greedy_decoding_follows_the_training_forward() -> None:
    made = await engine()
    [prompt] = prompts(6, [10])
    reply = await made.generate(request(prompt, temperature=0.0))
    model = ToyModel(tiny_config(), VOCABULARY_IDS)
    model.load_arrays(weights().tensors)
    sequence = list(prompt)
    for token in reply.output_ids:
        with torch.no_grad():
            hidden = model.hidden(torch.from_numpy(model.vocabulary.rows(sequence))[None])
        best = int((hidden[0, -1] @ model.head.T).argmax())
        assert token == VOCABULARY_IDS[best]
        sequence.append(token)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_logprobs_equal_the_trainers(temperature: float) -> None:
    backend, made = tiny_backend(), ToyEngine(tiny_config(), VOCABULARY_IDS)
    backend.load_weights(weights().tensors)
    await made.load_weights(backend.snapshot())
    texts = prompts(7, [3, 40, 70])
    replies = await asyncio.gather(
        *(made.generate(request(text, i, temperature=temperature)) for i, text in enumerate(texts))
    )
    lengths = [len(text) + 12 for text in texts]
    mask = np.concatenate([np.arange(n) >= n - 12 for n in lengths])
    rollout = np.full(len(mask), np.nan)
    rollout[mask] = [entry[0] for r in replies for entry in r.meta_info.output_token_logprobs or ()]
    batch = TrainBatch(
        token_ids=np.concatenate(
            [[*t, *r.output_ids] for t, r in zip(texts, replies, strict=True)]
        ),
        sequence_starts=np.concatenate([[0], np.cumsum(lengths)]),
        loss_mask=mask,
        advantages=np.zeros(len(mask)),
        rollout_logprobs=rollout,
        group_ids=("a", "b", "c"),
        minibatch_ids=np.zeros(3, dtype=np.int64),
        num_loss_tokens=(36,),
        num_sequences=(3,),
        policy_version=0,
        temperature=temperature,
    )
    np.testing.assert_allclose(backend.logprobs(batch)[mask], rollout[mask], atol=1e-4)


async def test_a_groups_prompt_is_computed_once() -> None:
    made = await engine()
    [prompt] = prompts(8, [50])
    replies = await asyncio.gather(*(made.generate(request(prompt, s)) for s in range(6)))
    # Each sibling feeds the last prompt token itself: it makes the logits of its first draw.
    assert made.counters.num_prefilled_tokens == 50 + 5
    assert made.counters.num_decoded_tokens == 6 * 11
    assert sorted(r.meta_info.cached_tokens for r in replies) == [0] + [49] * 5


async def test_a_later_turn_computes_only_what_is_new() -> None:
    made = await engine()
    [prompt, tail] = prompts(9, [30, 4])
    first = await made.generate(request(prompt))
    before = made.counters.num_prefilled_tokens
    second = await made.generate(request((*prompt, *first.output_ids, *tail)))
    # 30 prompt and 11 fed output tokens are cached; the twelfth was sampled but never fed.
    assert second.meta_info.cached_tokens == 41
    assert made.counters.num_prefilled_tokens - before == 5


async def test_a_cache_outlives_its_request_until_its_slot_is_needed() -> None:
    made = await engine(batch_slots=2)
    a, b, c = prompts(10, [20, 20, 20])
    for text in (a, b):
        await made.generate(request(text))
    again = await made.generate(request(a))
    assert again.meta_info.cached_tokens == 19
    await made.generate(request(c))
    await made.generate(request(c, 1))
    gone = await made.generate(request(b))
    assert gone.meta_info.cached_tokens == 0


async def test_more_requests_than_slots_are_served_in_order() -> None:
    made = await engine(batch_slots=2)
    ended: list[int] = []

    async def ask(index: int) -> None:
        await made.generate(request(prompts(index, [5])[0], max_new_tokens=6))
        ended.append(index)

    await asyncio.gather(*(ask(index) for index in range(7)))
    assert ended == list(range(7))


async def test_other_tasks_run_while_it_decodes() -> None:
    made = await engine()
    turns = 0
    task = asyncio.create_task(made.generate(request(prompts(11, [5])[0], max_new_tokens=50)))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 50


async def test_a_cancelled_request_frees_its_slot() -> None:
    made = await engine(batch_slots=1)
    [prompt] = prompts(16, [10])
    tasks = [
        asyncio.create_task(made.generate(request(prompt, max_new_tokens=100))) for _ in range(3)
    ]
    await steps(made, 3)
    tasks[0].cancel()  # running
    tasks[1].cancel()  # waiting
    reply = await tasks[2]
    assert len(reply.output_ids) == 100
    assert tasks[0].cancelled()
    assert tasks[1].cancelled()
    # Neither was decoded any further: 2 tokens of the first, 99 of the third.
    assert made.counters.num_decoded_tokens < 105


async def test_closing_aborts_what_runs_and_what_waits() -> None:
    made = await engine(batch_slots=1)
    [prompt] = prompts(17, [10])
    tasks = [
        asyncio.create_task(made.generate(request(prompt, max_new_tokens=100))) for _ in range(2)
    ]
    await steps(made, 4)
    await made.close()
    replies = await asyncio.gather(*tasks)
    for reply in replies:
        assert reply.meta_info.finish_reason is not None
        assert reply.meta_info.finish_reason.type == "abort"
    assert 0 < len(replies[0].output_ids) < 100
    assert replies[1].output_ids == replies[1].meta_info.weight_versions == ()
    await made.close()
    with pytest.raises(EngineError, match="is closed"):
        await made.generate(request(prompt))


async def test_sampling_parameters_reach_the_sampler() -> None:
    made = await engine()
    [prompt] = prompts(20, [10])
    greedy = await made.generate(request(prompt, temperature=0.0))
    params = SamplingParams(top_k=1, max_new_tokens=12, sampling_seed=4)
    first = await made.generate(GenerateRequest(prompt, params, return_logprob=True))
    assert sampled(first) == sampled(greedy)


async def train_and_sample() -> str:
    """A digest of weights after three updates and of what they sample."""
    backend, made = tiny_backend(), ToyEngine(tiny_config(), VOCABULARY_IDS)
    for seed in range(3):
        backend.update(random_batch(seed, num_minibatches=2))
    await made.load_weights(backend.snapshot())
    prompt = VOCABULARY_IDS[:20]
    replies = await asyncio.gather(*(made.generate(request(prompt, s)) for s in range(9)))
    return repr([backend.snapshot().checksum, *map(sampled, replies)])


def test_another_process_gives_the_same_bits_and_does_not_import_dynamo() -> None:
    script = (
        "import asyncio, importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('this_test', {__file__!r})\n"
        "sys.modules['this_test'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
        "print(asyncio.run(module.train_and_sample()))\n"
        "print([name for name in sys.modules if name.startswith('torch._dynamo')])\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"PYTHONHASHSEED": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    digest, dynamo = result.stdout.splitlines()
    assert digest == asyncio.run(train_and_sample())
    assert dynamo == "[]"
