from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.generate_api.chat import (
    ChatMessage,
    FunctionCall,
)
from miniverl_dist.schemas.messages import (
    Message,
    ParsedMessage,
    ParseStatus,
    ToolCall,
)
from rollout_server.remote_calls import (
    as_wire_text,
    read_message,
    text_history,
    tools_history,
    without_thinking,
)
from rollout_server.tool_calls import parse_qwen_xml, write_qwen_xml
from tests.support.chat_calls import GO, SCHEMAS, said


def nested(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels - 1):
        value = [value]
    return value


def assistant(*calls: ToolCall, text: str = "") -> Message:
    return Message(role="assistant", content=text + write_qwen_xml(calls), tool_calls=calls)


def result(content: str) -> Message:
    return Message(role="tool", content=content)


class TestReading:
    @pytest.mark.parametrize(
        ("arguments", "expected"),
        [
            ('{"folder": "a"}', {"folder": "a"}),
            ({"folder": "a"}, {"folder": "a"}),
            ('{"folder": 5}', {"folder": 5}),
            ("", {}),
            (" ", {}),
            (None, {}),
        ],
    )
    def test_arguments_keep_their_types(self, arguments: Any, expected: dict[str, Any]) -> None:
        [call] = read_message(said("cd", arguments), is_cut=False).calls
        assert (call.status, call.call) == (
            ParseStatus.OK,
            ToolCall(name="cd", arguments=expected),
        )

    @pytest.mark.parametrize(
        "arguments",
        [
            '{"folder": ',
            "[1]",
            "null",
            '{"a": NaN}',
            '{"a": ' + "[" * 70 + "]" * 70 + "}",
            '{"a": ' + "[" * 900 + "]" * 900 + "}",
            '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}",
            "[" * 9999,
            [1],
            5,
            True,
            {"a": nested(70)},
            {"a": nested(900)},
            {"a": nested(5000)},
            {"a": float("inf")},
        ],
    )
    def test_what_is_no_object_is_an_observation_and_no_crash(self, arguments: Any) -> None:
        [call] = read_message(said("cd", arguments), is_cut=False).calls
        assert (call.status, call.call) == (ParseStatus.MALFORMED, None)
        assert call.error
        assert len(call.raw) < 17_000

    @pytest.mark.parametrize("arguments", ["[1]", [1]])
    def test_the_model_is_told_what_was_found(self, arguments: Any) -> None:
        [call] = read_message(said("cd", arguments), is_cut=False).calls
        assert call.error == "the arguments are no valid JSON object: found list"

    def test_arguments_may_be_nested_and_long(self) -> None:
        given = {"a": nested(50), "b": "x" * 100_000}
        [call] = read_message(said("cd", json.dumps(given)), is_cut=False).calls
        assert call.call == ToolCall(name="cd", arguments=given)

    def test_a_long_call_that_cannot_be_read_is_shown_in_part(self) -> None:
        [call] = read_message(said("cd", "{" + "x" * 100_000 + "END"), is_cut=False).calls
        assert call.raw.startswith("cd({xxx")
        assert call.raw.endswith("xEND)")
        assert "[83624 characters are left out here]" in call.raw

    def test_a_call_in_the_older_form(self) -> None:
        message = ChatMessage(function_call=FunctionCall("cd", '{"folder": "a"}'))
        [call] = read_message(message, is_cut=False).calls
        assert call.call == GO

    def test_a_call_without_a_name_and_one_that_was_cut(self) -> None:
        [unnamed] = read_message(said(None, "{}"), is_cut=False).calls
        [cut] = read_message(said("cd", '{"folder": "'), is_cut=True).calls
        assert (unnamed.status, cut.status) == (ParseStatus.MISSING_NAME, ParseStatus.TRUNCATED)

    @settings(deadline=None, max_examples=150)
    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
            lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
            max_leaves=8,
        )
        | st.text()
    )
    def test_it_never_raises_and_what_is_read_can_be_written(self, value: Any) -> None:
        text = value if isinstance(value, str) else json.dumps(value)
        parsed = read_message(said("f", text, content="so"), is_cut=False)
        assert parsed.text == "so"
        as_wire_text(parsed, write_qwen_xml).encode()

    @pytest.mark.parametrize(
        ("text", "left"),
        [
            ("<think>a</think>\n\nb", "b"),
            ("<think>a", ""),
            ("a</think>b", "b"),
            ("plain <think>", "plain <think>"),
            ("plain", "plain"),
        ],
    )
    def test_reasoning_is_dropped(self, text: str, left: str) -> None:
        assert without_thinking(text) == left


class TestHistory:
    EPISODE = (
        Message(role="user", content="Go."),
        assistant(GO, GO, text="First. "),
        result("ok"),
        result("again"),
    )

    def test_structured_calls_and_results_share_ids(self) -> None:
        user, made, first, second = tools_history(self.EPISODE, parse_qwen_xml)
        assert user == {"role": "user", "content": "Go."}
        assert made["content"] == "First."
        calls = made["tool_calls"]
        assert [json.loads(c["function"]["arguments"]) for c in calls] == [GO.arguments] * 2
        assert [first["tool_call_id"], second["tool_call_id"]] == [c["id"] for c in calls]
        assert len({c["id"] for c in calls}) == 2
        assert [first["content"], second["content"]] == ["ok", "again"]

    def test_a_call_that_could_not_be_read_goes_back_as_text(self) -> None:
        broken = Message(role="assistant", content="<tool_call>\ncd({\n</tool_call>")
        history = tools_history((*self.EPISODE[:1], broken, result("bad")), parse_qwen_xml)
        assert [m["role"] for m in history] == ["user", "assistant", "user"]
        assert "tool_calls" not in history[1]
        assert history[2]["content"] == "<tool_response>\nbad\n</tool_response>"

    def test_the_text_form_tells_the_tools_and_repeats_the_wire_text(self) -> None:
        system, user, made, results = text_history(self.EPISODE, SCHEMAS)
        assert '"name": "cd"' in system["content"]
        assert "<tool_call>" in system["content"]
        assert made["content"] == self.EPISODE[1].content
        assert results["content"].count("<tool_response>") == 2
        assert user["content"] == "Go."


def test_what_the_wire_format_cannot_express_is_written_as_json() -> None:
    odd = ToolCall(name="cd", arguments={"folder": "</parameter>\n<parameter=x>"})
    parsed = read_message(said("cd", json.dumps(odd.arguments)), is_cut=False)
    assert parsed.calls[0].call == odd
    assert '"folder"' in as_wire_text(parsed, write_qwen_xml)
    assert as_wire_text(ParsedMessage(text="so"), write_qwen_xml) == "so"
