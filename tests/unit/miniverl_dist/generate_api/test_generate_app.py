"""The server app over real HTTP: malformed input gets a 4xx in SGLang's form, never a 500."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import RequestRejectedError, ServerUnavailableError
from miniverl_dist.generate_api.app import ServerLimits, build_app, check_request, serving
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.incoming import decode_requests
from miniverl_dist.generate_api.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    ModelInfo,
    SamplingParams,
)

LIMITS = ServerLimits(vocab_size=512, max_context_tokens=200)
RECORDED = Path(__file__).parents[3] / "fixtures" / "sglang_replies"


@dataclass
class Parrot:
    """A handler that continues a prompt with its own first ids."""

    gate: asyncio.Event = field(default_factory=asyncio.Event)
    at_work: int = 0
    failure: Exception | None = None

    def __post_init__(self) -> None:
        self.gate.set()

    def model_info(self) -> ModelInfo:
        return ModelInfo(model_path="parrot", vocab_size=512)

    def check(self, request: GenerateRequest) -> None:
        if 13 in request.input_ids:
            raise RequestRejectedError("parrots do not say 13")

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.at_work += 1
        await self.gate.wait()
        if self.failure is not None:
            raise self.failure
        new = request.input_ids[: request.sampling_params.max_new_tokens]
        finish = FinishReason("length", length=len(new))
        meta = MetaInfo(request.rid or "none", finish, len(request.input_ids), len(new))
        return GenerateReply(meta, output_ids=new)


@dataclass
class Served:
    url: str
    session: aiohttp.ClientSession

    async def post(self, body: object, path: str = "/generate") -> tuple[int, Any]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with self.session.post(self.url + path, data=data) as response:
            assert response.content_type == "application/json"
            return response.status, await response.json()

    async def refusal(self, body: object) -> tuple[int, str]:
        status, answer = await self.post(body)
        assert set(answer) == {"error"}
        return status, answer["error"]["message"]


@asynccontextmanager
async def served(handler: Parrot, limits: ServerLimits = LIMITS) -> AsyncIterator[Served]:
    async with (
        serving(build_app(handler, limits=limits)) as url,
        aiohttp.ClientSession() as session,
    ):
        yield Served(url, session)


async def test_one_prompt_and_a_batch() -> None:
    params = {"max_new_tokens": 2}
    async with served(Parrot()) as server:
        assert server.url.startswith("http://127.0.0.1:")
        status, one = await server.post({"input_ids": [5, 6, 7], "sampling_params": params})
        assert (status, one["output_ids"]) == (200, [5, 6])
        batch = {"input_ids": [[5, 6, 7], [8]], "sampling_params": params, "rid": ["a", "b"]}
        status, two = await server.post(batch)
        assert [each["output_ids"] for each in two] == [[5, 6], [8]]
        assert [each["meta_info"]["id"] for each in two] == ["a", "b"]
        status, single = await server.post({"input_ids": [[5]], "sampling_params": params})
        assert (status, len(single)) == (200, 1)


async def test_the_client_and_the_app_understand_each_other() -> None:
    async with served(Parrot()) as server, GenerateClient(server.url) as client:
        assert await client.health()
        assert await client.model_info() == ModelInfo(model_path="parrot", vocab_size=512)
        request = GenerateRequest((1, 2), SamplingParams(max_new_tokens=1), rid="x")
        answer = await client.generate(request)
        assert (answer.output_ids, answer.meta_info.id) == ((1,), "x")
        with pytest.raises(RequestRejectedError, match="HTTP 400: parrots do not say 13"):
            await client.generate(GenerateRequest((13,), SamplingParams(max_new_tokens=1)))


async def test_one_bad_prompt_spoils_the_batch() -> None:
    parrot = Parrot()
    async with served(parrot) as server:
        status, message = await server.refusal(
            {"input_ids": [[1], [512]], "sampling_params": {"max_new_tokens": 1}}
        )
        assert (status, message) == (
            400,
            "token id 512 at position 0 is outside the vocabulary (0 to 511)",
        )
        status, _ = await server.refusal({"input_ids": [[1]] * 257})
        assert status == 400
        assert (await server.refusal(b'{"input_ids": [[]]}'))[0] == 400
    assert parrot.at_work == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_ids": []}, "input_ids cannot be empty"),
        ({"input_ids": [1, -1]}, "token id -1 at position 1 is outside the vocabulary"),
        ({"input_ids": [10**30]}, "outside the vocabulary"),
        (
            {"input_ids": [1] * 199},
            "199 input tokens and 2 new ones exceed the context length of 200",
        ),
        ({"input_ids": "abc"}, "Expected `array`, got `str`"),
        ({"logprob_start_len": 4}, "logprob_start_len is 4, expected -1 to 3"),
        ({"logprob_start_len": -2}, "logprob_start_len is -2"),
        ({"top_logprobs_num": -1}, "top_logprobs_num is -1"),
        ({"sampling_params": {"temperature": -1}}, "temperature is -1.0, expected >= 0"),
        ({"sampling_params": {"top_p": 0}}, "top_p is 0.0, expected above 0"),
        ({"sampling_params": {"top_k": 0}}, "top_k is 0, expected -1 or at least 1"),
        ({"sampling_params": {"min_p": 2}}, "min_p is 2.0"),
        ({"sampling_params": {"max_new_tokens": -1}}, "max_new_tokens is -1"),
        ({"sampling_params": {"stop_token_ids": [512]}}, "stop_token_ids is"),
        ({"sampling_params": {"sampling_seed": 2**70}}, "sampling_seed is"),
        ({"sampling_params": {"foo": 1}}, "unknown field `foo`"),
        ({"stream": True}, "stream"),
    ],
)
async def test_bad_requests_get_a_400_that_says_why(change: dict[str, Any], message: str) -> None:
    sound = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
    async with served(Parrot()) as server:
        assert (await server.post(sound))[0] == 200
        status, found = await server.refusal(sound | change)
    assert status == 400
    assert message in found


async def test_other_refusals_have_the_same_form() -> None:
    limits = replace(LIMITS, max_body_bytes=1000)
    async with served(Parrot(), limits) as server:
        assert (await server.refusal(b""))[0] == 400
        assert (await server.refusal(b"\xff{"))[0] == 400
        assert (await server.refusal(b"[" * 900))[0] == 400
        status, message = await server.refusal(b'{"input_ids": [' + b" " * 2000 + b"1]}")
        assert (status, "1000" in message) == (413, True)
        assert (await server.post({}, "/nowhere"))[0] == 404
        async with server.session.get(server.url + "/generate") as response:
            assert (response.status, response.headers["Allow"]) == (405, "POST")
            assert "message" in (await response.json())["error"]


async def test_a_body_that_never_comes_gets_a_408() -> None:
    limits = replace(LIMITS, body_deadline_s=0.03)
    async with served(Parrot(), limits) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[-1]))
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        async with asyncio.timeout(60):
            assert b" 408 " in await reader.readline()
        writer.close()
        await writer.wait_closed()


async def test_a_body_that_is_no_gzip_is_a_4xx() -> None:
    async with served(Parrot()) as server:
        headers = {"Content-Encoding": "gzip"}
        async with server.session.post(
            server.url + "/generate", data=b"not gzip", headers=headers
        ) as response:
            assert 400 <= response.status < 500


async def test_a_defect_of_the_handler_is_a_500_with_its_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    parrot = Parrot(failure=ZeroDivisionError("by zero"))
    async with served(parrot) as server:
        with caplog.at_level(logging.ERROR):
            status, message = await server.refusal({"input_ids": [1]})
        assert (status, message) == (500, "ZeroDivisionError: by zero")
        assert "by zero" in caplog.text
        parrot.failure = ServerUnavailableError("weights are being loaded")
        async with server.session.post(server.url + "/generate", data=b'{"input_ids":[1]}') as r:
            assert (r.status, r.headers["Retry-After"]) == (503, "1")
        parrot.failure = None
        assert (await server.post({"input_ids": [1]}))[0] == 200


async def test_a_full_queue_is_a_503_and_empties_again() -> None:
    parrot = Parrot()
    parrot.gate.clear()
    async with served(parrot, replace(LIMITS, max_requests=2)) as server:
        first = asyncio.create_task(server.post({"input_ids": [[1], [2]]}))
        async with asyncio.timeout(60):
            while parrot.at_work < 2:  # noqa: ASYNC110 - the handler has no event for this
                await asyncio.sleep(0.001)
            status, message = await server.refusal({"input_ids": [3]})
            assert (status, "queue is full" in message) == (503, True)
            async with server.session.get(server.url + "/health") as response:
                assert response.status == 200
            parrot.gate.set()
            assert (await first)[0] == 200
            assert (await server.post({"input_ids": [3]}))[0] == 200


async def test_a_rid_in_use_is_rejected() -> None:
    parrot = Parrot()
    async with served(parrot) as server:
        assert (await server.refusal({"input_ids": [[1], [2]], "rid": ["a", "a"]}))[0] == 400
        parrot.gate.clear()
        first = asyncio.create_task(server.post({"input_ids": [1], "rid": "a"}))
        async with asyncio.timeout(60):
            while parrot.at_work < 1:  # noqa: ASYNC110 - the handler has no event for this
                await asyncio.sleep(0.001)
            status, message = await server.refusal({"input_ids": [1], "rid": "a"})
            assert (status, message) == (400, "rid 'a' is already in use")
            parrot.gate.set()
            await first
            assert (await server.post({"input_ids": [1], "rid": "a"}))[0] == 200


async def test_closing_waits_for_requests_at_work() -> None:
    parrot = Parrot()
    parrot.gate.clear()
    async with aiohttp.ClientSession() as session:
        async with serving(build_app(parrot, limits=LIMITS)) as url:
            first = asyncio.create_task(Served(url, session).post({"input_ids": [1]}))
            async with asyncio.timeout(60):
                while parrot.at_work < 1:  # noqa: ASYNC110 - the handler has no event for this
                    await asyncio.sleep(0.001)
            asyncio.get_running_loop().call_later(0.02, parrot.gate.set)
        assert (await first)[0] == 200


async def test_the_errors_of_a_client_that_hangs_up_stay_inside() -> None:
    async with served(Parrot()) as server, GenerateClient(server.url) as client:
        _, writer = await asyncio.open_connection("127.0.0.1", int(server.url.split(":")[-1]))
        writer.write(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        await writer.drain()
        writer.transport.abort()
        assert await client.health()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)
FIELDS = sorted(
    {*msgspec.structs.asdict(GenerateRequest((1,))), "stream", "text"} - {"sampling_params"}
)
PARAMS = sorted(msgspec.structs.asdict(SamplingParams()))


@settings(deadline=None, max_examples=400)
@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON | st.lists(st.integers(-1, 600)), max_size=4),
    st.dictionaries(st.sampled_from(PARAMS), JSON, max_size=3),
)
def test_whatever_passes_the_checks_is_sound(top: dict[str, Any], params: dict[str, Any]) -> None:
    body = {"input_ids": [1, 2]} | top | {"sampling_params": params}
    try:
        requests, _ = decode_requests(json.dumps(body).encode())
        for request in requests:
            check_request(request, LIMITS)
    except RequestRejectedError:
        return
    for request in requests:
        assert all(0 <= token < 512 for token in request.input_ids)
        assert 1 <= len(request.input_ids) <= 200 - request.sampling_params.max_new_tokens
        assert -1 <= request.logprob_start_len <= len(request.input_ids)
        assert 0 <= request.sampling_params.temperature < float("inf")


async def test_the_errors_of_the_app_read_like_sglangs_to_our_client() -> None:
    """Each recorded bad request, sent to our app, ends as the same class of error."""
    long = [1] * 5000
    bad: list[dict[str, Any]] = [
        {"input_ids": [1], "sampling_params": {"max_new_tokens": -1}},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "temperature": -1}},
        {"input_ids": "abc"},
        {"input_ids": []},
        {"input_ids": [1], "return_logprob": True, "logprob_start_len": 50},
        {"input_ids": [1], "return_logprob": "yes"},
        {"sampling_params": {"max_new_tokens": 1}},
        {"input_ids": long, "sampling_params": {"max_new_tokens": 4}},
        {"input_ids": [1], "sampling_params": {"max_new_tokens": 1, "foo": 1}},
    ]
    async with served(Parrot()) as server:
        statuses = [(await server.refusal(body))[0] for body in bad]
        assert statuses == [400] * len(bad)
        client = GenerateClient(server.url, limits=ClientLimits(max_retries=0))
        async with client:
            with pytest.raises(RequestRejectedError, match="exceed the context length"):
                await client.generate(GenerateRequest(tuple(long)))
