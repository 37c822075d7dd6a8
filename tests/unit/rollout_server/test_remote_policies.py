from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miniverl_dist.errors import ConfigError, EngineError
from miniverl_dist.generate_api.chat import (
    ChatChoice,
    ChatClient,
    ChatMessage,
    ChatReply,
    ChatToolCall,
    ContentPart,
    FunctionCall,
)
from miniverl_dist.generate_api.client import GenerateClient
from miniverl_dist.generate_api.wire import SamplingParams
from miniverl_dist.schemas.messages import (
    Message,
    ParsedMessage,
    ToolCall,
)
from rollout_server.episode import EpisodePlayer
from rollout_server.policies import EnginePolicy, Moment
from rollout_server.remote_policies import (
    ChatPolicy,
    ChatSettings,
    endpoint_digest,
    served_engine,
    served_model,
)
from rollout_server.tool_calls import (
    ToolCallWriter,
    parse_qwen_xml,
    write_deepseek,
    write_hermes_json,
    write_qwen_xml,
)
from tests.fake_stage import CHAT, ScriptedEnvironment, assignment, stage
from tests.fakes import ByteTokenizer, FakeClock, PlainChat
from tests.support.chat_calls import GO, SCHEMAS, said

CALLED = ChatMessage(tool_calls=(ChatToolCall(FunctionCall("cd", '{"folder": "a"}')),))
END = CHAT.turn_end_id


class Client(ChatClient):
    """Answers with one reply."""

    def __init__(self, message: ChatMessage | None, finish: str | None = "stop") -> None:
        super().__init__("http://127.0.0.1:9/v1")
        self.reply = ChatReply((ChatChoice(message or ChatMessage(), finish),))
        self.bodies: list[Any] = []

    async def complete(self, body: Any) -> ChatReply:
        self.bodies.append(body)
        return self.reply


def policy(client: Client, form: Any = "tools", thinking: bool | None = None) -> ChatPolicy:
    settings = ChatSettings("m", form, 0.7, 99, thinking)
    return ChatPolicy(client, settings, CHAT, parse_qwen_xml, write_qwen_xml)


MOMENT = Moment(
    seed=2**40 + 5, room=50, turns_since_user=0, messages=(Message(role="user", content="Go."),)
)


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

    @pytest.mark.parametrize(
        "message",
        [ChatMessage(refusal="hello"), ChatMessage((ContentPart("text", "hello"),))],
    )
    @pytest.mark.parametrize("form", ["tools", "text"])
    async def test_text_is_recorded_whatever_field_it_stands_in(
        self, message: ChatMessage, form: str
    ) -> None:
        session = ScriptedEnvironment().start("a", prefix_calls=0)
        turn = await policy(Client(message), form).act([1], session, MOMENT)
        assert CHAT.tokenizer.decode(turn.token_ids[:-1]) == "hello"

    @pytest.mark.parametrize("form", ["tools", "text"])
    async def test_a_turn_that_its_limit_cut_has_no_turn_end(self, form: str) -> None:
        client = Client(ChatMessage(content="hel"), "length")
        turn = await policy(client, form).act(
            [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
        )
        assert (turn.finish, END in turn.token_ids) == ("length", False)

    @pytest.mark.parametrize(
        ("message", "finish", "form", "reason"),
        [
            (None, "abort", "tools", "as 'abort', expected one of stop"),
            (None, "x\x1b|" * 99, "tools", r"as '(x\?\?){13}x', expected"),
            (None, "content_filter", "tools", "a filter has withheld"),
            (None, "tool_calls", "tools", "sent no call: .*--calls text"),
            (ChatMessage(content="so", tool_calls=()), "tool_calls", "tools", "sent no call"),
            (None, "function_call", "text", "sent no call"),
            (CALLED, "stop", "text", "calls taken out of the text.*--calls tools"),
            (CALLED, "tool_calls", "text", "calls taken out of the text"),
        ],
    )
    async def test_what_does_not_tell_what_the_model_did_is_an_engine_error(
        self, message: ChatMessage | None, finish: str, form: str, reason: str
    ) -> None:
        with pytest.raises(EngineError, match=reason) as found:
            await policy(Client(message, finish), form).act(
                [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
            )
        assert str(found.value).isprintable()

    @pytest.mark.parametrize("write", [write_qwen_xml, write_hermes_json, write_deepseek])
    async def test_a_call_left_in_the_text_is_a_fault_of_a_server_without_a_parser(
        self, write: ToolCallWriter
    ) -> None:
        session = ScriptedEnvironment().start("a", prefix_calls=0)
        in_text = ChatMessage(content=f"So: {write([GO])}")
        client = Client(in_text)
        asked = policy(client)
        for _ in range(2):
            with pytest.raises(EngineError, match=r"left a call in the text.*--calls text"):
                await asked.act([1], session, MOMENT)
        # One that takes calls out has a parser: what it leaves there is what the model got wrong.
        client.reply = Client(CALLED).reply
        await asked.act([1], session, MOMENT)
        client.reply = Client(in_text).reply
        turn = await asked.act([1], session, MOMENT)
        assert turn.parsed is not None
        assert not turn.parsed.calls

    async def test_a_malformed_call_in_the_text_is_the_models(self) -> None:
        wrong = ChatMessage(content='<tool_call>\n{"name": "cd", "arg\n</tool_call>')
        turn = await policy(Client(wrong)).act(
            [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
        )
        assert turn.finish == "turn_end"

    @pytest.mark.parametrize("finish", ["stop", "tool_calls", "function_call", None, ""])
    @pytest.mark.parametrize(
        "message", [CALLED, ChatMessage(function_call=FunctionCall("cd", {"folder": "a"}))]
    )
    async def test_a_call_is_one_whatever_the_finish_says(
        self, message: ChatMessage, finish: str | None
    ) -> None:
        turn = await policy(Client(message, finish)).act(
            [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
        )
        assert turn.finish == "turn_end"
        assert turn.parsed is not None
        assert [call.call for call in turn.parsed.calls] == [GO]

    async def test_a_model_that_declines_has_answered(self) -> None:
        turn = await policy(Client(ChatMessage(refusal="I will not."))).act(
            [1], ScriptedEnvironment().start("a", prefix_calls=0), MOMENT
        )
        assert (turn.finish, turn.parsed) == ("turn_end", ParsedMessage(text="I will not."))

    async def test_a_long_turn_is_tokenised_while_the_loop_goes_on(self) -> None:
        freed = threading.Event()

        class Waiting(ByteTokenizer):
            def encode_bytes(self, data: bytes) -> list[int]:
                assert freed.wait(10)  # only a loop that goes on gets here
                return super().encode_bytes(data)

        asked = ChatPolicy(
            Client(ChatMessage(content="so")),
            ChatSettings("m", "tools", 0.7, 99),
            PlainChat(Waiting()),
            parse_qwen_xml,
            write_qwen_xml,
        )
        session = ScriptedEnvironment().start("a", prefix_calls=0)
        acting = asyncio.create_task(asked.act([1], session, MOMENT))
        await asyncio.sleep(0.01)
        freed.set()
        assert (await acting).finish == "turn_end"

    def test_the_same_moment_gives_the_same_request(self) -> None:
        first, second = (policy(Client(ChatMessage())).request(SCHEMAS, MOMENT) for _ in range(2))
        assert first == second
        assert (first["seed"], first["max_tokens"], first["temperature"]) == (5, 99, 0.7)
        assert "chat_template_kwargs" not in first

    @pytest.mark.parametrize("thinking", [True, False])
    def test_thinking_is_asked_for(self, thinking: bool) -> None:
        body = policy(Client(ChatMessage()), thinking=thinking).request(SCHEMAS, MOMENT)
        assert body["chat_template_kwargs"] == {"enable_thinking": thinking}


class TestIdentity:
    def test_it_tells_servers_and_settings_apart_and_hides_the_address(self) -> None:
        plain = ChatSettings("m", "tools", 0.7, 99)
        variants = [
            plain,
            replace(plain, model="n"),
            replace(plain, form="text"),
            replace(plain, temperature=0.8),
            replace(plain, max_new_tokens=98),
            replace(plain, thinking=True),
            replace(plain, thinking=False),
        ]
        found = [self._identity("http://host:9/v1", settings) for settings in variants]
        found.append(self._identity("http://host:8/v1", plain))
        assert len({json.dumps(dict(one), sort_keys=True) for one in found}) == len(found)
        assert all(isinstance(value, str) for one in found for value in one.values())
        assert "host" not in json.dumps([dict(one) for one in found])

    def test_one_server_is_one_however_its_url_is_written(self) -> None:
        plain = ChatSettings("m", "tools", 0.7, 99)
        assert self._identity("HTTP://Host:80/v1/", plain) == self._identity(
            "http://host/v1", plain
        )
        assert endpoint_digest(["http://a", "http://b"]) == endpoint_digest(
            ["http://b", "http://a"]
        )
        assert endpoint_digest("http://a") == endpoint_digest(["http://a"])

    @staticmethod
    def _identity(url: str, settings: ChatSettings) -> Mapping[str, str]:
        client = ChatClient(url)
        asked = ChatPolicy(client, settings, CHAT, parse_qwen_xml, write_qwen_xml)
        return asked.identity


class SGLangStub:
    """What a server that somebody else runs answers to one prompt."""

    def __init__(
        self, tokens: tuple[int, ...] = (72, 105), model_path: str = "/data/models/Some-1B"
    ) -> None:
        self.tokens, self.model_path = tokens, model_path
        self.requests: list[Any] = []

    async def info(self, request: web.Request) -> web.Response:
        return web.json_response({"model_path": self.model_path, "weight_version": "default"})

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
        assert engine.identity["model"] == "sglang:Some-1B"
        assert engine.identity["endpoint"] == endpoint_digest(client.base_url)
        assert (turn.token_ids, turn.weight_versions) == ((72, 105, END), (0,))
        assert turn.logprobs == (-0.5, -0.5, -0.5)
        sent = stub.requests[-1]
        assert (sent["input_ids"], sent["sampling_params"]["sampling_seed"]) == ([1, 2], 2**40 + 5)

    async def test_a_model_of_another_tokenizer_is_refused(self) -> None:
        async with SGLangStub((99_999,)).served() as client:
            with pytest.raises(ConfigError, match=r"token 99999, .* has \d+ ids: .*openai:URL/v1"):
                await served_engine(client, CHAT.tokenizer.vocab_size)

    @pytest.mark.parametrize("path", ["/models/a|b", "/models/a\x1b[31m", "/", "x/<b>/"])
    async def test_a_name_that_tables_cannot_show_is_refused(self, path: str) -> None:
        async with SGLangStub(model_path=path).served() as client:
            with pytest.raises(ConfigError, match=r"policy sglang: .* calls its model") as found:
                await served_engine(client, CHAT.tokenizer.vocab_size)
        assert str(found.value).isprintable()


class Listing(ChatClient):
    """Serves these models."""

    def __init__(self, *names: str) -> None:
        super().__init__("http://127.0.0.1:9/v1")
        self.names = names

    async def models(self) -> tuple[str, ...]:
        return self.names


class TestServedModel:
    @pytest.mark.parametrize("chosen", [None, "a\nb|\x1b\u202e<"])
    async def test_a_name_that_tables_cannot_show_is_refused(self, chosen: str | None) -> None:
        client = Listing("a\nb|\x1b\u202e<")
        with pytest.raises(ConfigError, match=r"calls its model 'a\?b\?\?\?\?'") as found:
            await served_model(client, chosen)
        assert str(found.value).isprintable()

    @pytest.mark.parametrize("chosen", [None, "other"])
    async def test_a_list_of_names_is_shown_without_such_signs(self, chosen: str | None) -> None:
        client = Listing("good", *["a\x1b|b"] * 100)
        with pytest.raises(ConfigError, match=r"good, a\?\?b, .* and 81 more") as found:
            await served_model(client, chosen)
        assert str(found.value).isprintable()

    async def test_one_among_such_names_can_be_chosen(self) -> None:
        assert await served_model(Listing("a\x1b|b", "good"), "good") == "good"


async def test_an_episode_takes_structured_calls_as_they_are() -> None:
    client = Client(said("f", '{"folder": 5}'), "tool_calls")
    player = EpisodePlayer(stage(max_turns=1), policy(client), seed=0, clock=FakeClock())
    told = await player.rollout(assignment(prefix_calls=0), 0)
    # Read back from the recorded text, the call would be a malformed one of this stage's format.
    assert told.tool_calls[0].call == ToolCall(name="f", arguments={"folder": 5})
    assert told.messages[-2].tool_calls == (ToolCall(name="f", arguments={"folder": 5}),)
    assert not told.is_trainable
