"""A request inside an engine: what is fixed at arrival, when it ends, what it is told."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from miniverl_dist.backends.vocabulary import Vocabulary
from miniverl_dist.errors import GenerateApiError
from miniverl_dist.generate_api.wire import GenerateRequest, WeightVersion
from rollout_server.engines.jobs import Job, accept
from rollout_server.engines.sampling import uniforms
from tests.support.toy import request

VOCABULARY = Vocabulary([100, 105, 110, 120])


def job(wanted: GenerateRequest, max_context_tokens: int = 10) -> Job:
    return accept(
        wanted,
        VOCABULARY,
        Job,
        max_context_tokens=max_context_tokens,
        engine="mine",
        default_rid="r1",
    )


async def test_a_request_is_turned_into_rows_and_draws() -> None:
    made = job(request([110, 100], 7, max_new_tokens=5, stop=(120, 4, 100)))
    assert (made.rid, made.prompt.tolist(), made.stop_rows) == ("r1", [2, 0], {3, 0})
    assert np.array_equal(made.draws, uniforms(7, 5))
    named = msgspec.structs.replace(request([110]), rid="theirs")
    assert job(named).rid == "theirs"


@pytest.mark.parametrize(("room", "expected"), [(10, 5), (5, 3)])
async def test_the_budget_is_the_shorter_of_request_and_context(room: int, expected: int) -> None:
    made = job(request([110, 100], max_new_tokens=5), room)
    ends = [made.take(1, -0.5) for _ in range(expected)]
    assert ends == [None] * (expected - 1) + ["length"]


async def test_a_stop_on_the_last_token_counts_as_a_stop() -> None:
    made = job(request([110], max_new_tokens=2, stop=(105,)))
    assert [made.take(2, -0.25), made.take(1, -0.5)] == [None, "stop"]
    reply = made.reply("stop", VOCABULARY, 4)
    meta = reply.meta_info
    assert reply.output_ids == (110, 105)
    assert meta.output_token_logprobs == ((-0.25, 110, None), (-0.5, 105, None))
    assert meta.weight_versions == (WeightVersion("4", 0, 2),)
    assert meta.finish_reason is not None
    assert (meta.finish_reason.matched, meta.finish_reason.length) == (105, None)


async def test_an_abort_without_tokens_names_no_sampling_version() -> None:
    made = job(msgspec.structs.replace(request([110]), return_logprob=False))
    reply = made.reply("abort", VOCABULARY, 4, "closed")
    meta = reply.meta_info
    assert (reply.output_ids, meta.weight_versions, meta.weight_version) == ((), (), "4")
    assert meta.output_token_logprobs is None
    assert meta.finish_reason is not None
    assert meta.finish_reason.message == "closed"


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (request([]), "prompt of 0 tokens.*engine mine takes 1 to 9 tokens"),
        (request([110] * 10), r"prompt of 10 tokens.*max_context_tokens 10"),
        (request([110, 101]), "engine mine: input_ids: token id 101 at position 1"),
        (request([110], max_new_tokens=0), "max_new_tokens is 0"),
        (msgspec.structs.replace(request([110]), logprob_start_len=0), "teacher server"),
        (msgspec.structs.replace(request([110]), top_logprobs_num=1), "teacher server"),
    ],
)
async def test_what_no_engine_can_serve_is_refused(wanted: GenerateRequest, message: str) -> None:
    with pytest.raises(GenerateApiError, match=message):
        job(wanted)
