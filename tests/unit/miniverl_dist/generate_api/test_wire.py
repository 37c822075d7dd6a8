"""The wire models against recorded replies of SGLang 0.5.23, and the rules for input logprobs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import (
    MalformedReplyError,
    NotFiniteError,
    ReplyMismatchError,
    RequestRejectedError,
)
from miniverl_dist.generate_api.incoming import decode_requests
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    SamplingParams,
    WeightVersion,
    checked_logprobs,
    decode_batch_reply,
    decode_input_logprobs,
    decode_reply,
    encode_replies,
    encode_request,
    error_message,
    scoring_request,
)

REPLIES = Path(__file__).parents[3] / "fixtures" / "sglang_replies"
BATCHES = {"batch", "n2"}
ERRORS = {
    "bad_len": "max_new_tokens must be at least 0, got -1.",
    "bad_sp": "temperature must be a non-negative finite number, got -1.",
    "empty_ids": "input_ids cannot be empty.",
    "lp_str": 'invalid type: string "yes", expected a value or an array of values for BoolOrList',
    "no_input": "Either text, input_ids or input_embeds should be provided.",
}
LONG_ERRORS = {
    "bad_type": "1 validation error:",
    "batch_err": "The input (5000 tokens) is longer than",
    "lp_gt_len": "req.logprob_start_len=50 is higher than",
    "notjson": "1 validation error:",
    "too_long": "The input (5000 tokens) is longer than",
    "too_long_plus_new": "Requested token count exceeds",
    "unk_sp": "unknown field `foo`, expected one of",
}
OTHER_ENDPOINTS = {"checker_qwen3", "checker_qwen3_moe"}
SINGLES = sorted(
    path.stem
    for path in REPLIES.glob("*.json")
    if path.stem not in BATCHES | set(ERRORS) | set(LONG_ERRORS) | OTHER_ENDPOINTS
)
# The request that lp_mid.json, lp_last.json and others answer.
HELLO = (39, 68, 75, 75, 78)


def recorded(name: str) -> bytes:
    return (REPLIES / f"{name}.json").read_bytes()


def reply_with(entries: object) -> GenerateReply:
    meta = {"id": "x", "finish_reason": None, "prompt_tokens": 5, "completion_tokens": 0}
    return decode_reply(
        json.dumps({"meta_info": meta | {"input_token_logprobs": entries}}).encode()
    )


# ---- recorded replies


def test_the_fixtures_are_there() -> None:
    assert len(SINGLES) >= 15


@pytest.mark.parametrize("name", SINGLES)
def test_every_recorded_reply_decodes_to_what_it_says(name: str) -> None:
    plain = json.loads(recorded(name))
    reply = decode_reply(recorded(name))
    meta = plain["meta_info"]
    assert reply.output_ids == tuple(plain["output_ids"])
    assert reply.text == plain["text"]
    assert reply.meta_info.id == meta["id"]
    assert reply.meta_info.prompt_tokens == meta["prompt_tokens"]
    assert reply.meta_info.cached_tokens == meta["cached_tokens"]
    for field in ("input_token_logprobs", "output_token_logprobs"):
        expected = meta.get(field)
        found = getattr(reply.meta_info, field)
        assert (None if found is None else [list(entry) for entry in found]) == expected


@pytest.mark.parametrize("name", sorted(BATCHES))
def test_recorded_batches_decode(name: str) -> None:
    replies = decode_batch_reply(recorded(name))
    assert [reply.meta_info.id for reply in replies] == [
        each["meta_info"]["id"] for each in json.loads(recorded(name))
    ]
    with pytest.raises(MalformedReplyError):
        decode_reply(recorded(name))


def test_finish_reasons_and_versions() -> None:
    eos, cut = decode_reply(recorded("eos")), decode_reply(recorded("lp_m1_gen"))
    stopped = decode_reply(recorded("stop_str"))
    assert eos.meta_info.finish_reason is not None
    assert (eos.meta_info.finish_reason.type, eos.meta_info.finish_reason.matched) == ("stop", 258)
    assert eos.output_ids == (258,)
    assert stopped.meta_info.finish_reason is not None
    assert stopped.meta_info.finish_reason.matched == "s"
    assert cut.meta_info.weight_versions == (WeightVersion("default", 0, 3),)


@pytest.mark.parametrize(("name", "sentence"), sorted(ERRORS.items()))
def test_error_sentences_come_out_whole(name: str, sentence: str) -> None:
    assert error_message(recorded(name)) == sentence


@pytest.mark.parametrize(("name", "start"), sorted(LONG_ERRORS.items()))
def test_long_error_sentences_come_out_in_one_line(name: str, start: str) -> None:
    message = error_message(recorded(name))
    assert message.startswith(start)
    assert "\n" not in message
    assert len(message) <= 500


def test_errors_that_are_no_json_come_out_as_text() -> None:
    assert (
        error_message(b"<html>\n <b>Bad Gateway</b></html>") == "<html> <b>Bad Gateway</b></html>"
    )
    assert error_message(b'{"detail": "Not Found"}') == "Not Found"
    assert error_message(b"") == "(empty body)"
    assert error_message(b"\xff\xfe") == "\ufffd\ufffd"
    assert error_message(b"[" * 100_000).startswith("[[[")


# ---- requests


def test_a_request_spells_out_every_sampling_parameter() -> None:
    # A server's preferred sampling parameters fill in whatever is left out.
    body = json.loads(encode_request(GenerateRequest(input_ids=HELLO)))
    assert body["sampling_params"] == {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": 128,
        "stop_token_ids": [],
        "skip_special_tokens": True,
        "no_stop_trim": False,
    }
    direct = json.loads(msgspec.json.encode(GenerateRequest(input_ids=HELLO)))
    assert direct["sampling_params"]["temperature"] == 1.0


def test_a_request_holds_only_sampling_fields_that_sglang_knows() -> None:
    known = set(re.findall(r"`(\w+)`", json.loads(recorded("unk_sp"))["error"].split("one of")[1]))
    full = SamplingParams(stop_token_ids=(1,), sampling_seed=7, no_stop_trim=True)
    body = json.loads(encode_request(GenerateRequest((1,), full, rid="r", extra_key="k")))
    assert set(body["sampling_params"]) <= known
    assert len(known) > 20
    assert body["sampling_params"]["sampling_seed"] == 7
    assert "null" not in encode_request(GenerateRequest((1,))).decode()


def test_a_request_survives_the_wire() -> None:
    request = GenerateRequest(
        (5, 6),
        SamplingParams(0.5, max_new_tokens=3, stop_token_ids=(9,)),
        True,
        1,
        2,
        True,
        "r",
        "k",
    )
    assert decode_requests(encode_request(request)) == ([request], False)


def test_a_batch_spreads_single_values_and_takes_lists() -> None:
    body = {
        "input_ids": [[39, 68], [75, 75, 78]],
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "logprob_start_len": [0, 1],
        "rid": "ab",
        "a field of tomorrow": 1,
    }
    requests, is_batch = decode_requests(json.dumps(body).encode())
    assert is_batch
    assert [r.input_ids for r in requests] == [(39, 68), (75, 75, 78)]
    assert [r.logprob_start_len for r in requests] == [0, 1]
    assert [r.rid for r in requests] == ["ab_0", "ab_1"]
    assert all(r.return_logprob and r.sampling_params.max_new_tokens == 1 for r in requests)
    single, is_batch = decode_requests(b'{"input_ids": [[4]], "rid": "one"}')
    assert (single[0].input_ids, single[0].rid, is_batch) == ((4,), "one", True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "malformed|truncated"),
        (b"null", "Expected `object`"),
        (b"{}", "input_ids are required"),
        (b'{"text": "hello"}', "input_ids are required"),
        (b'{"input_ids": "abc"}', "input_ids: Expected `array`, got `str`"),
        (b'{"input_ids": [1, "2"]}', r"Expected `int`, got `str` - at `\$\[1\]`"),
        (b'{"input_ids": [1.5]}', "Expected `int`, got `float`"),
        (b'{"input_ids": [[1], 2]}', "Expected `array`, got `int`"),
        (b'{"input_ids": [true]}', "Expected `int`, got `bool`"),
        (b'{"input_ids": ' + b"[" * 100_000, "input_ids|recursion|truncated"),
        (b'{"input_ids": [1], "sampling_params": {"foo": 1}}', "unknown field `foo`"),
        (b'{"input_ids": [1], "sampling_params": {"temperature": 1e999}}', "out of range"),
        (b'{"input_ids": [1], "sampling_params": {"temperature": NaN}}', "malformed"),
        (b'{"input_ids": [1], "return_logprob": "yes"}', "Expected `bool | array | null`"),
        (b'{"input_ids": [1], "stream": true}', "stream"),
        (b'{"input_ids": [[1], [2]], "logprob_start_len": [0]}', "1 entries for 2 prompts"),
        (b'{"input_ids": [1], "rid": "\xff"}', "utf-?8|UTF-?8|codec"),
    ],
)
def test_bad_bodies_are_rejected_with_the_place(body: bytes, message: str) -> None:
    with pytest.raises(RequestRejectedError, match=message) as caught:
        decode_requests(body)
    assert caught.value.status == 400


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:0123456789.einput_ds- ').map(str.encode))
def test_any_bytes_are_a_request_or_a_rejection(body: bytes) -> None:
    try:
        requests, _ = decode_requests(b'{"input_ids":' + body)
    except RequestRejectedError:
        return
    assert all(isinstance(token, int) for r in requests for token in r.input_ids)


# ---- replies that we write


def test_our_replies_have_sglangs_form() -> None:
    reply = decode_reply(recorded("lp_mid"))
    written = json.loads(encode_replies([reply], is_batch=False))
    original = json.loads(recorded("lp_mid"))
    assert written["meta_info"].items() <= original["meta_info"].items()
    assert written["meta_info"]["input_token_logprobs"][0] == [None, 75, None]
    for always in ("cached_tokens", "weight_version", "weight_versions", "finish_reason"):
        assert always in written["meta_info"]
    assert "input_top_logprobs" not in written["meta_info"]
    assert decode_reply(encode_replies([reply], is_batch=False)) == reply
    assert decode_batch_reply(encode_replies([reply], is_batch=True)) == [reply]


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"{}",
        b'{"meta_info": {"id": "x"}}',
        b'{"text": "a", "meta_info": {"id": "x", "finish_reason": null, "prompt_tokens": 1',
        b"<html></html>",
        b"\xff",
        b"[" * 100_000,
        recorded("lp_mid")[:-40],
    ],
)
def test_malformed_replies_raise(body: bytes) -> None:
    with pytest.raises(MalformedReplyError, match=f"reply of {len(body)} bytes"):
        decode_reply(body)


# ---- input logprobs


def test_peer_6_the_first_entry_has_no_logprob_so_ask_one_earlier() -> None:
    request = scoring_request(HELLO, 3)
    assert (request.logprob_start_len, request.return_logprob) == (2, True)
    assert request.sampling_params.max_new_tokens == 0
    scores = decode_input_logprobs(decode_reply(recorded("lp_mid")), input_ids=HELLO, start=3)
    assert scores.tolist() == [-7.104008674621582, -5.065382957458496]


def test_the_first_logprob_null_never_becomes_zero() -> None:
    reply = decode_reply(recorded("lp_mid"))
    scores = decode_input_logprobs(reply, input_ids=HELLO, start=3)
    assert len(scores) == 2  # not three with a 0.0 in front
    assert (scores < -1).all()
    last = decode_input_logprobs(decode_reply(recorded("lp_last")), input_ids=HELLO, start=5)
    assert last.shape == (0,)


def test_text_beside_the_logprobs_is_ignored() -> None:
    reply = decode_reply(recorded("lp_mid_text"))
    entries = reply.meta_info.input_token_logprobs
    assert entries is not None
    ids = (0, 0, 0, *(entry[1] for entry in entries))
    scores = decode_input_logprobs(reply, input_ids=ids, start=4)
    assert scores.tolist() == [entry[0] for entry in entries[1:]]


@pytest.mark.parametrize("start", [0, -1, 6])
def test_scoring_from_outside_the_text_is_an_error(start: int) -> None:
    with pytest.raises(ValueError, match="expected 1 to 5"):
        scoring_request(HELLO, start)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        (None, "no input_token_logprobs"),
        ([], "0 entries, expected 3"),
        ([[None, 75, None], [-1.0, 75, None]], "2 entries, expected 3"),
        ([[None, 75, None], [-1.0, 75, None], [-1, 78, None], [-1, 9, None]], "4 entries"),
        ([[None, 75, None], [-1.0, 74, None], [-1.0, 78, None]], "id 74 at position 3.* id 75"),
        ([[None, 68, None], [-1.0, 75, None], [-1.0, 75, None]], "id 68 at position 2"),
        ([[-2.0, 75, None], [-1.0, 75, None], [-1.0, 78, None]], "shifted by one"),
    ],
)
def test_replies_about_something_else_are_a_mismatch(entries: object, message: str) -> None:
    with pytest.raises(ReplyMismatchError, match=message):
        decode_input_logprobs(reply_with(entries), input_ids=HELLO, start=3)


@pytest.mark.parametrize(
    "bad", [None, float("nan"), float("-inf"), float("inf"), -3.4028234663852886e38, -65504.0, 0.5]
)
def test_peer_12_inf_and_nan_teacher_logprobs_are_refused(bad: float | None) -> None:
    # null is how orjson and serde write NaN and -inf, the bare words are Python's own; the large
    # finite numbers are -inf clamped to the lowest float32 and float16.
    reply = reply_with([[None, 75, None], [-1.0, 75, None], [bad, 78, None]])
    with pytest.raises(NotFiniteError, match=r"position 4 \(1 of 2 unusable\)"):
        decode_input_logprobs(reply, input_ids=HELLO, start=3)


def test_rounding_above_zero_counts_as_zero() -> None:
    scores = checked_logprobs(np.array([1e-6, 0.0, -0.5], dtype=np.float32), first_position=1)
    assert scores.tolist() == [0.0, 0.0, -0.5]
    assert scores.dtype == np.float64


@settings(deadline=None)
@given(st.lists(st.integers(0, 500), min_size=2, max_size=40), st.data())
def test_scores_come_back_as_they_were_sent(ids: list[int], data: st.DataObject) -> None:
    start = data.draw(st.integers(1, len(ids)))
    count = len(ids) - start
    values = data.draw(st.lists(st.floats(-60000, 0), min_size=count, max_size=count))
    entries = [(None, ids[start - 1], None), *zip(values, ids[start:], [None] * count, strict=True)]
    meta = MetaInfo("x", None, len(ids), 0, input_token_logprobs=tuple(entries))
    body = encode_replies([GenerateReply(meta)], is_batch=False)
    scores = decode_input_logprobs(decode_reply(body), input_ids=ids, start=start)
    assert scores.tolist() == [min(value, 0.0) for value in values]


def test_routed_experts_are_asked_for_by_prompt_and_come_back_as_text() -> None:
    [one], _ = decode_requests(encode_request(GenerateRequest((1,), return_routed_experts=True)))
    assert one.return_routed_experts
    body = b'{"input_ids": [[1], [2]], "return_routed_experts": [true, false]}'
    both, _ = decode_requests(body)
    assert [each.return_routed_experts for each in both] == [True, False]
    meta = MetaInfo("x", None, 1, 0, routed_experts="AAAA")
    assert decode_reply(encode_replies([GenerateReply(meta)], is_batch=False)).meta_info == meta
    plain = encode_replies([GenerateReply(MetaInfo("x", None, 1, 0))], is_batch=False)
    assert b"routed_experts" not in plain
