"""The server side of ``/generate``: an aiohttp app that checks, and hands sound requests on.

Both servers of this project are this app around a handler of their own. Whatever arrives malformed
is answered with a 4xx in SGLang's form, ``{"error": {"message": ...}}``, before the handler sees
it; in a batch one bad prompt spoils the whole batch, as in SGLang.

A server that was told to stop drains: what is at work gets its answer, what is new a 503.
"""

from __future__ import annotations

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass
from http import HTTPStatus
from typing import Protocol

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from miniverl_dist.errors import RequestRejectedError, ServerBusyError, ServerUnavailableError
from miniverl_dist.generate_api.bearer import BearerToken, require_token
from miniverl_dist.generate_api.incoming import decode_requests
from miniverl_dist.generate_api.listening import Buffered, TasksAtWork, connections, error_reply
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    GenerateRequest,
    ModelInfo,
    SamplingParams,
    encode_replies,
)

LOOPBACK = "127.0.0.1"
_log = logging.getLogger(__name__)
_HUNG_UP = 499
"""What a request is counted as whose client has gone before the answer."""
Admit = Callable[[Sequence[GenerateRequest]], AbstractContextManager[None]]
"""Entered while the prompts of a request wait or are at work; raises ``ServerBusyError``."""
Observe = Callable[[str, int, float], None]
"""Told of every answer: (path, status, seconds)."""
_KEPT_HEADERS = frozenset({"Allow", "WWW-Authenticate"})
_ANSWER_DEADLINE_S = 1.0
"""For the answers of a server that has drained to leave it."""
_BACKLOG = 128
OPEN_PATHS = frozenset({"/health", "/ready"})
"""What a probe may ask without the token."""


class GenerateHandler(Protocol):
    """What a server does with sound requests."""

    def model_info(self) -> ModelInfo:
        """The model behind the server."""

    def check(self, request: GenerateRequest) -> None:
        """Refuse what this handler cannot do; raises ``RequestRejectedError``."""

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Answer one prompt; the prompts of a batch come concurrently.

        Cancelled when the client hangs up.

        Raises:
            ServerUnavailableError: not now (503).
            ServerBusyError: too much at once (429).
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
    max_buffered_bytes: int = 256 * 2**20
    """Of all bodies that arrive at the same time; 503 above."""
    max_connections: int = 2048
    """Open at once, idle ones included; 503 above."""
    idle_deadline_s: float = 75.0
    """For the head of a request to arrive, from the connection or the former request on. Clients
    should not keep an idle connection that long: aiohttp's keep it for 15 s."""


def build_app(
    handler: GenerateHandler,
    *,
    limits: ServerLimits,
    admit: Admit | None = None,
    token: BearerToken | None = None,
    observe: Observe | None = None,
) -> web.Application:
    """``POST /generate``, ``GET /health, /ready, /model_info``; a server may add its own routes."""
    server = _Server(handler, limits, admit or (lambda prompts: nullcontext()))
    middlewares: list[Middleware] = [_answer_errors]
    if observe is not None:
        middlewares.insert(0, _observer(observe))
    if token is not None:
        middlewares.append(require_token(token, open_paths=OPEN_PATHS))
    app = web.Application(middlewares=middlewares, client_max_size=limits.max_body_bytes)
    app[_SERVER] = server
    app.router.add_post("/generate", server.generate)
    app.router.add_get("/health", server.health)
    app.router.add_get("/ready", server.ready)
    app.router.add_get("/model_info", server.model_info)
    return app


async def drain(app: web.Application, *, deadline_s: float) -> bool:
    """Take no new prompts, and wait for those at work; False where the deadline came first."""
    server = app[_SERVER]
    server.is_draining = True
    return await server.at_work.wait_idle(deadline_s)


class _Server:
    def __init__(self, handler: GenerateHandler, limits: ServerLimits, admit: Admit) -> None:
        self._handler = handler
        self.limits = limits
        self._admit = admit
        self._num_requests = 0
        self._rids: set[str] = set()
        self._buffered = Buffered(limits.max_buffered_bytes)
        self.at_work = TasksAtWork()
        self.is_draining = False

    async def health(self, request: web.Request) -> web.Response:
        """Whether the process answers at all, also while it drains."""
        del request
        return web.Response()

    async def ready(self, request: web.Request) -> web.Response:
        """Whether new prompts are welcome."""
        del request
        self._require_open()
        return web.Response()

    def _require_open(self) -> None:
        if self.is_draining:
            raise ServerUnavailableError("the server is stopping: ask another one")

    async def model_info(self, request: web.Request) -> web.Response:
        del request
        return _json(msgspec.json.encode(self._handler.model_info()))

    async def generate(self, request: web.Request) -> web.Response:
        """One prompt or a batch; where the server is cut off meanwhile, a 503."""
        self._require_open()
        task = self.at_work.enter()
        try:
            return await self._generate(request)
        except asyncio.CancelledError:
            if not self.at_work.is_cut:
                raise  # the client has hung up
            task.uncancel()
            raise ServerUnavailableError("the server has stopped before this was done") from None
        finally:
            self.at_work.leave(task)

    async def _generate(self, request: web.Request) -> web.Response:
        prompts, is_batch = await self._prompts(request)
        self._require_open()  # it may have begun to drain while the body arrived
        self._check(prompts)
        with self._admit(prompts), self._counted(prompts):
            # Waits for the handler, whose own deadlines bound it.
            answers = await asyncio.gather(
                *(self._handler.generate(each) for each in prompts), return_exceptions=True
            )
        return _json(encode_replies([_or_raise(each) for each in answers], is_batch=is_batch))

    async def _prompts(self, request: web.Request) -> tuple[list[GenerateRequest], bool]:
        chunks: list[bytes] = []
        num_bytes = 0
        try:
            # Waits for the client to send what it has announced.
            async with asyncio.timeout(self.limits.body_deadline_s):
                async for chunk in request.content.iter_any():
                    chunks.append(chunk)
                    num_bytes += len(chunk)
                    self._take_in(chunk, num_bytes)
            return decode_requests(
                b"".join(chunks),
                max_prompts=self.limits.max_batch_size,
                max_context_tokens=self.limits.max_context_tokens,
            )
        except TimeoutError:
            raise RequestRejectedError(
                f"the body did not arrive within {self.limits.body_deadline_s:.3g} s", status=408
            ) from None
        except web.RequestPayloadError as exc:
            # Chunks or compression that are broken; cut connections end here too.
            raise RequestRejectedError(f"the body cannot be read: {exc}") from exc
        finally:
            self._buffered.take_off(num_bytes)

    def _take_in(self, chunk: bytes, num_bytes: int) -> None:
        """Count what has arrived of a body, unpacked."""
        is_room = self._buffered.add(len(chunk))
        if num_bytes > self.limits.max_body_bytes:
            raise RequestRejectedError(
                f"the body has more than {self.limits.max_body_bytes} bytes", status=413
            )
        if not is_room:
            raise ServerUnavailableError("too many large bodies arrive at the same time")

    @contextmanager
    def _counted(self, prompts: Sequence[GenerateRequest]) -> Iterator[None]:
        rids = {prompt.rid for prompt in prompts if prompt.rid is not None}
        self._num_requests += len(prompts)
        self._rids |= rids
        try:
            yield
        finally:
            self._num_requests -= len(prompts)
            self._rids -= rids

    def _check(self, prompts: Sequence[GenerateRequest]) -> None:
        if not 1 <= len(prompts) <= self.limits.max_batch_size:
            raise RequestRejectedError(
                f"a batch of {len(prompts)} prompts, expected 1 to {self.limits.max_batch_size}"
            )
        seen = set(self._rids)
        for prompt in prompts:
            check_request(prompt, self.limits)
            self._handler.check(prompt)
            if prompt.rid in seen:
                raise RequestRejectedError(f"rid {prompt.rid!r} is already in use")
            if prompt.rid is not None:
                seen.add(prompt.rid)
        if self._num_requests + len(prompts) > self.limits.max_requests:
            raise ServerUnavailableError(f"the queue is full ({self._num_requests} requests)")


_SERVER = web.AppKey("_SERVER", _Server)


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
async def _answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except RequestRejectedError as exc:
        return error_reply(exc.status, str(exc))
    except ServerBusyError as exc:
        response = error_reply(HTTPStatus.TOO_MANY_REQUESTS, str(exc))
        response.headers["Retry-After"] = str(math.ceil(exc.retry_after_s))
        return response
    except ServerUnavailableError as exc:
        response = error_reply(HTTPStatus.SERVICE_UNAVAILABLE, str(exc))
        response.headers["Retry-After"] = "1"
        return response
    except web.HTTPException as exc:
        # aiohttp's own refusals (unknown path, wrong method, body too large) in the contract's form
        response = error_reply(exc.status, exc.text or exc.reason)
        for name in _KEPT_HEADERS & set(exc.headers):
            response.headers[name] = exc.headers[name]
        return response
    except Exception as exc:  # noqa: BLE001
        # A defect of the handler ends this request, not the server, and not in silence.
        _log.exception("request to %s failed", request.path)
        return error_reply(HTTPStatus.INTERNAL_SERVER_ERROR, f"{type(exc).__name__}: {exc}")


def _observer(observe: Observe) -> Middleware:
    @web.middleware
    async def observed(request: web.Request, handler: Handler) -> web.StreamResponse:
        started, status = time.monotonic(), _HUNG_UP
        try:
            response = await handler(request)
            status = response.status
            return response
        finally:
            observe(request.path, status, time.monotonic() - started)

    return observed


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


@asynccontextmanager
async def serving(
    app: web.Application,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    shutdown_deadline_s: float = 10.0,
) -> AsyncIterator[str]:
    """Serve ``app`` for the length of the block and yield its base URL; port 0 picks a free one.

    At the end it drains: requests at work get ``shutdown_deadline_s``, what is not done by then a
    503. A request whose client hangs up is cancelled: nobody waits for its answer any more.

    Args:
        app: made by ``build_app``.
        host: to listen at.
        port: to listen at.
        shutdown_deadline_s: a second more is left for the last answers to be sent.
    """
    runner = web.AppRunner(
        app, shutdown_timeout=_ANSWER_DEADLINE_S, access_log=None, handler_cancellation=True
    )
    await runner.setup()
    listener: asyncio.Server | None = None
    try:
        listener = await _listener(runner, app[_SERVER].limits, host, port)
        bound_host, bound_port = listener.sockets[0].getsockname()[:2]
        bracketed = f"[{bound_host}]" if ":" in bound_host else bound_host
        yield f"http://{bracketed}:{bound_port}"
    finally:
        if not await drain(app, deadline_s=shutdown_deadline_s):
            _log.warning("requests were still at work after %.3g s", shutdown_deadline_s)
        app[_SERVER].at_work.cut()
        if listener is not None:
            listener.close()
        await runner.cleanup()


async def _listener(
    runner: web.AppRunner, limits: ServerLimits, host: str, port: int
) -> asyncio.Server:
    assert runner.server is not None  # it has been set up
    make = connections(
        runner.server,
        idle_deadline_s=limits.idle_deadline_s,
        max_connections=limits.max_connections,
    )
    loop = asyncio.get_running_loop()
    return await loop.create_server(make, host, port, family=socket.AF_UNSPEC, backlog=_BACKLOG)


async def serve_until_signal(
    app: web.Application,
    *,
    host: str = LOOPBACK,
    port: int = 0,
    shutdown_deadline_s: float = 10.0,
    announce: Callable[[str], None],
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGTERM or SIGINT; ``announce`` is told the base URL once it answers.

    Then call ``stopping`` and drain as ``serving`` does: clients learn that the server stops, and
    requests at work finish.
    """
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
        stopping()
