from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from miniverl_dist.errors import RecordError
from miniverl_dist.schemas.messages import Message, ToolSchema
from miniverl_dist.schemas.trajectory import SpanKind
from rollout_server.policies import Turn
from rollout_server.transcript import Transcript
from tests.fake_stage import CHAT, call, wire

END = CHAT.turn_end_id
TOOLS = [ToolSchema(name="f", description="", parameters={})]
OPENING = list(CHAT.assistant_opening().token_ids)
CLOSING = list(CHAT.assistant_closing().token_ids)


def turn(text: str, *, finish: str = "turn_end", sampled: bool = True) -> Turn:
    ids = (*CHAT.tokenizer.encode(text), *((END,) if finish == "turn_end" else ()))
    return Turn(ids, (-0.5,) * len(ids) if sampled else None, (2,), finish)  # type: ignore[arg-type]


def started(*messages: Message) -> Transcript:
    transcript = Transcript(CHAT, TOOLS)
    transcript.add_messages(messages or [Message(role="user", content="go")])
    return transcript


def texts(transcript: Transcript) -> list[tuple[str, str]]:
    """(segment key, text) of each span."""
    return [
        (span.segment_key, CHAT.tokenizer.decode(transcript.token_ids[span.start : span.end]))
        for span in transcript.spans
    ]


def test_the_opening_belongs_to_the_span_before_it() -> None:
    transcript = started()
    prompt = transcript.open_assistant()
    assert prompt == transcript.token_ids
    assert prompt[-len(OPENING) :] == OPENING
    assert texts(transcript) == [("system:0", "s:f"), ("user:0", "u:goa:")]


def test_the_closing_belongs_to_the_span_behind_it() -> None:
    transcript = started()
    transcript.open_assistant()
    transcript.add_turn(turn("hi"), SpanKind.ASSISTANT_TEXT, "hi", [])
    before = len(transcript.token_ids)
    assert transcript.num_tokens == before + len(CLOSING)
    transcript.add_messages([Message(role="user", content="more")])
    assert texts(transcript)[2:] == [("assistant:0", "hi"), ("user:1", "\nu:more")]
    assert transcript.spans[-1].start == before
    assert transcript.num_tokens == len(transcript.token_ids)


def test_an_episode_that_ends_has_no_closing() -> None:
    transcript = started()
    transcript.open_assistant()
    transcript.add_turn(turn("hi"), SpanKind.ASSISTANT_FINAL, "hi", [])
    assert transcript.token_ids[-1] == END
    assert transcript.spans[-1].end == len(transcript.token_ids)


def test_a_turn_that_was_cut_gets_its_turn_end_as_context() -> None:
    transcript = started()
    transcript.open_assistant()
    transcript.add_turn(turn("hi", finish="length"), SpanKind.ASSISTANT_TOOL_CALL, "hi", [])
    span = transcript.spans[-1]
    transcript.add_tool_results([Message(role="tool", content="error")])
    assert transcript.token_ids[span.end : span.end + 1 + len(CLOSING)] == [END, *CLOSING]
    assert np.isnan(transcript.rollout_logprobs[span.end :]).all()
    assert np.isfinite(transcript.rollout_logprobs[span.start : span.end]).all()


def test_another_end_token_is_not_followed_by_a_turn_end() -> None:
    transcript = started()
    transcript.open_assistant()
    transcript.add_turn(turn("hi", finish="other_end"), SpanKind.ASSISTANT_TEXT, "hi", [])
    assert transcript.num_tokens == len(transcript.token_ids) + len(CLOSING)


@pytest.mark.parametrize("sampled", [True, False])
def test_only_what_was_sampled_has_logprobs_and_versions(sampled: bool) -> None:
    transcript = started()
    start = len(transcript.open_assistant())
    transcript.add_turn(turn("hi", sampled=sampled), SpanKind.ASSISTANT_TEXT, "hi", [])
    span = transcript.spans[-1]
    assert (span.sampled, span.weight_versions) == ((True, (2,)) if sampled else (False, ()))
    found = np.isfinite(transcript.rollout_logprobs)
    assert found.tolist() == [False] * start + [sampled] * 3


def test_results_that_follow_each_other_are_one_span() -> None:
    calls = [call(x=1), call(x=2)]
    transcript = started(
        Message(role="user", content="go"),
        Message(role="assistant", content=wire(*calls), tool_calls=tuple(calls)),
        Message(role="tool", content="one"),
        Message(role="tool", content="two"),
        Message(role="user", content="on"),
    )
    assert texts(transcript) == [
        ("system:0", "s:f"),
        ("user:0", "u:goa:"),
        ("assistant:0", wire(*calls)),
        ("tool:0", "\nt:one|two"),
        ("user:1", "u:on"),
    ]
    assert [span.message_index for span in transcript.spans] == [None, 0, 1, 2, 4]
    assert len(transcript.messages) == 5


def test_a_prefix_call_is_written_with_its_turn_end() -> None:
    made = call(x=1)
    transcript = started(
        Message(role="user", content="go"),
        Message(role="assistant", content=wire(made), tool_calls=(made,)),
        Message(role="tool", content="ok"),
    )
    span = transcript.spans[2]
    assert span.kind is SpanKind.ASSISTANT_TOOL_CALL
    assert not span.sampled
    assert transcript.token_ids[span.end - 1] == END


def test_two_assistant_messages_in_a_row_are_refused() -> None:
    """The opening of the second would end up in the written span of the first."""
    with pytest.raises(RecordError, match="two assistant messages in a row"):
        started(
            Message(role="user", content="go"),
            Message(role="assistant", content="one"),
            Message(role="assistant", content="two"),
        )


def test_without_tools_the_system_span_is_empty() -> None:
    transcript = Transcript(CHAT, [])
    transcript.add_messages([Message(role="user", content="go")])
    system, user = transcript.spans
    assert (system.kind, system.start, system.end) == (SpanKind.SYSTEM, 0, 0)
    assert user.start == 0


def test_what_was_written_never_changes() -> None:
    transcript = started()
    seen: list[list[int]] = []
    for index in range(4):
        seen.append(transcript.open_assistant())
        transcript.add_turn(turn(f"call {index}"), SpanKind.ASSISTANT_TOOL_CALL, "", [call()])
        seen.append(transcript.token_ids.copy())
        transcript.add_tool_results([Message(role="tool", content=f"{index}")])
    for record in seen:
        assert transcript.token_ids[: len(record)] == record
    ends = [(s.start, s.end) for s in transcript.spans]
    assert [start for start, _ in ends] == [0, *(end for _, end in ends[:-1])]
    assert ends[-1][1] == len(transcript.token_ids) == len(transcript.rollout_logprobs)


def test_the_prompt_is_a_copy() -> None:
    transcript = started()
    prompt = transcript.open_assistant()
    prompt.append(-1)
    assert transcript.token_ids[-1] != -1


def with_routing(made: Turn, num_rows: int, first: int) -> Turn:
    """Row t of this turn is [[first + t, 200]]: it can be told whose row was taken."""
    rows = np.full((num_rows, 1, 2), 200, dtype=np.uint8)
    rows[:, 0, 0] = first + np.arange(num_rows)
    return replace(made, routed_experts=rows)


def test_each_turn_brings_the_routing_of_what_no_earlier_turn_has_covered() -> None:
    transcript = started()
    assert transcript.routed_experts is None
    start = len(transcript.open_assistant())
    first = with_routing(turn("hi"), start + 2, first=0)
    transcript.add_turn(first, SpanKind.ASSISTANT_TOOL_CALL, "hi", [])
    covered = len(transcript.token_ids) - 1
    assert covered == start + 2
    transcript.add_tool_results([Message(role="tool", content="ok")])
    again = len(transcript.open_assistant())
    second = with_routing(turn("no"), again + 2, first=100)
    transcript.add_turn(second, SpanKind.ASSISTANT_FINAL, "no", [])
    found = transcript.routed_experts
    assert found is not None
    assert found.shape == (len(transcript.token_ids) - 1, 1, 2)
    expected = [*range(covered), *(100 + np.arange(covered, again + 2)).tolist()]
    assert found[:, 0, 0].tolist() == expected


@pytest.mark.parametrize("off", [-1, 1])
def test_routing_of_another_number_of_tokens_is_refused(off: int) -> None:
    transcript = started()
    size = len(transcript.open_assistant()) + 2 + off
    with pytest.raises(RecordError, match=f"routing of {size} tokens, the transcript has"):
        transcript.add_turn(
            with_routing(turn("hi"), size, first=0), SpanKind.ASSISTANT_FINAL, "hi", []
        )


def test_routing_that_names_an_expert_twice_is_refused() -> None:
    transcript = started()
    size = len(transcript.open_assistant()) + 2
    broken = with_routing(turn("hi"), size, first=200)
    with pytest.raises(RecordError, match=r"row 0 in layer 0 are \[200, 200\]"):
        transcript.add_turn(broken, SpanKind.ASSISTANT_FINAL, "hi", [])
