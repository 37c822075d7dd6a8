"""The transformers engine: the contract, exactness in company, prefix reuse, endings."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers import MambaConfig, Qwen3_5MoeConfig, Qwen3Config

from miniverl_dist.backends.vocabulary import FullVocabulary
from miniverl_dist.errors import ConfigError, GenerateApiError
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.hf import HFEngine
from tests.support.tiny_hf import (
    ARCHITECTURES,
    VOCABULARY,
    check_reply,
    decoded,
    hf_engine,
    hf_prompts,
    loaded_engine,
    model_folder,
    plain_model,
    snapshot,
)
from tests.support.toy import request

each_architecture = pytest.mark.parametrize("architecture", ARCHITECTURES)


async def ask(made: HFEngine, wanted: GenerateRequest, delay_s: float = 0.0) -> GenerateReply:
    await asyncio.sleep(delay_s)
    return await made.generate(wanted)


@each_architecture
async def test_one_request_alone_equals_a_plain_forward_pass(architecture: str) -> None:
    made = await loaded_engine(architecture)
    for seed, length in enumerate((1, 2, 3, 70)):
        wanted = request(hf_prompts(seed, [length])[0], seed, max_new_tokens=20)
        check_reply(plain_model(architecture), wanted, await made.generate(wanted))


@each_architecture
async def test_requests_of_any_length_join_and_leave_without_a_trace(architecture: str) -> None:
    """Uneven prompts, budgets and temperatures; more than there are slots; in the middle, too."""
    made = await loaded_engine(architecture)
    prompts = hf_prompts(1, [1, 60, 7, 33, 2, 90, 15, 4])
    temperatures = (1.0, 0.7, 0.0, 1.3)
    asked = [
        request(text, i, temperature=temperatures[i % 4], max_new_tokens=5 + 7 * (i % 3))
        for i, text in enumerate(prompts)
    ]
    replies = await asyncio.gather(*(ask(made, each, 0.01 * i) for i, each in enumerate(asked)))
    for wanted, reply in zip(asked, replies, strict=True):
        check_reply(plain_model(architecture), wanted, reply)


@settings(deadline=None, max_examples=12)
@given(
    architecture=st.sampled_from(ARCHITECTURES),
    seed=st.integers(0, 2**32 - 1),
    slots=st.integers(1, 5),
)
def test_groups_turns_and_cancellations_in_any_order(
    architecture: str, seed: int, slots: int
) -> None:
    rng = np.random.default_rng(seed)
    groups = hf_prompts(seed, rng.integers(1, 60, 3).tolist())
    tails = hf_prompts(seed + 1, rng.integers(1, 5, 8).tolist())

    async def play(made: HFEngine, index: int) -> None:
        prompt = groups[index % 3]
        await asyncio.sleep(rng.uniform(0, 0.03))
        for turn in range(2):
            wanted = request(prompt, seed + 10 * index + turn, max_new_tokens=9)
            try:
                reply = await asyncio.wait_for(
                    made.generate(wanted), 0.02 if index % 4 == 3 else None
                )
            except TimeoutError:
                return
            check_reply(plain_model(architecture), wanted, reply)
            prompt = (*prompt, *reply.output_ids, *tails[index])

    async def compare() -> None:
        made = await loaded_engine(architecture, batch_slots=slots)
        await asyncio.gather(*(play(made, index) for index in range(8)))
        await made.close()

    asyncio.run(compare())


@each_architecture
async def test_a_groups_prompt_is_computed_once(architecture: str) -> None:
    made = await loaded_engine(architecture)
    [prompt] = hf_prompts(2, [50])
    asked = [request(prompt, seed) for seed in range(6)]
    replies = await asyncio.gather(*(made.generate(each) for each in asked))
    assert made.counters.num_prefilled_tokens == 50
    assert made.counters.num_decoded_tokens == 6 * 11
    assert sorted(r.meta_info.cached_tokens for r in replies) == [0] + [50] * 5
    assert len({r.output_ids for r in replies}) == 6
    for wanted, reply in zip(asked, replies, strict=True):
        check_reply(plain_model(architecture), wanted, reply)


@each_architecture
async def test_a_later_turn_computes_only_what_is_new(architecture: str) -> None:
    made = await loaded_engine(architecture)
    prompts = hf_prompts(3, [30, 17])
    tails = hf_prompts(4, [4, 1])
    firsts = await asyncio.gather(*(made.generate(request(p, 1)) for p in prompts))
    before = made.counters.num_prefilled_tokens
    asked = [
        request((*prompt, *first.output_ids, *tail), 2)
        for prompt, first, tail in zip(prompts, firsts, tails, strict=True)
    ]
    seconds = await asyncio.gather(*(made.generate(each) for each in asked))
    # The twelfth token of each first turn was sampled but never fed.
    assert [r.meta_info.cached_tokens for r in seconds] == [41, 28]
    assert made.counters.num_prefilled_tokens - before == 5 + 2
    for wanted, reply in zip(asked, seconds, strict=True):
        check_reply(plain_model(architecture), wanted, reply)


async def test_a_prompt_of_just_what_an_ended_row_has_fed_gets_logits() -> None:
    """Nobody has kept those after its last token."""
    made = await loaded_engine()
    [prompt] = hf_prompts(24, [20])
    first = await made.generate(request(prompt))
    wanted = request((*prompt, *first.output_ids[:-1]))
    reply = await made.generate(wanted)
    assert reply.meta_info.cached_tokens == 20
    check_reply(plain_model("qwen3"), wanted, reply)
    # Going on from the prompt has not used it up.
    assert (await made.generate(request(prompt))).meta_info.cached_tokens == 20


async def test_a_prompt_that_differs_early_uses_nothing() -> None:
    made = await loaded_engine()
    [prompt, other] = hf_prompts(5, [20, 20])
    await made.generate(request(prompt))
    for changed in ((*prompt[:10], *other[10:]), prompt[:12]):
        wanted = request(changed)
        reply = await made.generate(wanted)
        assert reply.meta_info.cached_tokens == 0
        check_reply(plain_model("qwen3"), wanted, reply)


async def test_old_caches_make_room_for_new_ones() -> None:
    made = await loaded_engine(batch_slots=1)
    first, *others = hf_prompts(6, [20] * 4)
    for text in (first, others[0], first):  # two caches each; the first prompt is used again
        reply = await made.generate(request(text))
    assert reply.meta_info.cached_tokens == 0
    assert (await made.generate(request(first))).meta_info.cached_tokens == 20
    for text in others[1:]:
        await made.generate(request(text))
    assert (await made.generate(request(first))).meta_info.cached_tokens == 0


async def test_the_models_own_context_may_be_the_shorter_one() -> None:
    made = await loaded_engine(max_context_tokens=10_000)
    reply = await made.generate(request(hf_prompts(8, [196])[0], max_new_tokens=100))
    assert len(reply.output_ids) == 4
    with pytest.raises(GenerateApiError, match=r"prompt of 200 tokens.*1 to 199 tokens"):
        await made.generate(request(hf_prompts(8, [200])[0]))


async def test_other_tasks_run_during_a_single_forward_pass() -> None:
    made = await loaded_engine("qwen3_5_moe")
    inside, gate = threading.Event(), threading.Event()

    def hold(module: torch.nn.Module, arguments: object) -> None:
        del module, arguments
        inside.set()
        assert gate.wait(20), "the forward pass holds up the event loop"

    with register_module_forward_pre_hook(hold):
        wanted = request(hf_prompts(11, [140])[0], max_new_tokens=1)
        task = asyncio.create_task(made.generate(wanted))
        while not inside.is_set():  # noqa: ASYNC110 -- set by another thread
            await asyncio.sleep(0)
        gate.set()
        await task


async def test_the_last_request_leaves_nothing_in_the_batch() -> None:
    made = await loaded_engine()
    task = asyncio.create_task(made.generate(request(hf_prompts(25, [10])[0], max_new_tokens=100)))
    await decoded(made, 3)
    assert made.num_rows == 1
    task.cancel()
    for _ in range(1000):
        await asyncio.sleep(0.001)
        if not made.num_rows:
            return
    pytest.fail("a cancelled request still holds its row")


def test_making_an_engine_draws_no_numbers_of_others() -> None:
    before = torch.random.get_rng_state()
    hf_engine("qwen3_5_moe")
    assert torch.equal(torch.random.get_rng_state(), before)


def test_folders_it_cannot_serve_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="describes no model"):
        HFEngine(tmp_path, VOCABULARY)
    MambaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'mamba' model with LinearAttentionLayer caches"):
        HFEngine(tmp_path, VOCABULARY)
    Qwen3Config(use_sliding_window=True, max_window_layers=1).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="sliding-window"):
        HFEngine(tmp_path, VOCABULARY)
    with pytest.raises(ConfigError, match=r"has 305 ids, but .* the embedding 304 rows"):
        HFEngine(model_folder("qwen3"), FullVocabulary(305))


async def test_the_text_part_of_a_multimodal_model_is_enough(tmp_path: Path) -> None:
    text = plain_model("qwen3_5_moe").config.to_dict()
    Qwen3_5MoeConfig(text_config=text).save_pretrained(tmp_path)
    made = HFEngine(tmp_path, VOCABULARY, batch_slots=2)
    sent = snapshot("qwen3_5_moe")
    renamed = {
        name.replace("model.", "model.language_model.", 1): array
        for name, array in sent.tensors.items()
    }
    confirmed = await made.load_weights(replace(sent, tensors=renamed))
    assert confirmed == weights_checksum(renamed)
    wanted = request(hf_prompts(23, [20])[0])
    check_reply(plain_model("qwen3_5_moe"), wanted, await made.generate(wanted))
