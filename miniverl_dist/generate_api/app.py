"""The server side of ``/generate``: an aiohttp app that checks, and hands sound requests on.

Both servers of this project are this app around a handler of their own. Whatever arrives malformed
is answered with a 4xx in SGLang's form, ``{"error": {"message": ...}}``, before the handler sees
it; in a batch one bad prompt spoils the whole batch, as in SGLang.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec
from aiohttp import web

from miniverl_dist.errors import RequestRejectedError, ServerUnavailableError
from miniverl_dist.generate_api.wire import (
    ErrorBody,
    ErrorReply,
    GenerateReply,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    decode_requests,
    encode_replies,
)

LOOPBACK = "127.0.0.1"
_log = logging.getLogger(__name__)
_RequestHandler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GenerateHandler(Protocol):
    """What a server does with sound requests."""

    def model_info(self) -> ModelInfo:
        """The model behind the server."""

    def check(self, request: GenerateRequest) -> None:
        """Refuse what this handler cannot do; raises ``RequestRejectedError``."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Answer one prompt; the prompts of a batch come concurrently.

        Raises:
            ServerUnavailableError: not now (503).
        """


@dataclass(frozen=True)
class ServerLimits:
    """What a server takes; everything beyond is a 4xx, or a 503 when it is busy."""

    vocab_size: int
    """Ids are 0 to ``vocab_size - 1``."""
    max_context_tokens: int
    """Prompt and new tokens together."""
    max_body_bytes: int = 64 * 2**20
    max_batch_size: int = 256
    max_requests: int = 1024
    """Prompts at work or waiting; 503 above."""
    body_deadline_s: float = 60.0
    """For the body of a request to arrive."""


def build_app(handler: GenerateHandler, *, limits: ServerLimits) -> web.Application:
    """``POST /generate``, ``GET /health``, ``GET /model_info``; a server may add its own routes."""
    server = _Server(handler, limits)
    app = web.Application(middlewares=[_answer_errors], client_max_size=limits.max_body_bytes)
    app.router.add_post("/generate", server.generate)
    app.router.add_get("/health", server.health)
    app.router.add_get("/model_info", server.model_info)
    return app


class _Server:
    def __init__(self, handler: GenerateHandler, limits: ServerLimits) -> None:
        self._handler = handler
        self._limits = limits
        self._num_requests = 0
        self._rids: set[str] = set()

    async def health(self, request: web.Request) -> web.Response:
        del request
        return web.Response()

    async def model_info(self, request: web.Request) -> web.Response:
        del request
        return _json(msgspec.json.encode(self._handler.model_info()))

    async def generate(self, request: web.Request) -> web.Response:
        try:
            async with asyncio.timeout(self._limits.body_deadline_s):
                body = await request.read()
        except TimeoutError:
            raise RequestRejectedError(
                f"the body did not arrive within {self._limits.body_deadline_s:.3g} s", status=408
            ) from None
        except web.RequestPayloadError as exc:
            # Chunks or compression that are broken; cut connections end here too.
            raise RequestRejectedError(f"the body cannot be read: {exc}") from exc
        prompts, is_batch = decode_requests(body)
        self._check(prompts)
        rids = {prompt.rid for prompt in prompts if prompt.rid is not None}
        self._num_requests += len(prompts)
        self._rids |= rids
        try:
            # Waits for the handler, whose own deadlines bound it.
            answers = await asyncio.gather(
                *(self._handler.generate(each) for each in prompts), return_exceptions=True
            )
        finally:
            self._num_requests -= len(prompts)
            self._rids -= rids
        return _json(encode_replies([_or_raise(each) for each in answers], is_batch=is_batch))

    def _check(self, prompts: Sequence[GenerateRequest]) -> None:
        if not 1 <= len(prompts) <= self._limits.max_batch_size:
            raise RequestRejectedError(
                f"a batch of {len(prompts)} prompts, expected 1 to {self._limits.max_batch_size}"
            )
        seen = set(self._rids)
        for prompt in prompts:
            check_request(prompt, self._limits)
            self._handler.check(prompt)
            if prompt.rid in seen:
                raise RequestRejectedError(f"rid {prompt.rid!r} is already in use")
            if prompt.rid is not None:
                seen.add(prompt.rid)
        if self._num_requests + len(prompts) > self._limits.max_requests:
            raise ServerUnavailableError(f"the queue is full ({self._num_requests} requests)")


def _or_raise(answer: GenerateReply | BaseException) -> GenerateReply:
    if isinstance(answer, BaseException):
        raise answer
    return answer


def check_request(request: GenerateRequest, limits: ServerLimits) -> None:
    """Check one prompt's ids, lengths and sampling parameters; raises ``RequestRejectedError``."""
    ids, new = request.input_ids, request.sampling_params.max_new_tokens
    if not ids:
        raise RequestRejectedError("input_ids cannot be empty")
    if min(ids) < 0 or max(ids) >= limits.vocab_size:
        where = next(i for i, token in enumerate(ids) if not 0 <= token < limits.vocab_size)
        raise RequestRejectedError(
            f"token id {ids[where]} at position {where} is outside the vocabulary "
            f"(0 to {limits.vocab_size - 1})"
        )
    _check_sampling(request.sampling_params, limits.vocab_size)
    if len(ids) + new > limits.max_context_tokens:
        raise RequestRejectedError(
            f"{len(ids)} input tokens and {new} new ones exceed the context length of "
            f"{limits.max_context_tokens} tokens"
        )
    if not -1 <= request.logprob_start_len <= len(ids):
        raise RequestRejectedError(
            f"logprob_start_len is {request.logprob_start_len}, expected -1 to {len(ids)}, the "
            "number of input tokens"
        )
    if request.top_logprobs_num < 0:
        raise RequestRejectedError(f"top_logprobs_num is {request.top_logprobs_num}, expected >= 0")


def _check_sampling(params: SamplingParams, vocab_size: int) -> None:
    claims = {
        "temperature": (math.isfinite(params.temperature) and params.temperature >= 0, ">= 0"),
        "top_p": (0 < params.top_p <= 1, "above 0 and at most 1"),
        "top_k": (params.top_k == -1 or params.top_k >= 1, "-1 or at least 1"),
        "min_p": (0 <= params.min_p <= 1, "0 to 1"),
        "max_new_tokens": (params.max_new_tokens >= 0, ">= 0"),
        "stop_token_ids": (
            all(0 <= token < vocab_size for token in params.stop_token_ids),
            f"ids from 0 to {vocab_size - 1}",
        ),
        "sampling_seed": (abs(params.sampling_seed or 0) < 2**63, "64 bits"),
    }
    for name, (is_good, expected) in claims.items():
        if not is_good:
            raise RequestRejectedError(f"{name} is {getattr(params, name)}, expected {expected}")


@web.middleware
async def _answer_errors(request: web.Request, handler: _RequestHandler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRejectedError as exc:
        return _error(exc.status, str(exc))
    except ServerUnavailableError as exc:
        response = _error(HTTPStatus.SERVICE_UNAVAILABLE, str(exc))
        response.headers["Retry-After"] = "1"
        return response
    except web.HTTPException as exc:
        # aiohttp's own refusals (unknown path, wrong method, body too large) in the contract's form
        response = _error(exc.status, exc.text or exc.reason)
        if "Allow" in exc.headers:
            response.headers["Allow"] = exc.headers["Allow"]
        return response
    except Exception as exc:  # noqa: BLE001
        # A defect of the handler ends this request, not the server, and not in silence.
        _log.exception("request to %s failed", request.path)
        return _error(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(exc).__name__}: {exc}")


def _error(status: int, message: str) -> web.Response:
    body = ErrorReply(ErrorBody(message=message, code=status))
    return _json(msgspec.json.encode(body), status=status)


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


@asynccontextmanager
async def serving(
    app: web.Application,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    shutdown_deadline_s: float = 10.0,
) -> AsyncIterator[str]:
    """Serve ``app`` for the length of the block and yield its base URL; port 0 picks a free one.

    At the end no new connection is taken, and requests at work get ``shutdown_deadline_s``.
    """
    runner = web.AppRunner(app, shutdown_timeout=shutdown_deadline_s, access_log=None)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        bound_host, bound_port = runner.addresses[0][:2]
        bracketed = f"[{bound_host}]" if ":" in bound_host else bound_host
        yield f"http://{bracketed}:{bound_port}"
    finally:
        await runner.cleanup()


async def serve_until_signal(
    app: web.Application,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    shutdown_deadline_s: float = 10.0,
    announce: Callable[[str], None],
) -> None:
    """Serve until SIGTERM or SIGINT; ``announce`` is told the base URL once it answers."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with serving(
        app, host=host, port=port, shutdown_deadline_s=shutdown_deadline_s
    ) as base_url:
        announce(base_url)
        # Waits for a signal; serving has no end of its own.
        await stop.wait()
