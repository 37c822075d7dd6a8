"""The teacher's server over real HTTP: SGLang's form of input logprobs, and only those."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest
from numpy.typing import NDArray

from miniverl_dist.generate_api.app import serving
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.wire import ModelInfo
from teacher_server.app import build_teacher_app
from tests.support.teachers import SumScorer

RECORDED = Path(__file__).parents[2] / "fixtures" / "sglang_replies"
SCORE: dict[str, Any] = {
    "input_ids": [10, 20, 30],
    "sampling_params": {"temperature": 0, "max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
}


@asynccontextmanager
async def served(scorer: SumScorer) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    async with serving(build_teacher_app(scorer)) as url, aiohttp.ClientSession() as session:
        yield session, url


async def post(at: tuple[aiohttp.ClientSession, str], body: dict[str, Any]) -> tuple[int, Any]:
    session, url = at
    async with session.post(url + "/generate", json=body) as response:
        return response.status, await response.json()


async def logprobs(body: dict[str, Any]) -> Any:
    async with served(SumScorer()) as at:
        status, answer = await post(at, body)
    assert status == 200
    return answer["meta_info"].get("input_token_logprobs")


async def test_scores_have_sglangs_form() -> None:
    async with served(SumScorer()) as at:
        status, answer = await post(at, SCORE)
    assert status == 200
    recorded = json.loads((RECORDED / "lp_mid.json").read_text())
    assert set(answer) == set(recorded)
    assert set(answer["meta_info"]) <= set(recorded["meta_info"])
    for name in ("output_ids", "text"):
        assert answer[name] == recorded[name]
    for name in ("finish_reason", "output_token_logprobs", "weight_versions", "completion_tokens"):
        assert answer["meta_info"][name] == recorded["meta_info"][name]
    entries = answer["meta_info"]["input_token_logprobs"]
    assert entries == [[None, 10, None], [-0.03, 20, None], [-0.06, 30, None]]


async def test_the_list_starts_where_it_is_asked_to() -> None:
    assert await logprobs(SCORE | {"logprob_start_len": 1}) == [[None, 20, None], [-0.06, 30, None]]
    assert await logprobs(SCORE | {"logprob_start_len": 2}) == [[None, 30, None]]
    assert await logprobs(SCORE | {"logprob_start_len": 3}) == []
    assert await logprobs(SCORE | {"logprob_start_len": -1}) == []
    assert await logprobs(SCORE | {"return_logprob": False}) is None


async def test_temperature_is_ignored_as_sglang_does() -> None:
    hot = {"temperature": 0.1, "max_new_tokens": 0}
    assert await logprobs(SCORE | {"sampling_params": hot}) == await logprobs(SCORE)


async def test_a_batch_is_scored_text_by_text() -> None:
    body = SCORE | {"input_ids": [[10, 20], [5]], "logprob_start_len": [0, 0]}
    async with served(SumScorer()) as at:
        _, answers = await post(at, body)
    lists = [each["meta_info"]["input_token_logprobs"] for each in answers]
    assert lists == [[[None, 10, None], [-0.03, 20, None]], [[None, 5, None]]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sampling_params": {"max_new_tokens": 1}},
            "max_new_tokens is 1: this server only scores",
        ),
        ({"sampling_params": {}}, "exceed the context|only scores"),
        ({"top_logprobs_num": 2}, "not supported by this server"),
        ({"return_text_in_logprobs": True}, "not supported by this server"),
        ({"input_ids": [13]}, "13 is not among"),
        ({"input_ids": [512]}, "outside the vocabulary"),
        ({"input_ids": [1] * 65}, "exceed the context length of 64"),
    ],
)
async def test_what_it_cannot_do_is_a_400(change: dict[str, Any], message: str) -> None:
    scorer = SumScorer()
    async with served(scorer) as at:
        status, answer = await post(at, SCORE | change)
    assert status == 400
    assert any(part in answer["error"]["message"] for part in message.split("|"))
    assert scorer.asked == []


async def test_a_nan_travels_as_null() -> None:
    scorer = SumScorer()
    scorer.spoil = {2: float("nan")}
    async with served(scorer) as at:
        _, answer = await post(at, SCORE)
    assert answer["meta_info"]["input_token_logprobs"][2] == [None, 30, None]


async def test_model_info_names_the_tokenizer() -> None:
    async with served(SumScorer()) as (_, url), GenerateClient(url) as client:
        assert await client.model_info() == ModelInfo(
            model_path="sum",
            vocab_size=512,
            max_context_tokens=64,
            tokenizer_fingerprint="f" * 64,
        )


class SlowScorer(SumScorer):
    """Waits for a gate, and notes how many calls are at work at once."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.started = threading.Event(), threading.Event()
        self.at_work = self.most_at_work = 0

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float64]:
        self.at_work += 1
        self.most_at_work = max(self.most_at_work, self.at_work)
        self.started.set()
        assert self.gate.wait(5)
        self.at_work -= 1
        return super().score(token_ids, start)


async def test_one_text_at_a_time_in_order_while_health_answers() -> None:
    scorer = SlowScorer()
    async with served(scorer) as at, GenerateClient(at[1]) as client:
        batch = asyncio.create_task(post(at, SCORE | {"input_ids": [[1, 2], [3, 4], [5, 6]]}))
        assert await asyncio.to_thread(scorer.started.wait, 5)
        assert await client.health()
        scorer.gate.set()
        await batch
    assert scorer.most_at_work == 1
    assert [ids for ids, _ in scorer.asked] == [(1, 2), (3, 4), (5, 6)]


async def test_the_scorers_thread_ends_with_the_app() -> None:
    async with served(SumScorer()) as at:
        await post(at, SCORE)
        assert any(thread.name.startswith("scorer") for thread in threading.enumerate())
    assert not any(thread.name.startswith("scorer") for thread in threading.enumerate())
