"""One exchange with a server: a request, a deadline, and what kind of end it came to."""

from __future__ import annotations

import asyncio
import os
import re
from collections import Counter
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple, TypeVar

import aiohttp

from miniverl_dist.errors import MalformedReplyError, RequestRejectedError, ServerUnavailableError
from miniverl_dist.generate_api.headers import retry_after_s
from miniverl_dist.generate_api.wire import decode_json, error_message, printable

T = TypeVar("T")

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
GATEWAY_STATUSES = frozenset({502, 504})
"""A proxy in front says that the server hangs or is not there."""
_SHORTEST_SECRET = 8


class TryOutcome(StrEnum):
    """How one request ended."""

    ANSWERED = "answered"
    """Status 200; what it says is checked later."""
    BUSY = "busy"
    """429 or 503."""
    GATEWAY = "gateway"
    """502 or 504."""
    TIMEOUT = "timeout"
    CONNECTION = "connection"
    """Refused, reset, or a body that ends early."""
    REJECTED = "rejected"
    """Another 4xx."""
    SERVER_ERROR = "server_error"
    """500, a redirect, or anything else that is no answer."""
    NOT_HTTP = "not_http"


class RetryableError(Exception):
    """A try that may go better next time; never leaves this package."""

    def __init__(
        self, message: str, outcome: TryOutcome, *, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.outcome = outcome
        self.retry_after_s = retry_after_s


def connection_problem(error: Exception) -> str:
    """What broke, in the system's words where it refused the connection itself."""
    if isinstance(error, aiohttp.ClientConnectorError):
        cause = error.os_error
        number = cause.errno or 0
        words = os.strerror(number) if number > 0 else cause.strerror  # a name's are below 0
        return f"cannot connect: {words or cause}"
    return f"{type(error).__name__}: {error}"


class Answer(NamedTuple):
    """A reply with status 200."""

    url: str
    content_type: str
    body: bytes


async def _read(content: aiohttp.StreamReader, limit: int | None) -> bytes:
    """The body; of one that is longer, at least one byte more than the limit."""
    if limit is None:
        return await content.read()
    parts, size = [], 0
    async for part in content.iter_any():
        parts.append(part)
        size += len(part)
        if size > limit:
            break
    return b"".join(parts)


class Transport:
    """The pooled session, shared by all servers of a client; opened when first used.

    Args:
        headers: sent with every request, never logged.
    """

    def __init__(self, headers: Mapping[str, str]) -> None:
        self.tries: Counter[TryOutcome] = Counter()
        """How requests of every kind have ended."""
        self._headers = dict(headers)
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Close the pooled connections; a later exchange opens new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def exchange(
        self,
        method: str,
        url: str,
        path: str,
        payload: bytes | None,
        timeout_s: float,
        *,
        max_body_bytes: int | None = None,
    ) -> Answer:
        """Send one request; what comes back has status 200.

        Args:
            method: of HTTP.
            url: of the server.
            path: behind it.
            payload: JSON.
            timeout_s: for the whole exchange.
            max_body_bytes: of the reply, unpacked; the rest of a longer one is not read.

        Raises:
            RetryableError: a hang, a broken connection, or a status of ``RETRIED_STATUSES``.
            RequestRejectedError: another 4xx.
            ServerUnavailableError: any other status.
            MalformedReplyError: whatever answers does not speak HTTP, or does not come to an end.
        """
        where = url + path
        try:
            # Waits for the server, up to the request's deadline.
            async with (
                asyncio.timeout(timeout_s),
                self._open_session().request(
                    method, where, data=payload, allow_redirects=False
                ) as response,
            ):
                body = await _read(response.content, max_body_bytes)
        except TimeoutError as exc:
            message = f"{where}: no answer within {timeout_s:.3g} s"
            raise self._retryable(message, TryOutcome.TIMEOUT) from exc
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as exc:
            message = f"{where}: {connection_problem(exc)}"
            raise self._retryable(message, TryOutcome.CONNECTION) from exc
        except aiohttp.ClientError as exc:
            self.tries[TryOutcome.NOT_HTTP] += 1
            raise MalformedReplyError(
                f"{where}: {type(exc).__name__}: {printable(str(exc))}"
            ) from exc
        if response.status != 200:
            self._refuse(where, response.status, response.headers, body)
        self.tries[TryOutcome.ANSWERED] += 1
        if max_body_bytes is not None and len(body) > max_body_bytes:
            raise MalformedReplyError(
                f"{where}: a reply of more than {max_body_bytes} bytes, which is more than what "
                "was asked for can need"
            )
        return Answer(url, response.content_type, body)

    def decode(self, answer: Answer, form: type[T]) -> T:
        """Read the body; raises ``MalformedReplyError`` where it is not of this form."""
        if re.fullmatch(r"application/([^/]+\+)?json", answer.content_type) is None:
            raise MalformedReplyError(
                f"{answer.url}: answered with content type {printable(answer.content_type)}, "
                f"expected application/json; it says: {error_message(self._redacted(answer.body))}"
            )
        try:
            return decode_json(answer.body, form)
        except MalformedReplyError as exc:
            start = self._redacted(answer.body)[:80]
            raise MalformedReplyError(f"{answer.url}: {exc}; it starts with {start!r}") from None

    def _refuse(self, where: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
        said = f"{where}: HTTP {status}: {error_message(self._redacted(body))}"
        if status in RETRIED_STATUSES:
            outcome = TryOutcome.GATEWAY if status in GATEWAY_STATUSES else TryOutcome.BUSY
            raise self._retryable(said, outcome, retry_after_s=retry_after_s(headers))
        if 400 <= status < 500:
            self.tries[TryOutcome.REJECTED] += 1
            raise RequestRejectedError(said, status=status)
        self.tries[TryOutcome.SERVER_ERROR] += 1
        raise ServerUnavailableError(said)

    def _retryable(
        self, message: str, outcome: TryOutcome, *, retry_after_s: float | None = None
    ) -> RetryableError:
        self.tries[outcome] += 1
        return RetryableError(message, outcome, retry_after_s=retry_after_s)

    def _redacted(self, body: bytes) -> bytes:
        """Some servers repeat a refused key in their answer; errors get logged."""
        for value in self._headers.values():
            for part in (value, *value.split()):
                if len(part) >= _SHORTEST_SECRET:
                    body = body.replace(part.encode(), b"[redacted]")
        return body

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # The token budget bounds what is in flight. A second queue, inside the connector,
                # would count against the request's deadline.
                connector=aiohttp.TCPConnector(limit=0),
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={**self._headers, "Content-Type": "application/json"},
                timeout=aiohttp.ClientTimeout(total=None),
            )
        return self._session
