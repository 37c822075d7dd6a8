"""Routed experts of the transformers engine: the model's own, whoever shares the batch."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.schemas.routing import RoutingShape, decode_engine_rows
from tests.reference.forced_routing import own_routing
from tests.support.tiny_hf import VOCABULARY, hf_prompts, loaded_engine, plain_model
from tests.support.toy import request

SHAPES = {"qwen3_moe": RoutingShape(2, 2, 4), "qwen3_5_moe": RoutingShape(4, 2, 4)}


def asked(*arguments: object, **changes: object) -> GenerateRequest:
    made = request(*arguments, **changes)  # type: ignore[arg-type]
    return msgspec.structs.replace(made, return_routed_experts=True)


def check(architecture: str, wanted: GenerateRequest, reply: GenerateReply) -> None:
    """As transformers routes the whole text in one pass, without the last token."""
    ids = (*wanted.input_ids, *reply.output_ids)
    found = reply.meta_info.routed_experts
    assert found is not None
    rows = decode_engine_rows(found, SHAPES[architecture], len(ids) - 1)
    expected = own_routing(plain_model(architecture), VOCABULARY.rows(ids))[:-1]
    # The order within a token is the router's own, by weight.
    np.testing.assert_array_equal(rows, expected)


@pytest.mark.parametrize("architecture", SHAPES)
async def test_rows_are_the_models_own_in_company_and_from_a_kept_cache(architecture: str) -> None:
    made = await loaded_engine(architecture, batch_slots=3)
    prompts = hf_prompts(3, [5, 21, 13, 8])
    first = [asked(prompt, seed, max_new_tokens=3 + seed) for seed, prompt in enumerate(prompts)]
    replies = await asyncio.gather(*map(made.generate, first))
    later = []
    for wanted, reply in zip(first, replies, strict=True):
        check(architecture, wanted, reply)
        later.append(asked((*wanted.input_ids, *reply.output_ids, *prompts[0][:2]), 9))
    # A sibling begins with the very same prompt, the next turn with all that the former has fed.
    for wanted in (first[-1], later[-1], later[2]):
        reply = await made.generate(wanted)
        assert reply.meta_info.cached_tokens > 0
        check(architecture, wanted, reply)
    await made.close()


async def test_a_prompt_that_was_cached_without_asking_has_its_rows_all_the_same() -> None:
    made = await loaded_engine("qwen3_moe")
    [prompt] = hf_prompts(4, [17])
    plain = await made.generate(request(prompt, 1))
    assert plain.meta_info.routed_experts is None
    wanted = asked(prompt, 2, max_new_tokens=1)
    reply = await made.generate(wanted)
    assert reply.meta_info.cached_tokens == 17
    check("qwen3_moe", wanted, reply)
    await made.close()


async def test_a_model_without_experts_answers_without_them() -> None:
    made = await loaded_engine("qwen3")
    reply = await made.generate(asked(hf_prompts(5, [6])[0]))
    assert reply.meta_info.routed_experts is None
    await made.close()
