"""The SGLang engine against a process that has SGLang's command line, endpoints and habits."""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from miniverl_dist.backends.megatron.architecture import hf_parameters, read_architecture
from miniverl_dist.backends.vocabulary import Vocabulary
from miniverl_dist.config.recipe import SGLangEngineConfig
from miniverl_dist.config.sglang_options import ENGINE_VARIABLES
from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineLostError,
    GenerateApiError,
    PublishError,
    RequestRejectedError,
)
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest, SamplingParams
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.sglang import SGLangEngine
from rollout_server.engines.sglang_server import FIXED_ENV, SGLangLaunch

ROOT = Path(__file__).parents[4]
CONFIG_FILE = ROOT / "configs" / "models" / "tiny_qwen3.json"
ARCH = read_architecture(CONFIG_FILE)
IDS = tuple(range(10, 10 + 7 * ARCH.vocab_size, 7))
CONTEXT = 100


def real(rows: list[int]) -> tuple[int, ...]:
    return tuple(IDS[row] for row in rows)


def snapshot(version: int, seed: int = 0) -> WeightSnapshot:
    rng = np.random.default_rng(seed)
    tensors = {
        name: rng.standard_normal(shape, dtype=np.float32)
        for name, shape in hf_parameters(ARCH).items()
    }
    return WeightSnapshot(version, tensors, weights_checksum(tensors))


def launch(tmp_path: Path, **changes: Any) -> SGLangLaunch:
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m tests.support.fake_sglang "$@"\n'
    )
    python.chmod(0o755)
    values: dict[str, Any] = {
        "kind": "sglang",
        "python": python,
        "device": "cpu",
        "max_total_tokens": 4000,
    }
    config = SGLangEngineConfig.model_validate(values | {"start_deadline_s": 20.0} | changes)
    return SGLangLaunch(config, CONFIG_FILE, tmp_path / "work", CONTEXT, "float32")


def engine(tmp_path: Path, request_deadline_s: float = 20.0, **changes: Any) -> SGLangEngine:
    made = launch(tmp_path, **changes)
    return SGLangEngine(made, Vocabulary(IDS), request_deadline_s=request_deadline_s)


@asynccontextmanager
async def loaded(tmp_path: Path, **changes: Any) -> AsyncIterator[SGLangEngine]:
    made = engine(tmp_path, **changes)
    try:
        await made.load_weights(snapshot(1))
        yield made
    finally:
        await made.close()


async def fake(made: SGLangEngine, **faults: Any) -> dict[str, Any]:
    """Spoil the server; returns what it has seen so far."""
    url = made.server.control.url
    async with aiohttp.ClientSession() as session, session.post(url + "/fake", json=faults) as got:
        state: dict[str, Any] = await got.json()
    return state


async def calls(made: SGLangEngine) -> list[str]:
    return [name for name, _ in (await fake(made))["calls"]]


async def ask(made: SGLangEngine, rows: list[int], rid: str | None = None, **params: Any) -> Any:
    asked = SamplingParams(**{"max_new_tokens": 3} | params)
    request = GenerateRequest(real(rows), asked, return_logprob=True, rid=rid)
    return await made.generate(request)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(10):
        while not await condition():  # noqa: ASYNC110 - of another process
            await asyncio.sleep(0.005)


async def begin(made: SGLangEngine, rows: list[int], **params: Any) -> asyncio.Task[GenerateReply]:
    """A request that the server has begun to answer."""
    task = asyncio.create_task(ask(made, rows, **params))

    async def has_begun() -> bool:
        return any((await fake(made))["running"].values())

    await until(has_begun)
    return task


async def test_rows_travel_and_real_ids_come_back(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        stop = IDS[18]
        reply = await ask(made, [3, 5, 8], max_new_tokens=9, stop_token_ids=(stop, IDS[-1] + 1))
        (sent,) = [body for name, body in (await fake(made))["calls"] if name == "generate"]
    assert sent["input_ids"] == [3, 5, 8]
    assert sent["sampling_params"]["stop_token_ids"] == [18]
    assert reply.output_ids == real([16, 17, 18])
    meta = reply.meta_info
    assert meta.output_token_logprobs == tuple(
        (lp, i, None) for lp, i in zip((-0.1, -0.2, -0.3), reply.output_ids, strict=True)
    )
    assert meta.finish_reason is not None
    assert (meta.finish_reason.type, meta.finish_reason.matched) == ("stop", stop)
    assert [(v.version, v.start, v.end) for v in meta.weight_versions] == [("1", 0, 3)]


async def test_every_sampling_parameter_is_sent(tmp_path: Path) -> None:
    params = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "sampling_seed": 2**40}
    async with loaded(tmp_path) as made:
        await ask(made, [1], **params)
        sent = (await fake(made))["calls"][-1][1]
    assert params.items() <= sent["sampling_params"].items()
    assert sent["return_logprob"] is True


async def test_the_command_says_what_the_server_must_not_guess(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
    async with loaded(tmp_path, extra_args=("--log-level", "error")) as made:
        state = await fake(made)
    argv = state["argv"]
    # Of an option that is given twice SGLang takes the last.
    assert argv.index("--log-level") < argv.index("--model-path")
    given = dict(itertools.pairwise(argv))
    assert given["--load-format"] == "dummy"
    assert given["--weight-version"] == "-1"
    assert given["--sampling-defaults"] == "openai"
    assert given["--max-total-tokens"] == "4000"
    assert given["--log-level"] == "error"
    assert int(given["--context-length"]) > CONTEXT
    assert "--skip-tokenizer-init" in argv
    assert "--enable-memory-saver" not in argv
    assert os.listdir(given["--model-path"]) == ["config.json"]  # noqa: PTH208
    # The shell cannot turn logprobs into those of another distribution, nor can a recipe.
    assert set(FIXED_ENV) == ENGINE_VARIABLES
    assert FIXED_ENV.items() <= state["env"].items()


async def test_wrong_requests_never_reach_the_server(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        foreign = [(11,), (-1,), (IDS[-1] + 7,), (), (2**63,), (-(2**70),)]
        for ids in foreign:
            with pytest.raises(GenerateApiError):
                await made.generate(GenerateRequest(ids, SamplingParams(max_new_tokens=1)))
        with pytest.raises(GenerateApiError, match="temperature"):
            await ask(made, [1], temperature=-1.0)
        for temperature in (1e-300, 9e-7):
            with pytest.raises(GenerateApiError, match="SGLang would decode greedily"):
                await ask(made, [1], temperature=temperature)
        with pytest.raises(GenerateApiError, match="stop_token_ids"):
            await ask(made, [1], stop_token_ids=(2**64,))
        with pytest.raises(GenerateApiError, match="cannot be written as JSON"):
            await made.generate(
                GenerateRequest((IDS[0],), SamplingParams(max_new_tokens=1), rid="\ud800")
            )
        assert "generate" not in await calls(made)
        # The server would have died of it.
        assert (await ask(made, [1])).output_ids


async def test_outputs_fill_the_context_and_no_more(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        reply = await ask(made, [1] * 97, max_new_tokens=50)
        assert len(reply.output_ids) == 3


async def test_a_load_pauses_checks_flushes_and_only_then_names_the_version(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        sent = snapshot(7, seed=1)
        before = len(await calls(made))
        assert await made.load_weights(sent) == sent.checksum
        assert made.weight_version == 7
        assert (await calls(made))[before:] == [
            "pause_generation",
            "update_weights_from_disk",
            "weights_checker",
            "flush_cache",
            "update_weight_version",
            "continue_generation",
        ]
        reply = await ask(made, [1])
        assert reply.meta_info.weight_version == "7"
        assert not (tmp_path / "work" / "weights").exists()


async def test_a_server_that_is_not_quite_idle_is_asked_again_to_flush(tmp_path: Path) -> None:
    """It has sent its last reply, and has not yet counted the request as ended."""
    async with loaded(tmp_path) as made:
        pid = (await fake(made, busy_flushes=3))["pid"]
        before = len(await calls(made))
        await made.load_weights(snapshot(7, seed=1))
        assert (await calls(made))[before:].count("flush_cache") == 4
        assert (await fake(made))["pid"] == pid


@pytest.mark.parametrize(
    "faults",
    [
        {"swallow": "model.layers.1.mlp.up_proj.weight"},
        {"claimed_version": "1"},
        {"fail:update_weights_from_disk": 400},
        {"fail:weights_checker": 400},
        {"fail:flush_cache": 400},
        {"fail:update_weight_version": 400},
        {"fail:continue_generation": 500},
        {"die_after:update_weights_from_disk": True},
    ],
    ids=lambda faults: next(iter(faults)),
)
async def test_a_load_in_doubt_ends_the_server_and_the_next_one_starts_it_anew(
    tmp_path: Path, faults: dict[str, Any]
) -> None:
    async with loaded(tmp_path) as made:
        former = (await fake(made, **faults))["pid"]
        with pytest.raises(PublishError):
            await made.load_weights(snapshot(2, seed=1))
        assert made.weight_version == -1
        assert not made.server.is_alive
        with pytest.raises(EngineError):
            await ask(made, [1])
        await made.load_weights(snapshot(2, seed=1))
        assert made.weight_version == 2
        assert (await fake(made))["pid"] != former
        assert (await ask(made, [1])).meta_info.weight_version == "2"


async def test_foreign_weights_do_not_reach_the_server(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        before = await calls(made)
        sent = snapshot(2)
        bad = {**sent.tensors, "model.nope.weight": sent.tensors["model.norm.weight"]}
        with pytest.raises(PublishError, match=r"policy version 2.*model\.nope\.weight"):
            await made.load_weights(WeightSnapshot(2, bad, weights_checksum(bad)))
        assert await calls(made) == before
        assert made.weight_version == 1


async def test_requests_wait_while_weights_change(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        await fake(made, token_s=0.02)
        running = await begin(made, [1], max_new_tokens=10)
        load = asyncio.create_task(made.load_weights(snapshot(2, seed=1)))
        await asyncio.sleep(0)
        late = asyncio.create_task(ask(made, [2]))
        await load
        assert {v.version for v in (await running).meta_info.weight_versions} == {"1"}
        assert {v.version for v in (await late).meta_info.weight_versions} == {"2"}


async def test_in_flight_requests_can_go_on_under_the_new_weights(tmp_path: Path) -> None:
    async with loaded(tmp_path, in_flight="continue") as made:
        await fake(made, token_s=0.02)
        running = await begin(made, [1], max_new_tokens=30)
        await made.load_weights(snapshot(2, seed=1))
        assert not running.done()
        spans = (await running).meta_info.weight_versions
        assert [span.version for span in spans] == ["1", "2"]
        assert (spans[0].start, spans[0].end, spans[1].end) == (0, spans[1].start, 30)


async def test_a_cancelled_request_is_aborted_at_the_server(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        await fake(made, token_s=0.05)
        running = await begin(made, [1], rid="mine", max_new_tokens=90)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

        async def is_gone() -> bool:
            return not (await fake(made))["running"]

        await until(is_gone)
        aborted = [b["rid"] for n, b in (await fake(made))["calls"] if n == "abort_request"]
        assert aborted == ["mine", "mine_retry1", "mine_retry2"]


async def test_a_late_request_is_aborted_too(tmp_path: Path) -> None:
    async with loaded(tmp_path, request_deadline_s=0.3) as made:
        await fake(made, token_s=1.0)
        with pytest.raises(DeadlineError):
            await ask(made, [1], max_new_tokens=90)
        assert made.num_running == 0

        async def is_gone() -> bool:
            return not (await fake(made))["running"]

        await until(is_gone)


async def test_two_requests_of_one_name_are_refused(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        await fake(made, token_s=0.02)
        first = await begin(made, [1], rid="twice", max_new_tokens=5)
        with pytest.raises(RequestRejectedError, match="twice"):
            await ask(made, [1], rid="twice")
        assert (await calls(made)).count("generate") == 1
        await first


async def test_a_server_that_dies_is_lost_and_comes_back_with_the_next_load(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        state = await fake(made, token_s=0.05)
        running = await begin(made, [1], max_new_tokens=90)
        os.kill(state["pid"], 9)
        with pytest.raises(EngineLostError, match="serving"):
            await running
        with pytest.raises(EngineLostError):
            await ask(made, [1])
        sent = snapshot(1)
        assert await made.restart(sent) == sent.checksum
        assert (await ask(made, [1])).meta_info.weight_version == "1"


async def test_an_answer_that_makes_no_sense_is_the_engines_error(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        await fake(made, answer="{}")
        with pytest.raises(EngineError):
            await ask(made, [1])
        text = '{"output_ids":[5000],"meta_info":{"id":"a","finish_reason":null,'
        await fake(made, answer=text + '"prompt_tokens":1,"completion_tokens":1}}')
        with pytest.raises(EngineError, match="row 5000"):
            await ask(made, [1])


async def test_closing_aborts_what_runs_and_ends_the_process(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        state = await fake(made, token_s=0.05)
        running = [await begin(made, [1], max_new_tokens=90)]
        await fake(made, token_s=0.5)
        running.append(asyncio.create_task(ask(made, [2])))  # not one token of it by then

        async def are_two() -> bool:
            return len((await fake(made))["running"]) == 2

        await until(are_two)
        await made.close()
        for reply in await asyncio.gather(*running):
            assert reply.meta_info.finish_reason is not None
            assert reply.meta_info.finish_reason.type == "abort"
        with pytest.raises(ProcessLookupError):
            os.kill(state["pid"], 0)
        await made.close()
        with pytest.raises(EngineError, match="closed"):
            await ask(made, [1])
        with pytest.raises(PublishError, match="closed"):
            await made.load_weights(snapshot(2))
        with pytest.raises(EngineError, match="closed"):
            await made.start()


async def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    made = engine(tmp_path, extra_env={"FAKE_FAILS_AT_START": "1"})
    with pytest.raises(PublishError, match="this model cannot be served"):
        await made.load_weights(snapshot(1))
    with pytest.raises(EngineError, match="no weights yet"):
        await ask(made, [1])
    await made.close()


async def test_memory_is_given_back_only_when_idle(tmp_path: Path) -> None:
    async with loaded(tmp_path) as made:
        await fake(made, token_s=0.01)
        running = await begin(made, [1], max_new_tokens=10)
        await made.release_memory()
        assert running.done()
        assert made.weight_version == -1  # what the memory held is gone
        with pytest.raises(EngineError, match="kv_cache, weights"):
            await ask(made, [1])
        with pytest.raises(PublishError, match="memory"):
            await made.load_weights(snapshot(2))
        await made.resume_memory(("weights",))
        await made.load_weights(snapshot(2))
        with pytest.raises(EngineError, match="given back kv_cache"):
            await ask(made, [1])
        await made.resume_memory(("kv_cache",))
        assert (await ask(made, [1])).meta_info.weight_version == "2"
        await fake(made, **{"fail:release_memory_occupation": 500})
        with pytest.raises(EngineError):
            await made.release_memory(("kv_cache",))
        assert not made.server.is_alive


def test_a_vocabulary_of_another_size_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="1024 rows"):
        SGLangEngine(launch(tmp_path), Vocabulary(IDS[:-1]))


def test_what_a_cpu_cannot_do_is_refused() -> None:
    for changes in ({"tensor": 2}, {"memory_saver": True}, {"max_total_tokens": None}):
        with pytest.raises(ValueError, match="device cpu"):
            SGLangEngineConfig.model_validate(
                {"kind": "sglang", "device": "cpu", "max_total_tokens": 4000} | changes
            )
