"""The client of ``/generate``: one pooled session, deadlines, retries, a cap on tokens in flight.

A request waits for its share of the token cap, is sent, and gives the share back before anything
else happens: a pause before a retry holds none, so one refused request never keeps others waiting.
What a server can mend (429, 502, 503, 504, timeouts, broken connections) is asked for again; what
it says about the request itself (other 4xx) is an error at once and keeps its words.
"""

from __future__ import annotations

import asyncio
import math
import random
import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
import msgspec

from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    GenerateApiError,
    MalformedReplyError,
    RequestRejectedError,
    ServerUnavailableError,
)
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    GenerateRequest,
    ModelInfo,
    decode_json,
    encode_request,
    error_message,
)
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Clock

T = TypeVar("T")

RETRIED_STATUSES = frozenset({429, 502, 503, 504})
_TOKEN = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_OWN_HEADERS = frozenset({"content-type", "content-length", "transfer-encoding"})
_SHORTEST_SECRET = 8
_MAX_BACKOFF_DOUBLINGS = 16


@dataclass(frozen=True)
class ClientLimits:
    """What a client may take; the fields of ``config.roles.TeacherConfig`` of the same names."""

    deadline_s: float = 120.0
    """For one call: waits for tokens, requests and pauses together."""
    request_deadline_s: float = 60.0
    max_retries: int = 4
    retry_backoff_s: float = 0.5
    """Upper end of the first pause; doubles with each retry, the pause is drawn from [0, end]."""
    max_inflight_tokens: int = 200_000


class TokenBudget:
    """A semaphore that counts tokens and serves in order of arrival.

    A request larger than the whole capacity takes all of it: it is admitted, alone.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @property
    def used(self) -> int:
        """Tokens in flight."""
        return self._used

    async def acquire(self, num_tokens: int, *, timeout_s: float) -> int:
        """Take ``num_tokens``, or the whole capacity where they are more.

        Returns:
            The tokens taken; give exactly these to ``release``.

        Raises:
            TimeoutError: they were not free within ``timeout_s``.
        """
        weight = min(num_tokens, self._capacity)
        async with asyncio.timeout(timeout_s):
            await self._wait_turn(weight)
        return weight

    def release(self, weight: int) -> None:
        """Give back what ``acquire`` took."""
        self._used -= weight
        self._admit_waiting()

    async def _wait_turn(self, weight: int) -> None:
        if not self._waiting and self._used + weight <= self._capacity:
            self._used += weight
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (weight, turn)
        self._waiting.append(entry)
        try:
            # Waits for earlier requests to end; _admit_waiting frees it.
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(weight)  # admitted and cancelled in the same moment
            else:
                self._waiting.remove(entry)
                self._admit_waiting()  # whoever stood behind may fit now
            raise

    def _admit_waiting(self) -> None:
        while self._waiting and self._used + self._waiting[0][0] <= self._capacity:
            weight, turn = self._waiting.popleft()
            if not turn.done():
                self._used += weight
                turn.set_result(None)


class _RetryableError(Exception):
    """An attempt that may go better next time; never leaves this module."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class _Answer:
    """A reply with status 200."""

    content_type: str
    body: bytes


class GenerateClient:
    """Talks to one server; use it as an async context manager, or call ``close``.

    Args:
        base_url: ``http(s)://host[:port][/prefix]``; the paths of the contract go behind it.
        limits: deadlines, retries and the token cap.
        headers: sent with every request, never logged; see ``read_headers_file``.
        clock: for deadlines and pauses.
        rng: for the jitter of pauses; must not be one that a run's results depend on.
    """

    def __init__(
        self,
        base_url: str,
        *,
        limits: ClientLimits | None = None,
        headers: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"server URL: expected http:// or https://, found {base_url!r}")
        if "@" in base_url:
            raise ConfigError("server URL holds credentials: put them into a headers file")
        self.base_url = base_url.rstrip("/")
        self.limits = limits or ClientLimits()
        self.budget = TokenBudget(self.limits.max_inflight_tokens)
        self._headers = dict(headers or {})
        self._clock: Clock = clock or SystemClock()
        self._rng = rng or random.Random()
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the pooled connections; a later call opens new ones."""
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    async def generate(
        self, request: GenerateRequest, *, deadline_s: float | None = None
    ) -> GenerateReply:
        """Ask until there is an answer, the retries are used up, or the deadline comes.

        Args:
            request: one prompt; a retry after the first try gets its own ``rid``, because the
                server may still be at work on the former one.
            deadline_s: for this call; by default the client's.

        Raises:
            RequestRejectedError: a 4xx that is not retried, with the server's words and status.
            ServerUnavailableError: no answer after all retries, or an error inside the server.
            MalformedReplyError: an answer that is not one of the contract.
            DeadlineError: the deadline came first, or would come during the next pause.
        """
        deadline = self._clock.now() + (
            self.limits.deadline_s if deadline_s is None else deadline_s
        )
        num_retries = 0
        while True:
            try:
                return await self._attempt(_renamed(request, num_retries), deadline)
            except _RetryableError as failure:
                if num_retries == self.limits.max_retries:
                    raise ServerUnavailableError(
                        f"no answer after {num_retries + 1} tries; last: {failure}"
                    ) from failure.__cause__
                pause = self._pause(num_retries, failure.retry_after_s)
                if self._clock.now() + pause >= deadline:
                    raise DeadlineError(
                        f"the next try would start in {pause:.3g} s, past the deadline, "
                        f"after {num_retries + 1} tries; last: {failure}"
                    ) from failure.__cause__
            # Holds no share of the token budget: others go on meanwhile.
            await self._clock.sleep(pause)
            num_retries += 1

    async def health(self) -> bool:
        """True when ``/health`` answers 200 within the request deadline; asks once."""
        try:
            await self._ask_once("/health")
        except GenerateApiError:
            return False
        return True

    async def model_info(self) -> ModelInfo:
        """What the server says about its model; asks once. Raises ``GenerateApiError``."""
        return self._decode(await self._ask_once("/model_info"), ModelInfo)

    async def _attempt(self, request: GenerateRequest, deadline: float) -> GenerateReply:
        num_tokens = len(request.input_ids) + request.sampling_params.max_new_tokens
        payload = encode_request(request)
        remaining = deadline - self._clock.now()
        try:
            # Waits for tokens of other requests; each of them is bounded by its own deadline.
            weight = await self.budget.acquire(num_tokens, timeout_s=remaining)
        except TimeoutError as exc:
            raise DeadlineError(
                f"{self.base_url}: {num_tokens} tokens did not become free within {remaining:.3g} s"
                f" ({self.budget.used} of {self.limits.max_inflight_tokens} in flight)"
            ) from exc
        try:
            timeout_s = min(self.limits.request_deadline_s, deadline - self._clock.now())
            answer = await self._exchange("POST", "/generate", payload, timeout_s)
        finally:
            self.budget.release(weight)
        return self._decode(answer, GenerateReply)

    async def _ask_once(self, path: str) -> _Answer:
        try:
            return await self._exchange("GET", path, None, self.limits.request_deadline_s)
        except _RetryableError as failure:
            raise ServerUnavailableError(str(failure)) from failure.__cause__

    async def _exchange(
        self, method: str, path: str, payload: bytes | None, timeout_s: float
    ) -> _Answer:
        """Send one request; what comes back has status 200."""
        where = self.base_url + path
        try:
            # Waits for the server, up to the request's deadline.
            async with (
                asyncio.timeout(timeout_s),
                self._open_session().request(
                    method, where, data=payload, allow_redirects=False
                ) as response,
            ):
                body = await response.read()
        except TimeoutError as exc:
            raise _RetryableError(f"{where}: no answer within {timeout_s:.3g} s") from exc
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError, OSError) as exc:
            raise _RetryableError(f"{where}: {type(exc).__name__}: {exc}") from exc
        except aiohttp.ClientError as exc:
            raise MalformedReplyError(f"{where}: {type(exc).__name__}: {exc}") from exc
        self._check_status(where, response.status, response.headers, body)
        return _Answer(response.content_type, body)

    def _check_status(
        self, where: str, status: int, headers: Mapping[str, str], body: bytes
    ) -> None:
        if status == 200:
            return
        said = f"{where}: HTTP {status}: {error_message(self._redacted(body))}"
        if status in RETRIED_STATUSES:
            raise _RetryableError(said, retry_after_s(headers))
        if 400 <= status < 500:
            raise RequestRejectedError(said, status=status)
        raise ServerUnavailableError(said)

    def _decode(self, answer: _Answer, form: type[T]) -> T:
        if answer.content_type != "application/json":
            raise MalformedReplyError(
                f"{self.base_url}: answered with content type {answer.content_type}, expected "
                f"application/json; it says: {error_message(self._redacted(answer.body))}"
            )
        try:
            return decode_json(answer.body, form)
        except MalformedReplyError as exc:
            start = self._redacted(answer.body)[:80]
            raise MalformedReplyError(f"{self.base_url}: {exc}; it starts with {start!r}") from None

    def _pause(self, num_retries: int, retry_after: float | None) -> float:
        doublings = min(num_retries, _MAX_BACKOFF_DOUBLINGS)
        jitter = self._rng.uniform(0.0, self.limits.retry_backoff_s * 2.0**doublings)
        # On top of Retry-After, else all that were refused together come back together.
        return (retry_after or 0.0) + jitter

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


def _renamed(request: GenerateRequest, num_retries: int) -> GenerateRequest:
    if num_retries == 0 or request.rid is None:
        return request
    return msgspec.structs.replace(request, rid=f"{request.rid}_retry{num_retries}")


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds that a ``Retry-After`` header asks for; None without one that can be read.

    A date is taken relative to the reply's own ``Date``, so the two clocks need not agree.
    """
    value = headers.get("Retry-After", "").strip()
    try:
        seconds = float(value)
    except ValueError:
        until = _http_date(value)
        if until is None:
            return None
        seconds = (
            until - (_http_date(headers.get("Date", "")) or datetime.now(UTC))
        ).total_seconds()
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _http_date(value: str) -> datetime | None:
    try:
        date = parsedate_to_datetime(value)
    except ValueError:
        return None
    return date if date.tzinfo else date.replace(tzinfo=UTC)


def read_headers_file(path: Path) -> dict[str, str]:
    """Read ``Name: value`` lines; blank lines and lines that start with ``#`` are skipped.

    Raises:
        ConfigError: the file cannot be read, or a line is no header. The message never quotes the
            line, which may hold a secret.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or "not UTF-8 text"
        raise ConfigError(f"headers file {path}: {reason}") from None
    headers: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip() or line.startswith("#"):
            continue
        name, colon, value = line.partition(":")
        problem = _header_problem(name, colon, value.strip(), headers)
        if problem:
            raise ConfigError(f"headers file {path}, line {number}: {problem}")
        headers[name] = value.strip()
    return headers


def _header_problem(name: str, colon: str, value: str, former: Mapping[str, str]) -> str | None:
    if not colon:
        return "expected `Name: value`, found no colon"
    if not _TOKEN.fullmatch(name):
        return "the name before the colon is no header name (letters, digits and -)"
    if not value or not value.isascii() or not value.isprintable():
        return f"the value of {name} is empty or holds characters outside printable ASCII"
    if name.lower() in _OWN_HEADERS:
        return f"{name} is set by the client itself"
    if name.lower() in {other.lower() for other in former}:
        return f"{name} occurs twice"
    return None
