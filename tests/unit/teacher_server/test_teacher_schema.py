"""A thousand bodies from the declared schema and its violations: a 200, or a 4xx with words."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import jsonschema
import pytest
import torch
from aiohttp import web
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.generate_api.app import serving
from teacher_server.app import ServiceLimits, build_teacher_app
from teacher_server.scorer import PrefillScorer, ToyCausalLM

IDS = list(range(3, 3 + 2 * 60, 2))
CONTEXT = 48
ONE_DEADLINE_S = 20.0
REQUEST_SCHEMA: dict[str, Any] = {
    "type": "object",
    "required": ["input_ids", "sampling_params"],
    "properties": {
        "input_ids": {
            "type": "array",
            "items": {"enum": IDS},
            "minItems": 1,
            "maxItems": CONTEXT,
        },
        "sampling_params": {
            "type": "object",
            "required": ["max_new_tokens"],
            "properties": {
                "max_new_tokens": {"const": 0},
                "temperature": {"type": "number", "minimum": 0, "maximum": 1.7e308},
                "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
                "top_k": {"anyOf": [{"const": -1}, {"type": "integer", "minimum": 1}]},
                "min_p": {"type": "number", "minimum": 0, "maximum": 1},
                "stop_token_ids": {
                    "type": "array",
                    "items": {"type": "integer", "minimum": 0, "maximum": IDS[-1]},
                },
                "sampling_seed": {
                    "type": ["integer", "null"],
                    "exclusiveMinimum": -(2**63),
                    "exclusiveMaximum": 2**63,
                },
                "skip_special_tokens": {"type": "boolean"},
                "no_stop_trim": {"type": "boolean"},
            },
            "additionalProperties": False,
        },
        "return_logprob": {"type": ["boolean", "null"]},
        "logprob_start_len": {"anyOf": [{"type": "integer", "minimum": -1}, {"type": "null"}]},
        "top_logprobs_num": {"type": ["integer", "null"], "minimum": 0, "maximum": 8},
        "return_text_in_logprobs": {"enum": [False, None]},
        "rid": {"type": ["string", "null"]},
        "extra_key": {"type": ["string", "null"]},
        "stream": {"enum": [False, None]},
    },
}
"""What one prompt may say to this server; fields it does not name are ignored, as in SGLang."""


def is_int(checker: Any, value: object) -> bool:
    """JSON Schema takes 1.0 for an integer; the contract does not."""
    del checker
    return isinstance(value, int) and not isinstance(value, bool)


def is_finite(checker: Any, value: object) -> bool:
    """Python's JSON also writes NaN and Infinity, which are none."""
    return is_int(checker, value) or (isinstance(value, float) and math.isfinite(value))


def is_text(checker: Any, value: object) -> bool:
    """Text that UTF-8 can hold: no half of a surrogate pair."""
    del checker
    return isinstance(value, str) and not any("\ud800" <= each <= "\udfff" for each in value)


CHECKER = jsonschema.Draft202012Validator.TYPE_CHECKER.redefine_many(
    {"integer": is_int, "number": is_finite, "string": is_text}
)
VALIDATOR = jsonschema.validators.extend(jsonschema.Draft202012Validator, type_checker=CHECKER)(
    REQUEST_SCHEMA
)

PARAMS = REQUEST_SCHEMA["properties"]["sampling_params"]["properties"]
FIELDS = [name for name in REQUEST_SCHEMA["properties"] if name != "sampling_params"]

sound_params = st.fixed_dictionaries(
    {"max_new_tokens": st.just(0)},
    optional={
        "temperature": st.floats(0, 2) | st.just(0),
        "top_p": st.floats(0.01, 1),
        "top_k": st.just(-1) | st.integers(1, 2**40),
        "min_p": st.floats(0, 1),
        "stop_token_ids": st.lists(st.sampled_from(IDS), max_size=3),
        "sampling_seed": st.none() | st.integers(0, 2**40),
        "skip_special_tokens": st.booleans(),
        "no_stop_trim": st.booleans(),
    },
)
ids = st.lists(st.sampled_from(IDS), min_size=1, max_size=CONTEXT)


@st.composite
def sound_bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Bodies that the schema and the server accept."""
    found = draw(ids)
    optional = {
        "return_logprob": st.none() | st.booleans(),
        "logprob_start_len": st.none() | st.integers(-1, len(found)),
        "top_logprobs_num": st.none() | st.integers(0, 8),
        "extra_key": st.none()
        | st.text(st.characters(codec="utf-8", categories=["L", "N"]), max_size=5),
        "stream": st.sampled_from([False, None]),
        "unheard_of": st.none()
        | st.text(st.characters(codec="utf-8", categories=["L", "N"]), max_size=5),
    }
    required = {"input_ids": st.just(found), "sampling_params": sound_params}
    return draw(st.fixed_dictionaries(required, optional=optional))


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(
        [-1, 0, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**400, 1e308, "", "0", "\ud800"]
    )
    | st.text(max_size=6),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=3)
    ),
    max_leaves=8,
)


@st.composite
def spoilt_bodies(draw: st.DrawFn) -> Any:
    """A sound body with one to three parts replaced, removed, multiplied or made a list."""
    body = draw(sound_bodies())
    for _ in range(draw(st.integers(1, 3))):
        where = draw(st.sampled_from(["top", "params", "ids", "missing", "column", "whole"]))
        if where == "top":
            body[draw(st.sampled_from(FIELDS))] = draw(anything)
        elif where == "params" and isinstance(body["sampling_params"], dict):
            body["sampling_params"][draw(st.sampled_from([*sorted(PARAMS), "foo"]))] = draw(
                anything
            )
        elif where == "ids":
            kind = st.integers(-2, 140) | st.lists(st.integers(-2, 140), max_size=60) | anything
            body["input_ids"] = draw(st.lists(kind, max_size=60))
        elif where == "missing":
            body.pop(draw(st.sampled_from(sorted(body))), None)
            body.setdefault("sampling_params", {})
        elif where == "column":
            body[draw(st.sampled_from(FIELDS))] = draw(st.lists(anything, max_size=3))
        elif draw(st.integers(0, 9)) == 0:
            return draw(anything)
    return body


@st.composite
def broken_bytes(draw: st.DrawFn) -> bytes:
    """A body cut short, with bytes flipped, or that was never JSON."""
    raw = bytearray(json.dumps(draw(sound_bodies())).encode())
    for _ in range(draw(st.integers(0, 3))):
        raw[draw(st.integers(0, len(raw) - 1))] = draw(st.integers(0, 255))
    cut = draw(st.integers(0, len(raw)))
    return bytes(raw[:cut]) if draw(st.booleans()) else bytes(raw) + draw(st.binary(max_size=8))


@dataclass
class Service:
    """The real app around a toy model, on a loop of its own for synchronous tests."""

    loop: asyncio.AbstractEventLoop
    url: str
    session: aiohttp.ClientSession
    statuses: dict[int, int] = field(default_factory=dict)

    def send(self, method: str, path: str, **request: Any) -> tuple[int, bytes]:
        """(status, body); a server that hangs fails the test."""

        async def ask() -> tuple[int, bytes]:
            async with asyncio.timeout(ONE_DEADLINE_S):
                async with self.session.request(method, self.url + path, **request) as response:
                    return response.status, await response.read()

        status, body = self.loop.run_until_complete(ask())
        self.statuses[status] = self.statuses.get(status, 0) + 1
        return status, body

    def raw(self, data: bytes) -> bytes:
        """The first line that answers bytes on a bare connection; b"" where it is closed."""

        async def ask() -> bytes:
            host, port = self.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(data)
            writer.write_eof()
            async with asyncio.timeout(ONE_DEADLINE_S):
                line = await reader.readline()
            writer.close()
            return line

        return self.loop.run_until_complete(ask())


def toy_app() -> web.Application:
    torch.set_num_threads(1)
    config = ToyModelConfig(
        kind="toy", hidden_size=16, num_heads=2, ffn_size=16, max_context_tokens=CONTEXT
    )
    scorer = PrefillScorer(ToyCausalLM(ToyModel(config, IDS)), name="toy", chunk_tokens=16)
    return build_teacher_app(scorer, limits=ServiceLimits(max_top_logprobs=8, max_batch_size=16))


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        manager = serving(toy_app())
        url = loop.run_until_complete(manager.__aenter__())
        session = loop.run_until_complete(_session())
        yield Service(loop, url, session)
        loop.run_until_complete(session.close())
        loop.run_until_complete(manager.__aexit__(None, None, None))


async def _session() -> aiohttp.ClientSession:
    return aiohttp.ClientSession()


def require_words(status: int, body: bytes) -> None:
    """A refusal of the request itself, in the contract's form."""
    assert 400 <= status < 500, (status, body)
    error = json.loads(body)["error"]
    assert error["message"].strip()
    assert error["code"] == status


def is_refused(body: Any) -> bool:
    """Whether a body that is one prompt is wrong: by the schema, or by its two lengths."""
    if not VALIDATOR.is_valid(body):
        return True
    return (body.get("logprob_start_len") or 0) > len(body["input_ids"])


quiet = settings(
    deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large]
)


HOSTILE: list[Any] = [
    *(None, True, False, -2, -1, 0, 1, 2, 8, 9, 47, 48, 49, 0.5, 1.0, 1.5, -0.1, 1e308),
    *(2**31, 2**63, 2**64, -(2**63) - 1, 10**400, float("nan"), float("inf")),
    *("", "x", "1", "null", "\ud800", "a" * 5000, [], {}, [[]], [{}], [None], {"a": 1}, [3], [-1]),
    *([2], [1e3], ["3"], [True], [[3]], IDS, IDS[:CONTEXT], [3] * (CONTEXT + 1), [2**70]),
]
BASE: dict[str, Any] = {
    "input_ids": IDS[:9],
    "sampling_params": {"max_new_tokens": 0},
    "return_logprob": True,
    "logprob_start_len": 0,
}


@pytest.mark.parametrize("field", [*FIELDS, "sampling_params", *PARAMS])
def test_each_field_with_each_hostile_value(service: Service, field: str) -> None:
    """Answered where the schema allows it, refused where it does not."""
    for value in HOSTILE:
        if field in PARAMS:
            body = BASE | {"sampling_params": BASE["sampling_params"] | {field: value}}
        else:
            body = BASE | {field: value}
        status, answer = service.send("POST", "/generate", data=json.dumps(body))
        if status != 200:
            require_words(status, answer)
        if not is_refused(body):
            assert status == 200, (value, answer)
        elif status == 200:
            # Beyond one prompt the contract allows a list with the value of each prompt.
            assert isinstance(value, list), (field, value)
            assert field not in PARAMS
            assert len(value) == 1
            assert not is_refused(BASE | {field: value[0]})


@pytest.mark.parametrize("digits", [25, 400, 5000, 100_000])
@pytest.mark.parametrize("sign", ["", "-"])
def test_numbers_of_many_digits(service: Service, digits: int, sign: str) -> None:
    """Python itself refuses to print those of more than 4,300."""
    number = sign + "9" * digits
    for name in ("logprob_start_len", "top_logprobs_num", "input_ids", "rid", *PARAMS):
        text = json.dumps(BASE | {name: "@"} if name not in PARAMS else BASE)
        if name in PARAMS:
            text = text.replace('"max_new_tokens": 0', f'"max_new_tokens": 0, "{name}": "@"')
        for value in (number, f"[{number}]", f"{number}.5", f"{number}e{'9' * 20}"):
            status, answer = service.send("POST", "/generate", data=text.replace('"@"', value))
            if status != 200:  # more than a double holds, or a temperature below its largest
                require_words(status, answer)


@settings(quiet, max_examples=250)
@given(sound_bodies())
def test_what_the_schema_allows_is_answered(service: Service, body: dict[str, Any]) -> None:
    assert not is_refused(body)
    status, answer = service.send("POST", "/generate", data=json.dumps(body))
    assert status == 200, answer
    meta = json.loads(answer)["meta_info"]
    first = body.get("logprob_start_len")
    if body.get("return_logprob"):
        size = 0 if first in (None, -1) else len(body["input_ids"]) - first
        assert len(meta["input_token_logprobs"]) == size
        if body.get("top_logprobs_num"):
            assert len(meta["input_top_logprobs"]) == size


def _without_columns_of_one(body: Any) -> Any:
    """One prompt may bring a field's value as a list of one, as a batch brings it."""
    if not isinstance(body, dict):
        return body
    return {
        name: value[0]
        if name != "input_ids" and isinstance(value, list) and len(value) == 1
        else value
        for name, value in body.items()
    }


@settings(quiet, max_examples=500)
@given(spoilt_bodies())
def test_what_the_schema_refuses_is_a_4xx_with_words(service: Service, body: Any) -> None:
    status, answer = service.send("POST", "/generate", data=json.dumps(body))
    if status == 200:
        # A batch is a list of such prompts, and columns of their fields.
        is_batch = isinstance(json.loads(answer), list)
        assert is_batch or not is_refused(_without_columns_of_one(body)), body
    else:
        require_words(status, answer)


@settings(quiet, max_examples=150)
@given(broken_bytes())
def test_bytes_that_are_no_json_are_a_4xx_with_words(service: Service, data: bytes) -> None:
    status, answer = service.send("POST", "/generate", data=data)
    if status != 200:  # a flipped bit may leave a sound body
        require_words(status, answer)


@settings(quiet, max_examples=100)
@given(
    st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "BREW"]),
    st.text(st.characters(codec="utf-8", exclude_characters="?#"), max_size=8)
    | st.sampled_from(["generate", "health", "ready", "metrics", "model_info", "../etc", "%00"]),
    st.dictionaries(
        st.sampled_from(["Content-Type", "Content-Encoding", "Accept", "Expect", "Authorization"]),
        st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=12),
        max_size=2,
    ),
)
def test_any_method_path_and_header(
    service: Service, method: str, path: str, headers: dict[str, str]
) -> None:
    headers.setdefault("Content-Type", "application/json")
    status, _ = service.send(method, "/" + path, headers=headers, data=b'{"input_ids": 1}')
    assert status == 200 or 400 <= status < 500


def test_bytes_that_are_no_http_are_a_400_or_a_closed_connection(service: Service) -> None:
    rng = random.Random(0)
    heads = [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET\r\n\r\n",
        b"POST /generate HTTP/9.9\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: x\r\n\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\nContent-Length: 5\r\n\r\n{}",
        b"POST /generate HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /generate HTTP/1.1\r\nHost: a\r\n" + b"A" * 20_000 + b": b\r\n\r\n",
        b"POST /" + b"x" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        *(rng.randbytes(rng.randint(1, 300)) + b"\r\n\r\n" for _ in range(100)),
    ]
    for head in heads:
        line = service.raw(head)
        assert line == b"" or line.split()[1].startswith(b"4"), (head[:80], line)
    assert service.send("GET", "/ready")[0] == 200


def test_the_properties_saw_both_kinds_of_answers(service: Service) -> None:
    """Runs last in this file: a generator that makes only refusals would prove little."""
    assert not any(status >= 500 for status in service.statuses)
    if sum(service.statuses.values()) >= 1000:  # not when a single test is picked
        assert service.statuses[200] > 200
        assert service.statuses[400] > 200
