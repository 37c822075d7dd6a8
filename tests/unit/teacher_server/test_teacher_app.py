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
from miniverl_dist.generate_api.bearer import read_token_file
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.wire import ModelInfo
from teacher_server.app import ServiceLimits, build_teacher_app
from teacher_server.batching import ScoredBatch, ScoreJob, ScoreResult, TopTokens
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
        ({"top_logprobs_num": 2}, "not supported by this server's scorer"),
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


# ---- as a service

TOP: dict[str, Any] = SCORE | {"return_logprob": True, "top_logprobs_num": 2}


class TopScorer(SumScorer):
    """Takes two waiting texts at a time, names top tokens, and knows half of each text already."""

    num_kept_tokens = 7

    def score_some(self, waiting: Sequence[ScoreJob]) -> ScoredBatch:
        results = {}
        for index, job in enumerate(waiting[:2]):
            scores = self.score(job.token_ids.tolist(), job.start).astype(np.float64)
            tops = np.arange(job.num_top)[None].repeat(len(scores), 0)
            top = TopTokens(tops + 100, -tops - 0.5) if job.num_top else None
            results[index] = ScoreResult(scores, job.start // 2, top)
        return ScoredBatch(results, num_padding_tokens=3)


async def test_top_logprobs_have_sglangs_form() -> None:
    recorded = json.loads((RECORDED / "token_ids_lp.json").read_text())["meta_info"]
    assert recorded["input_top_logprobs"][:2] == [None, [[-3.6430468559265137, 429, None]]]
    async with served(TopScorer()) as at:
        _, answer = await post(at, TOP)
        meta = answer["meta_info"]
        assert meta["input_top_logprobs"] == [None, *[[[-0.5, 100, None], [-1.5, 101, None]]] * 2]
        assert meta["output_top_logprobs"] == []
        for first, size in ((2, 1), (3, 0), (-1, 0)):
            _, answer = await post(at, TOP | {"logprob_start_len": first})
            meta = answer["meta_info"]
            assert len(meta["input_token_logprobs"]) == len(meta["input_top_logprobs"]) == size
        _, answer = await post(at, SCORE)
        assert "input_top_logprobs" not in answer["meta_info"]
        status, answer = await post(at, TOP | {"top_logprobs_num": 65})
        assert (status, "expected at most 64" in answer["error"]["message"]) == (400, True)


async def test_cached_tokens_are_told_and_counted() -> None:
    scorer = TopScorer()
    async with served(scorer) as at:
        batch = SCORE | {"input_ids": [[10, 20, 30], [10, 20, 31], [5, 6]], "logprob_start_len": 1}
        _, answers = await post(at, batch | {"logprob_start_len": [1, 1, 0]})
        assert [each["meta_info"]["cached_tokens"] for each in answers] == [1, 1, 0]
        found = await metrics(at)
    assert found["miniverl_teacher_texts_total"] == 3
    assert found["miniverl_teacher_asked_tokens_total"] == 8
    assert found["miniverl_teacher_cached_tokens_total"] == 2
    assert found["miniverl_teacher_prefilled_tokens_total"] == 6
    assert found["miniverl_teacher_padding_tokens_total"] == 6
    assert found["miniverl_teacher_batches_total"] == 2
    assert found["miniverl_teacher_kept_tokens"] == 7
    assert found["miniverl_teacher_queued_tokens"] == 0
    assert found['miniverl_teacher_requests_total{status="200"}'] == 1


async def metrics(at: tuple[aiohttp.ClientSession, str]) -> dict[str, float]:
    async with at[0].get(at[1] + "/metrics") as response:
        assert response.status == 200
        assert response.content_type == "text/plain"
        lines = (await response.text()).splitlines()
    pairs = [line.rsplit(" ", 1) for line in lines if not line.startswith("#")]
    return {name: float(value) for name, value in pairs}


async def test_a_full_queue_is_a_429_that_says_when_to_come_back() -> None:
    scorer = SlowScorer()
    app = build_teacher_app(scorer, limits=ServiceLimits(max_queued_tokens=6))
    async with serving(app) as url, aiohttp.ClientSession() as session:
        at = (session, url)
        first = asyncio.create_task(post(at, SCORE | {"input_ids": [[1, 2], [3, 4]]}))
        assert await asyncio.to_thread(scorer.started.wait, 5)
        async with session.post(url + "/generate", json=SCORE) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) >= 1
            message = (await response.json())["error"]["message"]
        assert message == "4 tokens are queued and 3 more exceed the limit of 6"
        status, answer = await post(at, SCORE | {"input_ids": [list(range(1, 8))]})
        assert (status, "the whole queue takes 6" in answer["error"]["message"]) == (413, True)
        assert (await metrics(at))["miniverl_teacher_queued_tokens"] == 4
        scorer.gate.set()
        assert (await first)[0] == 200
        assert (await post(at, SCORE))[0] == 200
        found = await metrics(at)
    assert found['miniverl_teacher_requests_total{status="429"}'] == 1
    assert found["miniverl_teacher_queued_tokens"] == 0


async def test_a_client_that_hangs_up_frees_its_place() -> None:
    scorer = SlowScorer()
    app = build_teacher_app(scorer, limits=ServiceLimits(max_queued_tokens=6))
    async with serving(app) as url, aiohttp.ClientSession() as session:
        at = (session, url)
        first = asyncio.create_task(post(at, SCORE))
        assert await asyncio.to_thread(scorer.started.wait, 5)
        second = asyncio.create_task(post(at, SCORE))
        async with asyncio.timeout(60):
            while (await metrics(at))["miniverl_teacher_queued_tokens"] < 6:
                pass
            second.cancel()
            while (await metrics(at))["miniverl_teacher_queued_tokens"] > 3:
                pass
        scorer.gate.set()
        assert (await first)[0] == 200
        assert (await metrics(at))['miniverl_teacher_requests_total{status="499"}'] == 1
    assert len(scorer.asked) == 1


async def test_a_text_that_is_not_reached_in_time_is_a_503() -> None:
    scorer = SlowScorer()
    app = build_teacher_app(scorer, limits=ServiceLimits(score_deadline_s=0.03))
    async with serving(app) as url, aiohttp.ClientSession() as session:
        status, answer = await post((session, url), SCORE)
        assert (status, answer["error"]["message"]) == (503, "not scored within 0.03 s")
        scorer.gate.set()


class FailingScorer(TopScorer):
    """Fails whenever a text with a 7 is among those it takes."""

    def score_some(self, waiting: Sequence[ScoreJob]) -> ScoredBatch:
        if any(7 in job.token_ids for job in waiting[:2]):
            raise RuntimeError("cannot do 7")
        return super().score_some(waiting)


async def test_a_text_that_breaks_the_scorer_fails_alone() -> None:
    async with served(FailingScorer()) as at:
        bodies = [SCORE | {"input_ids": ids} for ids in ([1, 2], [3, 7], [4, 5], [7, 1], [6, 6])]
        answers = await asyncio.gather(*(post(at, body) for body in bodies))
    assert [status for status, _ in answers] == [200, 500, 200, 500, 200]
    assert answers[1][1]["error"]["message"] == "RuntimeError: cannot do 7"


async def test_the_token_is_asked_for_except_by_probes(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("a-secret-of-some-length\n")
    app = build_teacher_app(SumScorer(), token=read_token_file(tmp_path / "token"))
    async with serving(app) as url, aiohttp.ClientSession() as session:
        for path, method in (("/generate", "POST"), ("/model_info", "GET"), ("/metrics", "GET")):
            for header in ({}, {"Authorization": "Bearer a-secret-of-some-lengti"}):
                async with session.request(method, url + path, json=SCORE, headers=header) as reply:
                    assert reply.status == 401
                    assert reply.headers["WWW-Authenticate"] == "Bearer"
                    assert "Bearer TOKEN" in (await reply.json())["error"]["message"]
        for path in ("/health", "/ready"):
            async with session.get(url + path) as reply:
                assert reply.status == 200
        headers = {"Authorization": "Bearer a-secret-of-some-length"}
        async with session.post(url + "/generate", json=SCORE, headers=headers) as reply:
            assert reply.status == 200
