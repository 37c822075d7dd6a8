from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import ConfigError, EngineError
from miniverl_dist.generate_api.chat import (
    ChatChoice,
    ChatClient,
    ChatMessage,
    ChatReply,
    ChatToolCall,
    FunctionCall,
)
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.wire import SamplingParams
from miniverl_dist.schemas.messages import (
    Message,
    ParsedMessage,
    ParseStatus,
    ToolCall,
    ToolSchema,
)
from rollout_server.episode import EpisodePlayer
from rollout_server.policies import EnginePolicy, Moment
from rollout_server.remote_calls import (
    as_wire_text,
    read_message,
    text_history,
    tools_history,
    without_thinking,
)
from rollout_server.remote_policies import ChatPolicy, ChatSettings, served_engine
from rollout_server.tool_calls import parse_qwen_xml, write_qwen_xml
from tests.fake_stage import CHAT, ScriptedEnvironment, assignment, stage
from tests.fakes import FakeClock

SCHEMAS = {
    "cd": ToolSchema(
        name="cd",
        description="Go.",
        parameters={"type": "object", "properties": {"folder": {"type": "string"}}},
    )
}
GO = ToolCall(name="cd", arguments={"folder": "a"})
END = CHAT.turn_end_id


def said(name: str | None, arguments: Any, content: str | None = None) -> ChatMessage:
    call = ChatToolCall(FunctionCall(name, arguments))
    return ChatMessage(content=content, tool_calls=(call,))


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
            "[" * 9999,
        ],
    )
    def test_what_is_no_object_is_an_observation_and_no_crash(self, arguments: str) -> None:
        [call] = read_message(said("cd", arguments), is_cut=False).calls
        assert (call.status, call.call) == (ParseStatus.MALFORMED, None)
        assert call.error

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


class Client(ChatClient):
    """Answers with one reply."""

    def __init__(self, message: ChatMessage, finish: str | None = "stop") -> None:
        super().__init__("http://127.0.0.1:9/v1")
        self.reply = ChatReply((ChatChoice(message, finish),))
        self.bodies: list[Any] = []

    async def complete(self, body: Any) -> ChatReply:
        self.bodies.append(body)
        return self.reply


def policy(client: Client, form: Any = "tools", thinking: bool | None = None) -> ChatPolicy:
    settings = ChatSettings("m", form, 0.7, 99, thinking)
    return ChatPolicy(client, settings, CHAT, parse_qwen_xml, write_qwen_xml)


MOMENT = Moment(seed=2**40 + 5, room=50, turns_since_user=0, messages=(TestHistory.EPISODE[0],))


class TestTurn:
    async def test_structured_calls_are_the_turn_and_tokens_only_render_it(self) -> None:
        client = Client(said("cd", '{"folder": 5}'), "tool_calls")
        turn = await policy(client).act(
            [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
        )
        assert (turn.logprobs, turn.weight_versions, turn.finish) == (None, (), "turn_end")
        assert turn.parsed is not None
        # As text a 5 would have become "5", which is another call.
        assert turn.parsed.calls[0].call == ToolCall(name="cd", arguments={"folder": 5})
        assert CHAT.tokenizer.decode(turn.token_ids[:-1]).startswith("<tool_call>")
        assert turn.token_ids[-1] == END

    async def test_text_is_read_later_by_the_parser_of_the_run(self) -> None:
        client = Client(ChatMessage(content="<think>x</think>hello"))
        turn = await policy(client, "text").act(
            [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
        )
        assert (turn.parsed, CHAT.tokenizer.decode(turn.token_ids[:-1])) == (None, "hello")

    @pytest.mark.parametrize("form", ["tools", "text"])
    async def test_a_turn_that_its_limit_cut_has_no_turn_end(self, form: str) -> None:
        client = Client(ChatMessage(content="hel"), "length")
        turn = await policy(client, form).act(
            [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
        )
        assert (turn.finish, END in turn.token_ids) == ("length", False)

    async def test_an_end_that_nobody_knows_is_an_engine_error(self) -> None:
        with pytest.raises(EngineError, match="ended a turn as 'abort'"):
            await policy(Client(ChatMessage(content=""), "abort")).act(
                [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
            )

    def test_the_same_moment_gives_the_same_request(self) -> None:
        first, second = (policy(Client(ChatMessage())).request(SCHEMAS, MOMENT) for _ in range(2))
        assert first == second
        assert (first["seed"], first["max_tokens"], first["temperature"]) == (5, 99, 0.7)
        assert "chat_template_kwargs" not in first

    @pytest.mark.parametrize("thinking", [True, False])
    def test_thinking_is_asked_for(self, thinking: bool) -> None:
        body = policy(Client(ChatMessage()), thinking=thinking).request(SCHEMAS, MOMENT)
        assert body["chat_template_kwargs"] == {"enable_thinking": thinking}


def test_what_the_wire_format_cannot_express_is_written_as_json() -> None:
    odd = ToolCall(name="cd", arguments={"folder": "</parameter>\n<parameter=x>"})
    parsed = read_message(said("cd", json.dumps(odd.arguments)), is_cut=False)
    assert parsed.calls[0].call == odd
    assert '"folder"' in as_wire_text(parsed, write_qwen_xml)
    assert as_wire_text(ParsedMessage(text="so"), write_qwen_xml) == "so"


class SGLangStub:
    """What a server that somebody else runs answers to one prompt."""

    def __init__(self, tokens: tuple[int, ...] = (72, 105)) -> None:
        self.tokens = tokens
        self.requests: list[Any] = []

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"model_path": "/data/models/Some-1B", "weight_version": "default"}
        )

    async def generate(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        ids = [*self.tokens, END]
        meta = {
            "id": "1",
            "finish_reason": {"type": "stop", "matched": END},
            "prompt_tokens": 1,
            "completion_tokens": len(ids),
            "weight_version": "default",
            "output_token_logprobs": [[-0.5, token, None] for token in ids],
        }
        return web.json_response({"meta_info": meta, "output_ids": ids, "text": ""})

    @asynccontextmanager
    async def served(self) -> AsyncIterator[GenerateClient]:
        app = web.Application()
        app.router.add_get("/model_info", self.info)
        app.router.add_post("/generate", self.generate)
        async with TestServer(app) as server, GenerateClient(str(server.make_url(""))) as client:
            yield client


class TestServedEngine:
    async def test_its_turns_are_sampled_tokens_of_version_0(self) -> None:
        stub = SGLangStub()
        async with stub.served() as client:
            engine = await served_engine(client, CHAT.tokenizer.vocab_size)
            asked = EnginePolicy(engine, CHAT, SamplingParams(temperature=0.7, max_new_tokens=20))
            session = ScriptedEnvironment().start("a", prefix_calls=0)
            turn = await asked.act([1, 2], session, MOMENT)
        assert engine.name == "sglang:Some-1B"
        assert (turn.token_ids, turn.weight_versions) == ((72, 105, END), (0,))
        assert turn.logprobs == (-0.5, -0.5, -0.5)
        sent = stub.requests[-1]
        assert (sent["input_ids"], sent["sampling_params"]["sampling_seed"]) == ([1, 2], 2**40 + 5)

    async def test_a_model_of_another_tokenizer_is_refused(self) -> None:
        async with SGLangStub((99_999,)).served() as client:
            with pytest.raises(ConfigError, match=r"token 99999, .* has \d+ ids: .*openai:URL/v1"):
                await served_engine(client, CHAT.tokenizer.vocab_size)


async def test_an_episode_takes_structured_calls_as_they_are() -> None:
    client = Client(said("f", '{"folder": 5}'), "tool_calls")
    player = EpisodePlayer(stage(max_turns=1), policy(client), seed=0, clock=FakeClock())
    told = await player.rollout(assignment(prefix_calls=0), 0)
    # Read back from the recorded text, the call would be a malformed one of this stage's format.
    assert told.tool_calls[0].call == ToolCall(name="f", arguments={"folder": 5})
    assert told.messages[-2].tool_calls == (ToolCall(name="f", arguments={"folder": 5}),)
    assert not told.is_trainable
