"""Weights of the toy engine: nothing is ever sampled under an unknown version."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from miniverl_dist.errors import EngineError, PublishError
from miniverl_dist.generate_api.wire import WeightVersion
from rollout_server.engines.toy import ToyEngine
from tests.support.toy import VOCABULARY_IDS, request, tiny_config
from tests.support.toy_engine import engine, prompts, sampled, steps, weights


async def test_a_load_waits_for_running_requests_and_later_ones_wait_for_it() -> None:
    made = await engine(batch_slots=2)
    [prompt] = prompts(12, [10])
    running = asyncio.create_task(made.generate(request(prompt)))
    await steps(made, 3)
    new = weights(version=2, seed=7)
    loading = asyncio.create_task(made.load_weights(new))
    await asyncio.sleep(0)
    # There is a free slot for it, but under which weights would it be sampled?
    waiting = asyncio.create_task(made.generate(request(prompt)))
    await asyncio.sleep(0)
    assert not loading.done()
    assert await loading == new.checksum
    assert running.done()
    assert made.weight_version == 2
    old_reply, new_reply = await running, await waiting
    assert old_reply.meta_info.weight_versions == (WeightVersion("1", 0, 12),)
    assert new_reply.meta_info.weight_versions == (WeightVersion("2", 0, 12),)
    assert new_reply.meta_info.cached_tokens == 0
    fresh = ToyEngine(tiny_config(batch_slots=2), VOCABULARY_IDS)
    await fresh.load_weights(new)
    assert sampled(await fresh.generate(request(prompt))) == sampled(new_reply)
    assert old_reply.output_ids != new_reply.output_ids


async def test_weights_that_do_not_fit_leave_the_old_ones_and_the_queue_moving() -> None:
    made = await engine()
    [prompt] = prompts(13, [10])
    expected = await made.generate(request(prompt))
    bad = replace(weights(version=2), tensors={"embed": np.zeros((2, 2), dtype=np.float32)})
    loading = asyncio.create_task(made.load_weights(bad))
    after = asyncio.create_task(made.generate(request(prompt)))
    with pytest.raises(PublishError, match="toy-0 cannot take the weights of policy version 2"):
        await loading
    assert made.weight_version == 1
    assert sampled(await after) == sampled(expected)


async def test_a_load_that_is_given_up_lets_waiting_requests_go_on() -> None:
    made = await engine(batch_slots=1)
    [prompt] = prompts(14, [10])
    running = asyncio.create_task(made.generate(request(prompt, max_new_tokens=100)))
    await steps(made, 3)
    loading = asyncio.create_task(made.load_weights(weights(version=2)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(made.generate(request(prompt)))
    await asyncio.sleep(0)
    loading.cancel()
    replies = await asyncio.gather(running, waiting)
    assert {reply.meta_info.weight_version for reply in replies} == {"1"}


async def test_a_load_goes_on_when_what_it_waits_for_is_cancelled() -> None:
    made = await engine(batch_slots=1)
    [prompt] = prompts(14, [10])
    running = asyncio.create_task(made.generate(request(prompt, max_new_tokens=100)))
    await steps(made, 3)
    loading = asyncio.create_task(made.load_weights(weights(version=2)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(made.generate(request(prompt)))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait_for(loading, 60)
    assert (await asyncio.wait_for(waiting, 60)).meta_info.weight_version == "2"


async def test_two_loads_at_once_are_taken_in_turn() -> None:
    made = await engine()
    [prompt] = prompts(15, [10])
    running = asyncio.create_task(made.generate(request(prompt)))
    await asyncio.sleep(0)
    await asyncio.gather(*(made.load_weights(weights(v, seed=v)) for v in (2, 3)))
    assert made.weight_version == 3
    assert (await running).meta_info.weight_version == "1"
    assert (await made.generate(request(prompt))).meta_info.weight_version == "3"


async def test_the_checksum_is_that_of_what_it_holds() -> None:
    made = await engine()
    true = weights(version=5, seed=3)
    confirmed = await made.load_weights(replace(true, checksum="0" * 64))
    assert confirmed == true.checksum


async def test_without_weights_it_does_not_guess() -> None:
    made = ToyEngine(tiny_config(), VOCABULARY_IDS)
    assert made.weight_version == -1
    with pytest.raises(EngineError, match="holds no weights yet"):
        await made.generate(request(prompts(18, [5])[0]))


async def test_diverged_weights_fail_every_request_and_good_ones_heal() -> None:
    made = await engine()
    good = weights(version=3)
    broken = {n: a * np.float32(np.nan) for n, a in good.tensors.items()}
    await made.load_weights(replace(good, tensors=broken))
    texts = prompts(19, [5] * 8)
    errors = await asyncio.gather(
        *(made.generate(request(text)) for text in texts), return_exceptions=True
    )
    assert len(errors) == 8
    assert all(isinstance(e, EngineError) and "not finite" in str(e) for e in errors)
    await made.load_weights(good)
    assert len((await made.generate(request(texts[0]))).output_ids) == 12
