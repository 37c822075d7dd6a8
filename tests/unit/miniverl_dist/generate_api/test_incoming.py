"""What is counted in a body before its objects are made."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from miniverl_dist.errors import RequestRejectedError
from miniverl_dist.generate_api.incoming import decode_requests

MANY = 300_000


@pytest.mark.parametrize(
    ("body", "message", "status"),
    [
        (b'{"input_ids":[' + b"[1]," * MANY + b"[1]]}", f"a batch of {MANY + 1} prompts", 400),
        (b'{"input_ids":[' + b"[]," * MANY + b"[]]}", f"a batch of {MANY + 1} prompts", 400),
        (b'{"input_ids":[[' + b"],[" * MANY + b"]]}", f"a batch of {MANY + 1} prompts", 400),
        (
            b'{"input_ids":[' + b"1," * MANY + b"1]}",
            f"{MANY + 1} input tokens exceed the context length of 50 tokens",
            400,
        ),
        (
            b'{"input_ids":[[' + b"1," * MANY + b"1]]}",
            f"{MANY + 1} input tokens exceed the context length of 50 tokens in each of 4 prompts",
            400,
        ),
        (b'{"input_ids":[1],"rid":[' + b"null," * MANY + b"null]}", "beside input_ids", 413),
        (b'{"input_ids":[1],"sampling_params":[' + b"{}," * MANY + b"{}]}", "beside", 413),
        (
            b'{"input_ids":[1],"sampling_params":{"stop_token_ids":[' + b"1," * MANY + b"1]}}",
            "beside",
            413,
        ),
        (b'{"input_ids":[' + b"[1]," * MANY + b'[1]],"input_ids":[1]}', "beside", 413),
    ],
)
def test_no_body_is_decoded_that_would_be_refused_anyway(
    body: bytes, message: str, status: int
) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(RequestRejectedError) as caught:
            decode_requests(body, max_prompts=4, max_context_tokens=50)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert message in str(caught.value)
    assert caught.value.status == status
    assert peak < 4 * len(body)  # a prompt of three bytes would take more than 200


def test_what_just_fits_is_decoded() -> None:
    ids = [list(range(50))] * 4
    body = {"input_ids": ids, "rid": ["r" * 1000] * 4, "text": "x" * 60_000}
    requests, is_batch = decode_requests(
        json.dumps(body).encode(), max_prompts=4, max_context_tokens=50
    )
    assert is_batch
    assert [list(request.input_ids) for request in requests] == ids
    (one,), is_batch = decode_requests(
        json.dumps({"input_ids": ids[0]}).encode(), max_prompts=4, max_context_tokens=50
    )
    assert (list(one.input_ids), is_batch) == (ids[0], False)
    with pytest.raises(RequestRejectedError, match="a batch of 2 prompts, expected 1 to 1"):
        decode_requests(b'{"input_ids": [[1], [2]]}', max_prompts=1)


def test_of_a_key_given_twice_the_last_one_counts() -> None:
    (one,), _ = decode_requests(b'{"input_ids": [1], "input_ids": [2], "rid": "a", "rid": "b"}')
    assert (one.input_ids, one.rid) == ((2,), "b")
