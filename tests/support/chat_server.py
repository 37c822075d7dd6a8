"""An OpenAI-compatible server in a thread: a script that answers in both forms, and faults.

The player knows each user message's expert calls. It makes the ones that are still missing, and is
wrong on purpose where the request's seed says so: a score between 0 and 1 that depends on seeds.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from aiohttp import web

from miniverl_dist.environments.base import Environment
from miniverl_dist.schemas.messages import ToolCall
from rollout_server.tool_calls import parse_qwen_xml, write_qwen_xml
from tests.support.ports import free_ports

MODEL = "scripted/player"
Json = dict[str, Any]
Fault = Callable[[int], Awaitable[web.StreamResponse | None]]
"""Given the number of the request, from 0: what goes wrong, or None."""


class Player:
    """What the server says to a history of messages."""

    def __init__(self, turns: Mapping[str, Sequence[ToolCall]], *, wrong_of: int = 0) -> None:
        """Know the calls of each user message.

        Args:
            turns: User message -> expert calls of its turn.
            wrong_of: Every so many-th seed makes it leave out its calls; 0: never.
        """
        self._turns, self._wrong_of = dict(turns), wrong_of

    @classmethod
    def of(cls, environment: Environment, task_ids: Iterable[str], *, wrong_of: int = 0) -> Player:
        """The expert of an environment's tasks."""
        turns: dict[str, Sequence[ToolCall]] = {}
        for task_id in task_ids:
            session = environment.start(task_id, prefix_calls=0)
            calls = session.expert_tail()
            [asked] = [m.content for m in session.opening() if m.role == "user"]
            for index, turn in enumerate(calls):
                turns[asked.strip()] = turn
                following = session.next_user_turn() if index + 1 < len(calls) else None
                asked = following.content if following else ""
            session.close()
        return cls(turns, wrong_of=wrong_of)

    def answer(self, body: Json) -> Json:
        """The message of the reply."""
        has_tools = "tools" in body
        messages = body["messages"]
        asked = max(i for i, m in enumerate(messages) if _is_asked(m))
        expert = self._turns[messages[asked]["content"].strip()]
        num_made = sum(map(_num_calls, messages[asked + 1 :]))
        own = [] if self._is_wrong(body) else list(expert[num_made:])
        if not own:
            return {"role": "assistant", "content": "Done."}
        if not has_tools:
            return {"role": "assistant", "content": write_qwen_xml(own)}
        return {
            "role": "assistant",
            "content": None,
            "reasoning_content": "<think>the calls that are missing</think>",
            "tool_calls": [
                {
                    "id": f"call_{index}",
                    "type": "function",
                    "function": {"name": c.name, "arguments": json.dumps(c.arguments)},
                }
                for index, c in enumerate(own)
            ],
        }

    def _is_wrong(self, body: Json) -> bool:
        return bool(self._wrong_of) and body.get("seed", 1) % self._wrong_of == 0


def _is_asked(message: Json) -> bool:
    return message["role"] == "user" and not message["content"].startswith("<tool_response>")


def _num_calls(message: Json) -> int:
    if message["role"] != "assistant":
        return 0
    return len(message.get("tool_calls") or parse_qwen_xml(message["content"] or "").calls)


class ChatServer:
    """What a test sees of the server."""

    def __init__(self, player: Player, fault: Fault | None, models: Sequence[str]) -> None:
        self.requests: list[Json] = []
        """Bodies of chat completions that were asked, faults included."""
        self.headers: list[Mapping[str, str]] = []
        self.num_at_once = self.most_at_once = 0
        self.url, self.port = "", 0
        self._player, self._fault, self._models = player, fault, models

    async def list_models(self, request: web.Request) -> web.Response:
        self.headers.append(request.headers)
        return web.json_response({"object": "list", "data": [{"id": i} for i in self._models]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.requests)
        self.requests.append(body)
        self.num_at_once += 1
        self.most_at_once = max(self.most_at_once, self.num_at_once)
        try:
            await asyncio.sleep(0.002)
            if self._fault is not None:
                failed = await self._fault(number)
                if failed is not None:
                    return failed
            return web.json_response(self._reply(body))
        finally:
            self.num_at_once -= 1

    def _reply(self, body: Json) -> Json:
        if body["messages"] == [{"role": "user", "content": "Hello"}]:
            message: Json = {"role": "assistant", "content": "Hi"}
        else:
            message = self._player.answer(body)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        return {
            "id": "chatcmpl-1",
            "object": "chat.completion",
            "model": body["model"],
            "choices": [{"index": 0, "message": message, "finish_reason": finish}],
            "usage": {"prompt_tokens": 5, "completion_tokens": 7},
        }


@contextmanager
def chat_server(
    player: Player | None = None,
    *,
    fault: Fault | None = None,
    models: Sequence[str] = (MODEL,),
    port: int = 0,
) -> Iterator[ChatServer]:
    """Serve until the block ends; on a ``port`` that a former server had, it is the same server."""
    server = ChatServer(player or Player({}), fault, models)
    app = web.Application()
    app.router.add_get("/v1/models", server.list_models)
    app.router.add_post("/v1/chat/completions", server.complete)
    app.router.add_get("/page/models", _page)
    loop, ready, ended = asyncio.new_event_loop(), threading.Event(), asyncio.Event()

    async def serve() -> None:
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        # Not one that another process may be given between two servers of the same address.
        chosen = port or free_ports(1)[0]
        site = web.TCPSite(runner, "127.0.0.1", chosen, reuse_address=True)
        await site.start()
        host, bound = runner.addresses[0][:2]
        server.url, server.port = f"http://{host}:{bound}/v1", bound
        ready.set()
        await ended.wait()
        await runner.cleanup()

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        thread.join(10)
        loop.close()


async def _page(request: web.Request) -> web.Response:
    return web.Response(text="<html><body>Sign in</body></html>", content_type="text/html")
