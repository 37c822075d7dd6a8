"""Both teachers: what becomes a score, and which refusal everything else becomes."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miniverl_dist.errors import (
    RequestRejectedError,
    ServerUnavailableError,
    TokenizerMismatchError,
)
from miniverl_dist.generate_api.app import serving
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.ports import TeacherScorer
from miniverl_dist.schemas.teacher import (
    RefusalReason,
    TeacherRefusal,
    TeacherResult,
    TeacherScore,
)
from miniverl_dist.schemas.trajectory import Trajectory
from teacher_server.app import build_teacher_app
from teacher_server.client import HttpTeacher, LocalTeacher, explained_at_start
from teacher_server.rendering import TeacherRendering
from tests.support.http_faults import (
    HANG,
    RESET,
    Act,
    Answer,
    FakeClock,
    ScriptedServer,
    reply,
    scripted_server,
)
from tests.support.teachers import IDENTITY, SumScorer, rendering, trajectory

# Two sampled spans with context between and behind; an empty one in front.
RENDERED = rendering([10, 20, 30, 40, 50, 60, 70], (1, 1), (2, 4), (5, 6))
LIMITS = ClientLimits(request_deadline_s=5, max_retries=1, retry_backoff_s=0.5)
BUSY = reply(503, {"error": {"message": "queue is full"}})


def scored(body: dict[str, Any], **changes: object) -> Act:
    """What a sound server answers, some of it changed."""
    ids, start = body["input_ids"], body["logprob_start_len"]
    entries: list[list[object]] = [[-i / 100, token, None] for i, token in enumerate(ids)]
    entries = [[None, ids[start], None], *entries[start + 1 :]]
    meta: dict[str, object] = {
        "id": "x",
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(ids),
        "completion_tokens": 0,
        "input_token_logprobs": entries,
    }
    return reply(body={"text": "", "output_ids": [], "meta_info": meta | changes})


def with_last(entry: Sequence[object]) -> Answer:
    """A sound reply but for its last entry."""

    def answer(body: dict[str, Any]) -> Act:
        sound = json.loads(scored(body).payload.split(b"\r\n\r\n", 1)[1])
        entries = sound["meta_info"]["input_token_logprobs"]
        return scored(body, input_token_logprobs=[*entries[:-1], list(entry)])

    return answer


def render_as(rendered: TeacherRendering) -> Any:
    def renderer(asked: Trajectory) -> TeacherRendering:
        assert asked.trajectory_id == "t0"
        return rendered

    return renderer


@asynccontextmanager
async def http_teacher(
    *script: Answer,
    rendered: TeacherRendering = RENDERED,
    limits: ClientLimits = LIMITS,
    deadline_s: float = 20,
    wait: bool = False,
    max_prefill_tokens: int = 100,
) -> AsyncIterator[tuple[HttpTeacher, ScriptedServer, FakeClock]]:
    clock = FakeClock()
    async with scripted_server(*script) as server:
        teacher = HttpTeacher(
            GenerateClient(server.url, limits=limits, clock=clock),
            render_as(rendered),
            IDENTITY,
            max_prefill_tokens=max_prefill_tokens,
            deadline_s=deadline_s,
            wait=wait,
            clock=clock,
        )
        try:
            yield teacher, server, clock
        finally:
            await teacher.close()


def local_teacher(
    scorer: SumScorer,
    rendered: TeacherRendering = RENDERED,
    *,
    deadline_s: float = 5,
    max_prefill_tokens: int = 100,
) -> LocalTeacher:
    return LocalTeacher(
        scorer,
        render_as(rendered),
        IDENTITY,
        max_prefill_tokens=max_prefill_tokens,
        deadline_s=deadline_s,
        clock=FakeClock(),
    )


async def ask(*script: Answer, **options: Any) -> TeacherResult:
    async with http_teacher(*script, **options) as (teacher, _, _):
        async with asyncio.timeout(10):
            return await teacher.score(trajectory())


def refusal(result: TeacherResult) -> tuple[RefusalReason, str]:
    assert isinstance(result, TeacherRefusal)
    assert result.trajectory_id == "t0"
    return result.reason, result.detail


# ---- scores


async def test_a_score_holds_every_sampled_span_and_where_it_came_from() -> None:
    async with http_teacher(scored) as (teacher, server, _):
        result = await teacher.score(trajectory())
    assert isinstance(result, TeacherScore)
    assert [span.span_index for span in result.spans] == [1, 2, 3]
    assert [span.token_ids for span in result.spans] == [(), (30, 40), (60,)]
    assert [span.logprobs for span in result.spans] == [(), (-0.02, -0.03), (-0.05,)]
    assert [span.byte_ends for span in result.spans] == [(), (1, 2), (1,)]
    assert (result.trajectory_id, result.teacher_id) == ("t0", "teacher")
    assert result.tokenizer_fingerprint == "f" * 64
    assert result.policy_version == 3  # the oldest of 4 and 3
    assert result.num_prefill_tokens == 6
    assert result.seconds == 0.0
    # One request for all spans, from the token before the first scored one to the last scored one.
    (sent,) = server.received
    assert sent.json["input_ids"] == [10, 20, 30, 40, 50, 60]
    assert sent.json["logprob_start_len"] == 1
    assert sent.json["sampling_params"]["max_new_tokens"] == 0


async def test_peer_6_scores_are_asked_from_one_before_the_first_scored_token() -> None:
    async with http_teacher(scored, rendered=rendering([1, 2, 3], (1, 3))) as (teacher, server, _):
        result = await teacher.score(trajectory())
    assert isinstance(result, TeacherScore)
    assert server.received[0].json["logprob_start_len"] == 0
    assert result.spans[0].logprobs == (-0.01, -0.02)


async def test_the_first_logprob_null_is_never_a_score_of_zero() -> None:
    """A server that starts its list one token late: the null falls on a scored token."""

    def late(body: dict[str, Any]) -> Act:
        return scored(body | {"logprob_start_len": body["logprob_start_len"] + 1})

    assert refusal(await ask(late))[0] == RefusalReason.MISMATCH


async def test_local_and_http_teachers_give_the_same_scores() -> None:
    scorer = SumScorer()
    local = local_teacher(scorer)
    async with serving(build_teacher_app(scorer)) as url:
        http = HttpTeacher(
            GenerateClient(url),
            render_as(RENDERED),
            IDENTITY,
            max_prefill_tokens=100,
            deadline_s=10,
            clock=FakeClock(),
        )
        for teacher in (local, http):
            port: TeacherScorer = teacher
            assert port.teacher_id == "teacher"
        first, second = await local.score(trajectory()), await http.score(trajectory())
        await http.require_same_tokenizer()
        await http.close()
        await local.close()
    assert isinstance(first, TeacherScore)
    assert first == second
    assert first.spans[1].logprobs == (-0.06, -0.1)
    assert scorer.asked == [((10, 20, 30, 40, 50, 60), 2)] * 2


async def test_a_trajectory_without_scored_tokens_is_scored_without_asking() -> None:
    async with http_teacher(scored, rendered=rendering([1, 2], (1, 1))) as (teacher, server, _):
        result = await teacher.score(trajectory())
    assert isinstance(result, TeacherScore)
    assert result.spans[0].logprobs == ()
    assert server.received == []
    local = local_teacher(SumScorer(), rendering([1, 2]))
    result = await local.score(trajectory())
    assert isinstance(result, TeacherScore)
    assert result.spans == ()


# ---- refusals


@pytest.mark.parametrize("max_prefill_tokens", [5, 6])
async def test_too_long_is_refused_without_asking(max_prefill_tokens: int) -> None:
    async with http_teacher(scored, max_prefill_tokens=max_prefill_tokens) as (teacher, server, _):
        result = await teacher.score(trajectory())
    if max_prefill_tokens == 6:
        assert isinstance(result, TeacherScore)
        return
    assert refusal(result) == (RefusalReason.TOO_LONG, "6 teacher tokens, the limit is 5")
    assert server.received == []
    local = local_teacher(SumScorer(), max_prefill_tokens=5)
    assert refusal(await local.score(trajectory()))[0] == RefusalReason.TOO_LONG


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, None, -3.4e38, 0.25])
async def test_inf_and_nan_teacher_logprobs_are_refused_not_guessed(bad: float | None) -> None:
    reason, detail = refusal(await ask(with_last([bad, 60, None])))
    assert reason == RefusalReason.NOT_FINITE
    assert "position 5" in detail


@pytest.mark.parametrize("bad", [math.nan, -math.inf, math.inf, 0.25])
async def test_peer_12_a_local_scorer_is_checked_as_well(bad: float) -> None:
    scorer = SumScorer()
    scorer.spoil = {5: bad}
    local = local_teacher(scorer)
    assert refusal(await local.score(trajectory()))[0] == RefusalReason.NOT_FINITE
    scorer.spoil = {1: bad}  # context: not asked for
    assert isinstance(await local.score(trajectory()), TeacherScore)
    await local.close()


MISMATCHES: list[Answer] = [
    with_last([-0.1, 61, None]),
    lambda body: scored(body, input_token_logprobs=None),
    lambda body: scored(body, input_token_logprobs=[]),
    lambda body: scored(body | {"input_ids": [*body["input_ids"], 7]}),
    lambda body: scored(body | {"input_ids": body["input_ids"][:-1]}),
]


@pytest.mark.parametrize("answer", MISMATCHES)
async def test_wrong_ids_or_lengths_are_a_mismatch(answer: Answer) -> None:
    assert refusal(await ask(answer))[0] == RefusalReason.MISMATCH


async def test_400_is_a_refusal_with_the_servers_words_not_swallowed() -> None:
    rejected = reply(400, {"error": {"message": "The input is longer than the context"}})
    async with http_teacher(rejected, wait=True) as (teacher, server, clock):
        reason, detail = refusal(await teacher.score(trajectory()))
    assert reason == RefusalReason.REJECTED
    assert "HTTP 400: The input is longer than the context" in detail
    assert (len(server.received), clock.sleeps) == (1, [])


async def test_a_local_scorer_rejects_ids_that_it_does_not_know() -> None:
    local = local_teacher(SumScorer(), rendering([1, 13, 2], (2, 3)))
    assert refusal(await local.score(trajectory())) == (
        RefusalReason.REJECTED,
        "token id 13 is not among the ids of this model",
    )


UNAVAILABLE: dict[str, Answer] = {
    "503": BUSY,
    "429": reply(429, {"error": {"message": "slow down"}}),
    "500": reply(500, {"error": {"message": "CUDA error"}}),
    "reset": RESET,
    "half a body": reply(body={"text": ""}, missing_bytes=50),
    "truncated JSON": reply(body=b'{"text": "", "meta_info": {"id"'),
    "HTML": reply(body=b"<html>maintenance</html>", content_type="text/html"),
    "abort": lambda body: scored(body, finish_reason={"type": "abort", "message": "weights"}),
}


@pytest.mark.parametrize("fault", sorted(UNAVAILABLE))
async def test_a_teacher_that_cannot_answer_is_unavailable(fault: str) -> None:
    assert refusal(await ask(UNAVAILABLE[fault]))[0] == RefusalReason.UNAVAILABLE


@pytest.mark.parametrize("fault", sorted(UNAVAILABLE))
async def test_wait_asks_until_the_teacher_is_back(fault: str) -> None:
    script = [UNAVAILABLE[fault]] * 7
    async with http_teacher(*script, scored, wait=True, deadline_s=1000) as (
        teacher,
        server,
        clock,
    ):
        result = await teacher.score(trajectory())
    assert isinstance(result, TeacherScore)
    assert len(server.received) == 8
    assert result.seconds == pytest.approx(sum(clock.sleeps))
    assert result.seconds > 3


async def test_wait_ends_at_the_deadline() -> None:
    async with http_teacher(BUSY, wait=True, deadline_s=30) as (teacher, _, clock):
        assert refusal(await teacher.score(trajectory()))[0] == RefusalReason.UNAVAILABLE
    assert 25 < sum(clock.sleeps) <= 30


async def test_without_wait_the_retries_are_the_end() -> None:
    async with http_teacher(BUSY) as (teacher, server, _):
        assert refusal(await teacher.score(trajectory()))[0] == RefusalReason.UNAVAILABLE
    assert len(server.received) == 2


async def test_429_with_retry_after_is_waited_for() -> None:
    slow = reply(429, {"error": {"message": "slow down"}}, headers={"Retry-After": "7"})
    async with http_teacher(slow, scored) as (teacher, _, clock):
        assert isinstance(await teacher.score(trajectory()), TeacherScore)
    assert 7 <= clock.sleeps[0] <= 7.5


async def test_peer_33_a_teacher_that_hangs_is_unavailable_by_the_deadline() -> None:
    limits = ClientLimits(request_deadline_s=0.03, max_retries=1)
    reason, detail = refusal(await ask(HANG, limits=limits))
    assert reason == RefusalReason.UNAVAILABLE
    assert "no answer within 0.036 s" in detail


async def test_peer_32_the_deadline_of_a_score_bounds_a_longer_one_of_a_request() -> None:
    limits = ClientLimits(request_deadline_s=60)
    reason, detail = refusal(await ask(HANG, limits=limits, deadline_s=0.04))
    assert reason == RefusalReason.UNAVAILABLE
    assert "past the deadline" in detail or "tries" in detail


class StuckScorer(SumScorer):
    """Takes its time."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Event()

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float64]:
        self.gate.wait(5)
        return super().score(token_ids, start)


class ShortScorer(SumScorer):
    """Leaves one out."""

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float64]:
        return super().score(token_ids, start)[:-1]


async def test_a_local_scorer_has_a_deadline_and_a_length() -> None:
    stuck = StuckScorer()
    local = local_teacher(stuck, deadline_s=0.03)
    started = time.monotonic()
    reason, detail = refusal(await local.score(trajectory()))
    assert time.monotonic() - started < 3
    assert reason == RefusalReason.UNAVAILABLE
    assert "longer than 0.03 s" in detail
    stuck.gate.set()
    await local.close()
    assert refusal(await local_teacher(ShortScorer()).score(trajectory()))[0] == (
        RefusalReason.MISMATCH
    )


async def test_the_servers_tokenizer_is_compared_where_it_names_one() -> None:
    info = {"model_path": "m"}
    foreign = reply(body=info | {"tokenizer_fingerprint": "0" * 64})
    async with http_teacher(foreign, reply(body=info)) as (teacher, _, _):
        with pytest.raises(TokenizerMismatchError, match="reads ids of tokenizer 000000000000"):
            await teacher.require_same_tokenizer()
        await teacher.require_same_tokenizer()
        assert teacher.short_contexts == {}


async def test_a_foreign_tokenizer_names_both_sides_and_the_field_for_a_toys_ids() -> None:
    foreign = reply(body={"model_path": "toy-teacher", "tokenizer_fingerprint": "0" * 64})
    async with http_teacher(foreign) as (teacher, _, _):
        with pytest.raises(TokenizerMismatchError) as caught:
            await teacher.require_same_tokenizer()
    said = str(caught.value)
    assert "(toy-teacher) reads ids of tokenizer 000000000000" in said
    assert f"rendered for {IDENTITY.tokenizer} (ffffffffffff)" in said
    assert "set teacher.vocabulary to the file teacher-vocabulary.json of the run" in said


async def test_a_servers_shorter_context_is_kept_to_without_asking() -> None:
    info = reply(body={"model_path": "m", "max_context_tokens": 5})
    async with http_teacher(info) as (teacher, server, _):
        await teacher.require_same_tokenizer()
        assert teacher.short_contexts == {server.url: 5}
        reason, detail = refusal(await teacher.score(trajectory()))
        assert (reason, detail) == (RefusalReason.TOO_LONG, "6 teacher tokens, the limit is 5")
        assert len(server.received) == 1
    enough = reply(body={"model_path": "m", "max_context_tokens": 100})
    async with http_teacher(enough) as (teacher, _, _):
        await teacher.require_same_tokenizer()
        assert teacher.short_contexts == {}


UNAUTHORIZED = reply(401, {"error": {"message": "Unauthorized"}})


async def test_a_missing_token_names_the_field_that_it_goes_into() -> None:
    async with http_teacher(UNAUTHORIZED) as (teacher, _, _):
        said = "teacher.headers_file has to"
        with pytest.raises(RequestRejectedError, match=said) as caught, explained_at_start():
            await teacher.require_same_tokenizer()
        assert caught.value.status == 401
        # In the middle of a run as well: a token may be changed there.
        reason, detail = refusal(await teacher.score(trajectory()))
    assert reason is RefusalReason.REJECTED
    assert "HTTP 401: Unauthorized; teacher.headers_file has to name a file" in detail
    assert "headers_file" not in refusal(await ask(reply(400, {"error": {"message": "no"}})))[1]


async def test_a_teacher_that_is_not_up_names_its_field_and_what_to_do() -> None:
    async with http_teacher(RESET) as (teacher, server, _):
        with pytest.raises(ServerUnavailableError) as caught, explained_at_start():
            await teacher.require_same_tokenizer()
        assert str(caught.value).startswith(f"teacher.url: {server.url}/model_info: ")
        assert "then go on with `miniverl-dist resume RUN`" in str(caught.value)
        _, detail = refusal(await teacher.score(trajectory()))
    assert detail.endswith("(teacher.deadline_s, teacher.max_retries, teacher.breaker)")
