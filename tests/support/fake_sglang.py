"""A stand-in for ``python -m sglang.launch_server``: the same command line, endpoints and replies.

It computes nothing: token k of an answer is ``(sum of the prompt + k) mod vocabulary``, logprob
``-(k + 1) / 10``. What it does about errors, pauses, weights and versions is what SGLang 0.5.23 was
seen to do; tests/sglang holds the real one to the same checks. Tests spoil it by ``POST /fake``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiohttp import web
from safetensors.numpy import load_file

from miniverl_dist.backends.megatron.architecture import hf_parameters, read_architecture
from rollout_server.engines.sglang_layout import exact_digests

CONTROL = (
    "pause_generation",
    "continue_generation",
    "flush_cache",
    "abort_request",
    "weights_checker",
    "update_weights_from_disk",
    "update_weight_version",
    "release_memory_occupation",
    "resume_memory_occupation",
)
RESERVED_TOKENS = 6
"""Of the context length, kept back."""


@dataclass
class Request:
    """A request at work; ``spans`` are (version, first token)."""

    limit: int
    stops: frozenset[int]
    start: int
    output: list[int] = field(default_factory=list)
    spans: list[tuple[str, int]] = field(default_factory=list)
    is_aborted: bool = False


class FakeSGLang:
    """State of the server."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.arch = read_architecture(Path(args.model_path) / "config.json")
        self.version: str = args.weight_version
        self.tensors: dict[str, Any] = {}
        self.salt = 0
        self.running: dict[str, Request] = {}
        self.may_decode = asyncio.Event()
        self.may_decode.set()
        self.faults: dict[str, Any] = {}
        self.calls: list[list[Any]] = []

    def app(self) -> web.Application:
        app = web.Application(client_max_size=2**28)
        app.router.add_get("/health", self.health)
        app.router.add_get("/model_info", self.model_info)
        app.router.add_post("/fake", self.fake)
        app.router.add_post("/generate", self.generate)
        for path in CONTROL:
            app.router.add_post(f"/{path}", self.control)
        return app

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(text="")

    async def model_info(self, request: web.Request) -> web.Response:
        version = self.faults.get("claimed_version", self.version)
        return web.json_response(
            {"model_path": self.args.model_path, "weight_version": version, "is_generation": True}
        )

    async def fake(self, request: web.Request) -> web.Response:
        self.faults |= await request.json()
        state = {"calls": self.calls, "argv": sys.argv[1:], "pid": os.getpid()}
        env = {
            name: value for name, value in os.environ.items() if name.startswith(("SGLANG_", "HF_"))
        }
        running = {rid: len(request.output) for rid, request in self.running.items()}
        return web.json_response(state | {"env": env, "running": running})

    async def control(self, request: web.Request) -> web.Response:
        name, body = request.path[1:], await request.json()
        self.calls.append([name, body])
        if (status := self.faults.get(f"fail:{name}")) is not None:
            reply = {"success": False, "message": f"{name} fails"}
            response = web.json_response(reply, status=status)
        else:
            response = getattr(self, name)(body)
        if self.faults.get(f"die_after:{name}"):
            os._exit(1)
        return response

    def pause_generation(self, body: dict[str, Any]) -> web.Response:
        self.may_decode.clear()
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    def continue_generation(self, body: dict[str, Any]) -> web.Response:
        self.may_decode.set()
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    def flush_cache(self, body: dict[str, Any]) -> web.Response:
        if self.faults.get("busy_flushes", 0) > 0:
            self.faults["busy_flushes"] -= 1
            return web.Response(text="Flush cache failed.", status=400)
        if self.running and self.may_decode.is_set():
            return web.Response(text="Flush cache failed.", status=400)
        return web.Response(text="Cache flushed.\n")

    def abort_request(self, body: dict[str, Any]) -> web.Response:
        for rid, request in self.running.items():
            if body.get("abort_all") or rid == body["rid"]:
                request.is_aborted = True
        return web.Response(text="")

    def update_weights_from_disk(self, body: dict[str, Any]) -> web.Response:
        folder = Path(body["model_path"])
        if body["load_format"] == "dummy":
            raise AssertionError("a dummy load draws weights, it reads none")
        loaded = load_file(folder / "model.safetensors")
        swallowed = self.faults.get("swallow")
        for name in hf_parameters(self.arch):
            if name != swallowed:
                self.tensors[name] = loaded[name]
        if body.get("weight_version") is not None:
            self.version = body["weight_version"]
        message = "Succeeded to update model weights."
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    def update_weight_version(self, body: dict[str, Any]) -> web.Response:
        if body.get("abort_all_requests", True):
            for request in self.running.values():
                request.is_aborted = True
        self.version = body["new_version"]
        for request in self.running.values():
            request.spans.append((self.version, len(request.output)))
        return web.json_response({"success": True, "message": f"updated to {self.version}"})

    def weights_checker(self, body: dict[str, Any]) -> web.Response:
        assert body == {"action": "checksum"}
        if not self.tensors:
            held = {"model.norm.weight": "0" * 16}
        elif self.tensors.keys() == hf_parameters(self.arch).keys():
            held = exact_digests(self.arch, self.tensors)
        else:
            held = {"model.norm.weight": "1" * 16}
        return web.json_response(
            {"success": True, "message": "Success.", "ranks": [{"checksums": held}]}
        )

    def release_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        if self.running:
            return web.json_response({"error": {"message": "not idle"}}, status=400)
        return web.json_response(None)

    def resume_memory_occupation(self, body: dict[str, Any]) -> web.Response:
        return web.json_response(None)

    async def generate(self, http: web.Request) -> web.Response:
        body = await http.json()
        self.calls.append(["generate", body])
        if "answer" in self.faults:
            return web.Response(text=self.faults["answer"], content_type="application/json")
        ids, params, rid = body["input_ids"], body["sampling_params"], body["rid"]
        if min(ids) < 0 or max(ids) >= self.arch.vocab_size:
            os._exit(1)  # a foreign id ends the whole server
        longest = self.args.context_length
        if len(ids) + params["max_new_tokens"] > longest or rid in self.running:
            text = f"Requested token count exceeds {longest}, or duplicate rid {rid}"
            return web.json_response({"error": {"message": text}}, status=400)
        room = longest - RESERVED_TOKENS - len(ids)
        request = Request(
            min(params["max_new_tokens"], room), frozenset(params["stop_token_ids"]), sum(ids)
        )
        request.spans.append((self.version, 0))
        self.running[rid] = request
        try:
            finish = await self.decode(request)
        finally:
            del self.running[rid]
        if finish["type"] == "abort" and not request.output:
            meta = {"id": rid, "finish_reason": finish}
            return web.json_response({"text": "", "output_ids": [], "meta_info": meta})
        return web.json_response(self.reply(rid, body, request, finish))

    async def decode(self, request: Request) -> dict[str, Any]:
        while True:
            await asyncio.sleep(self.faults.get("token_s", 0.0))
            while not self.may_decode.is_set() and not request.is_aborted:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            if request.is_aborted:
                return {"type": "abort", "message": "Aborted"}
            count = len(request.output)
            request.output.append((request.start + count) % self.arch.vocab_size)
            if request.output[-1] in request.stops:
                return {"type": "stop", "matched": request.output[-1]}
            if len(request.output) == request.limit:
                return {"type": "length", "length": request.limit}

    def reply(
        self, rid: str, body: dict[str, Any], request: Request, finish: dict[str, Any]
    ) -> dict[str, Any]:
        ends = [first for _, first in request.spans[1:]] + [len(request.output)]
        spans = [
            {"version": version, "start": first, "end": end}
            for (version, first), end in zip(request.spans, ends, strict=True)
            if end > first
        ]
        meta: dict[str, Any] = {
            "id": rid,
            "finish_reason": finish,
            "prompt_tokens": len(body["input_ids"]),
            "weight_version": self.version,
            "num_retractions": 0,
            "completion_tokens": len(request.output),
            "cached_tokens": 0,
            "weight_versions": spans,
            "e2e_latency": 0.1,
        }
        if body.get("return_logprob"):
            meta["input_token_logprobs"] = []
            meta["output_token_logprobs"] = [
                [-(place + 1) / 10, token, None] for place, token in enumerate(request.output)
            ]
        return {"output_ids": request.output, "meta_info": meta}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("-m", dest="module")
    parser.add_argument("--model-path")
    parser.add_argument("--port", type=int)
    parser.add_argument("--context-length", type=int)
    parser.add_argument("--weight-version")
    args, _ = parser.parse_known_args()
    assert args.module == "sglang.launch_server"
    if "FAKE_FAILS_AT_START" in os.environ:
        sys.exit("this model cannot be served")

    async def serve() -> None:
        runner = web.AppRunner(FakeSGLang(args).app(), shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", args.port).start()
        print(json.dumps({"serving": args.port}), flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
