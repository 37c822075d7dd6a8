"""Weights of the transformers engine: nothing is ever sampled under an unknown version."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from miniverl_dist.errors import EngineError, PublishError
from miniverl_dist.generate_api.wire import WeightVersion
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


@each_architecture
async def test_new_weights_are_sampled_from_and_confirmed(architecture: str) -> None:
    made = await loaded_engine(architecture)
    [prompt] = hf_prompts(14, [10])
    old = await made.generate(request(prompt))
    new = snapshot(architecture, version=2, seed=5)
    # The engine's own reading, not what it was told.
    assert await made.load_weights(replace(new, checksum="0" * 64)) == new.checksum
    assert made.weight_version == 2
    reply = await made.generate(request(prompt))
    assert reply.output_ids != old.output_ids
    assert reply.meta_info.weight_versions == (WeightVersion("2", 0, 12),)
    assert reply.meta_info.cached_tokens == 0
    check_reply(plain_model(architecture, seed=5), request(prompt), reply)


@each_architecture
async def test_weights_that_do_not_fit_leave_the_old_ones_and_the_queue_moving(
    architecture: str,
) -> None:
    made = await loaded_engine(architecture)
    [prompt] = hf_prompts(15, [10])
    new = dict(snapshot(architecture, version=2, seed=5).tensors)
    name = sorted(new)[-1]
    new[name] = new[name][:-1]
    bad = replace(snapshot(architecture), policy_version=2, tensors=new)
    loading = asyncio.create_task(made.load_weights(bad))
    after = asyncio.create_task(made.generate(request(prompt)))
    with pytest.raises(PublishError, match=f"hf-0 cannot take .* version 2: weight '{name}'"):
        await loading
    assert made.weight_version == 1
    check_reply(plain_model(architecture), request(prompt), await after)


async def test_a_load_waits_for_running_requests_and_later_ones_wait_for_it() -> None:
    made = await loaded_engine()
    [prompt] = hf_prompts(16, [10])
    running = asyncio.create_task(made.generate(request(prompt, max_new_tokens=60)))
    await decoded(made, 3)
    loading = asyncio.create_task(made.load_weights(snapshot("qwen3", version=2, seed=5)))
    await asyncio.sleep(0)
    # There is a free slot for it, but under which weights would it be sampled?
    waiting = asyncio.create_task(made.generate(request(prompt)))
    await asyncio.sleep(0)
    assert not loading.done()
    await loading
    assert running.done()
    old_reply, new_reply = await running, await waiting
    assert old_reply.meta_info.weight_versions == (WeightVersion("1", 0, 60),)
    assert new_reply.meta_info.weight_versions == (WeightVersion("2", 0, 12),)
    check_reply(plain_model("qwen3"), request(prompt, max_new_tokens=60), old_reply)
    check_reply(plain_model("qwen3", seed=5), request(prompt), new_reply)


@pytest.mark.parametrize("cancelled", ["load", "request"])
async def test_a_load_or_what_it_waits_for_may_be_given_up(cancelled: str) -> None:
    made = await loaded_engine(batch_slots=1)
    [prompt] = hf_prompts(17, [10])
    running = asyncio.create_task(made.generate(request(prompt, max_new_tokens=100)))
    await decoded(made, 3)
    loading = asyncio.create_task(made.load_weights(snapshot("qwen3", version=2, seed=5)))
    await asyncio.sleep(0)
    waiting = asyncio.create_task(made.generate(request(prompt)))
    await asyncio.sleep(0)
    (loading if cancelled == "load" else running).cancel()
    reply = await asyncio.wait_for(waiting, 20)
    version, seed = ("1", 0) if cancelled == "load" else ("2", 5)
    assert reply.meta_info.weight_version == version
    check_reply(plain_model("qwen3", seed=seed), request(prompt), reply)
    await asyncio.gather(running, loading, return_exceptions=True)


async def test_two_loads_at_once_are_taken_in_turn() -> None:
    made = await loaded_engine()
    await asyncio.gather(*(made.load_weights(snapshot("qwen3", v, seed=v)) for v in (2, 3)))
    assert made.weight_version == 3
    [prompt] = hf_prompts(18, [10])
    check_reply(plain_model("qwen3", seed=3), request(prompt), await made.generate(request(prompt)))


async def test_a_load_that_is_cancelled_half_way_is_finished() -> None:
    made = await loaded_engine()
    loading = asyncio.create_task(made.load_weights(snapshot("qwen3", version=2, seed=5)))
    await asyncio.sleep(0)  # the worker has it now
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert made.weight_version == 2
    [prompt] = hf_prompts(19, [10])
    reply = await made.generate(request(prompt))
    check_reply(plain_model("qwen3", seed=5), request(prompt), reply)


async def test_without_weights_it_does_not_guess() -> None:
    made = hf_engine()  # its folder has weights
    assert made.weight_version == -1
    with pytest.raises(EngineError, match="holds no weights yet"):
        await made.generate(request(hf_prompts(20, [5])[0]))


async def test_diverged_weights_fail_every_request_and_good_ones_heal() -> None:
    made = await loaded_engine()
    good = snapshot("qwen3", version=3)
    broken = {name: array * np.float32(np.nan) for name, array in good.tensors.items()}
    await made.load_weights(replace(good, tensors=broken))
    texts = hf_prompts(21, [5] * 8)
    errors = await asyncio.gather(
        *(made.generate(request(text)) for text in texts), return_exceptions=True
    )
    assert len(errors) == 8
    assert all(isinstance(e, EngineError) and "not finite" in str(e) for e in errors)
    await made.load_weights(good)
    check_reply(plain_model("qwen3"), request(texts[0]), await made.generate(request(texts[0])))


async def test_bfloat16_weights_are_held_as_they_came() -> None:
    made = HFEngine(model_folder("qwen3_moe"), VOCABULARY, batch_slots=2, dtype="bfloat16")
    sent = snapshot("qwen3_moe", dtype="bfloat16")
    assert {array.dtype.name for array in sent.tensors.values()} == {"bfloat16"}
    assert await made.load_weights(sent) == sent.checksum == weights_checksum(sent.tensors)
    [prompt] = hf_prompts(22, [30])
    wanted = request(prompt, max_new_tokens=1)
    entries = (await made.generate(wanted)).meta_info.output_token_logprobs
    exact = await loaded_engine("qwen3_moe")
    expected = (await exact.generate(wanted)).meta_info.output_token_logprobs
    assert entries is not None
    assert expected is not None
    assert entries[0][0] == pytest.approx(expected[0][0], abs=0.2)
    with pytest.raises(PublishError, match=r"is float32 .*, the model has bfloat16"):
        await made.load_weights(snapshot("qwen3_moe"))
