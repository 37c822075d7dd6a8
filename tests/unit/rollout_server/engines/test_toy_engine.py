"""The toy engine: the contract, batch invariance, prefix reuse, weights and endings."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.generate_api.wire import (
    GenerateRequest,
    SamplingParams,
)
from miniverl_dist.schemas.batch import TrainBatch
from rollout_server.engines.toy import ToyEngine
from tests.support.toy import (
    VOCABULARY_IDS,
    random_batch,
    request,
    tiny_backend,
    tiny_config,
)
from tests.support.toy_engine import engine, prompts, sampled, weights

ROOT = Path(__file__).resolve().parents[4]


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


async def test_other_tasks_run_while_it_decodes() -> None:
    made = await engine()
    turns = 0
    task = asyncio.create_task(made.generate(request(prompts(11, [5])[0], max_new_tokens=50)))
    while not task.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 50


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
