"""The connections of a server: how many, how long one may be silent, and what is no request at all.

aiohttp reads the head of a request before any handler sees it; what goes wrong there is answered
here, in the form of every other error, and without a traceback in the server's log.
"""

from __future__ import annotations

import asyncio
import logging
import resource
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from miniverl_dist.generate_api.wire import ErrorBody, ErrorReply

_log = logging.getLogger(__name__)
_SPARE_FILES = 64
"""Descriptors that a process needs beside its connections."""


def error_reply(status: int, message: str) -> web.Response:
    """An error in SGLang's form."""
    return web.Response(
        body=_error_body(status, message), status=status, content_type="application/json"
    )


def _error_body(status: int, message: str) -> bytes:
    return msgspec.json.encode(ErrorReply(ErrorBody(message=message, code=status)))


class _Connection(web.RequestHandler):
    """Answers what is no request as every other mistake is answered."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """What aiohttp calls where there is no request to give to a handler."""
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            return super().handle_error(request, status, exc, message)
        _log.info("no request from %s: %s", request.remote, exc)
        lines = (message or HTTPStatus(status).phrase).split("\n")
        response = error_reply(status, lines[0].strip().rstrip(":"))
        response.force_close()
        return response


class _Full(asyncio.Protocol):
    """Takes a connection only to say that there are too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        body = _error_body(503, "too many connections")
        head = (
            "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\nRetry-After: 1\r\nConnection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.close()


def connections(
    server: web.Server, *, idle_deadline_s: float, max_connections: int
) -> Callable[[], asyncio.Protocol]:
    """Makes a protocol for each connection that comes.

    Args:
        server: of aiohttp, with the app behind it.
        idle_deadline_s: for the whole head of a request to arrive, counted from the connection or
            from the end of the former request.
        max_connections: at once, those that are idle included; fewer where the process may not
            open so many files.
    """
    loop = asyncio.get_running_loop()
    options: dict[str, Any] = {"keepalive_timeout": idle_deadline_s, "access_log": None}
    limit = min(max_connections, max(1, _most_files() - _SPARE_FILES))

    def make() -> asyncio.Protocol:
        if len(server.connections) >= limit:
            return _Full()
        return _Connection(server, loop=loop, **options)

    return make


def _most_files() -> int:
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return 2**31 if soft == resource.RLIM_INFINITY else soft


class Buffered:
    """Bytes of bodies that have arrived and are not decoded yet, of all connections together."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0

    def add(self, num_bytes: int) -> bool:
        """Count them; False where they are too many. They count until they are taken off."""
        self._num_bytes += num_bytes
        return self._num_bytes <= self._max_bytes

    def take_off(self, num_bytes: int) -> None:
        """They have been decoded, or thrown away."""
        self._num_bytes -= num_bytes


class TasksAtWork:
    """The requests between their head and their answer."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()
        self.idle = asyncio.Event()
        self.idle.set()
        self.is_cut = False

    def enter(self) -> asyncio.Task[Any]:
        """The current task has a request."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.idle.clear()
        return task

    def leave(self, task: asyncio.Task[Any]) -> None:
        """It has its answer."""
        self._tasks.discard(task)
        if not self._tasks:
            self.idle.set()

    async def wait_idle(self, deadline_s: float) -> bool:
        """Wait until there are none; False where the deadline came first."""
        with suppress(TimeoutError):
            # Waits for the requests at work, which their handlers end.
            async with asyncio.timeout(deadline_s):
                await self.idle.wait()
        return self.idle.is_set()

    def cut(self) -> None:
        """Cancel all of them, now and for good."""
        self.is_cut = True
        for task in self._tasks:
            task.cancel()
