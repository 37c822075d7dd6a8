"""The form of a reply that scorers decode: same scores, same refusals as the whole reply."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import GenerateApiError, MalformedReplyError
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    ScoringReply,
    decode_input_logprobs,
    decode_json,
    scoring_request,
    version_key,
)

REPLIES = Path(__file__).parents[3] / "fixtures" / "sglang_replies"
WITH_LOGPROBS = sorted(
    path.stem
    for path in REPLIES.glob("*.json")
    if re.search(rb'"input_token_logprobs": ?\[\[', path.read_bytes())
    and path.read_bytes().startswith(b"{")
)
HELLO = (39, 68, 75, 75, 78)


def body_with(entries: object) -> bytes:
    meta = {"id": "x", "finish_reason": None, "prompt_tokens": 5, "completion_tokens": 0}
    return json.dumps({"meta_info": meta | {"input_token_logprobs": entries}}).encode()


def outcome(body: bytes, form: Any, ids: tuple[int, ...], start: int) -> object:
    """Scores, or the error's class and words."""
    try:
        reply = decode_json(body, form)
        return decode_input_logprobs(reply, input_ids=ids, start=start).tolist()
    except MalformedReplyError:
        return MalformedReplyError  # the words name the field of the form
    except GenerateApiError as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", WITH_LOGPROBS)
def test_recorded_replies_give_the_same_in_both_forms(name: str) -> None:
    body = (REPLIES / f"{name}.json").read_bytes()
    entries = json.loads(body)["meta_info"]["input_token_logprobs"]
    ids = (1, *(entry[1] for entry in entries))
    found = outcome(body, ScoringReply, ids, 2)
    assert found == outcome(body, GenerateReply, ids, 2)
    assert found == [entry[0] for entry in entries[1:]]


def test_there_are_recorded_replies_with_and_without_text() -> None:
    assert {"lp_mid", "lp_mid_text", "flatb64"} <= set(WITH_LOGPROBS)


LOGPROBS = st.one_of(
    st.floats(-20, 0),
    st.sampled_from([None, math.nan, -math.inf, math.inf, 0.5, -65504.0, 1e-4, -1e-7, 0, -3]),
)
ENTRIES = st.lists(st.tuples(LOGPROBS, st.integers(0, 3), st.sampled_from([None, "a", "[\ufffd,"])))


@settings(deadline=None, max_examples=300)
@given(entries=ENTRIES, first=st.sampled_from([None, -1.0]), data=st.data())
def test_any_reply_gives_the_same_in_both_forms(
    entries: list[tuple[float | None, int, str | None]], first: float | None, data: st.DataObject
) -> None:
    entries = [(first, 1, None), *entries]
    echoed = [entry[1] for entry in entries]
    ids = data.draw(st.sampled_from([echoed, [*echoed, 1], [*echoed[:-1], 2]]))
    body = body_with(entries)
    found = outcome(body, ScoringReply, (7, *ids), 2)
    assert found == outcome(body, GenerateReply, (7, *ids), 2)
    assert found is not MalformedReplyError


@pytest.mark.parametrize(
    "entries",
    [
        [[None, 75, None], [-1.0]],
        [[None, 75, None], [-1.0, "75", None]],
        [[None, 75, None], [-1.0, 75.5, None]],
        [[None, 75, None], ["-1.0", 75, None]],
        [[None, 75, None], None],
        [[None, 75, None], {"logprob": -1.0}],
        {"0": [None, 75, None]},
        "text",
    ],
)
def test_entries_of_another_form_are_malformed(entries: object) -> None:
    for form in (ScoringReply, GenerateReply):
        with pytest.raises(MalformedReplyError):
            decode_json(body_with(entries), form)  # type: ignore[arg-type]


def test_requests_carry_a_key_of_the_weights() -> None:
    assert scoring_request(HELLO, 3).extra_key is None
    assert scoring_request(HELLO, 3, extra_key=version_key(12)).extra_key == "policy-12"
    assert scoring_request(HELLO, 3).return_text_in_logprobs is False
