"""A client of OpenAI-compatible chat completions: what a model says, and the calls it makes.

A request that fails in transport, or that the server is too busy or too broken to answer, is asked
again word for word, seed included. Whatever has been answered is never asked again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from miniverl_dist.errors import DeadlineError, MalformedReplyError, ServerUnavailableError
from miniverl_dist.generate_api.endpoints import checked_url
from miniverl_dist.generate_api.transport import RetryableError, Transport
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Clock

T = TypeVar("T")


@dataclass(frozen=True)
class ChatLimits:
    """What one question may take."""

    deadline_s: float = 600.0
    """For one question, its retries and pauses included."""
    request_deadline_s: float = 300.0
    """For one request."""
    max_retries: int = 8
    retry_backoff_s: float = 0.5
    """Upper end of the first pause; doubles with each retry, the pause is drawn from [0, end]."""
    longest_backoff_s: float = 30.0


class FunctionCall(msgspec.Struct, frozen=True):
    """``arguments`` is JSON text; some servers send the object itself."""

    name: str | None = None
    arguments: str | dict[str, Any] | None = None


class ChatToolCall(msgspec.Struct, frozen=True):
    """One call of a reply."""

    function: FunctionCall
    id: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """What the model wrote; its reasoning, where the server gives it apart, is not read."""

    content: str | None = None
    tool_calls: tuple[ChatToolCall, ...] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """One continuation."""

    message: ChatMessage
    finish_reason: str | None = None


class ChatUsage(msgspec.Struct, frozen=True):
    """Tokens, in the server's own count."""

    completion_tokens: int = 0


class ChatReply(msgspec.Struct, frozen=True):
    """Reply to ``/chat/completions``."""

    choices: tuple[ChatChoice, ...]
    usage: ChatUsage | None = None


class _Model(msgspec.Struct, frozen=True):
    id: str


class _Models(msgspec.Struct, frozen=True):
    data: tuple[_Model, ...]


class ChatClient:
    """Talks to one server; call ``close`` in the end.

    Args:
        base_url: ``http(s)://host[:port][/prefix]``; ``/chat/completions`` goes behind it, so it
            mostly ends with ``/v1``.
        limits: Deadlines and retries.
        headers: Sent with every request, never logged.
        clock: For deadlines and pauses.
        rng: For the jitter of pauses; must not be one that results depend on.
    """

    def __init__(
        self,
        base_url: str,
        *,
        limits: ChatLimits | None = None,
        headers: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self.base_url = checked_url(base_url)
        self.limits = limits or ChatLimits()
        self._transport = Transport(headers or {})
        self._clock: Clock = clock or SystemClock()
        self._rng = rng or random.Random()

    async def close(self) -> None:
        """Close the pooled connections."""
        await self._transport.close()

    async def models(self) -> tuple[str, ...]:
        """Names of the models that the server offers.

        Raises:
            GenerateApiError, DeadlineError: as ``complete``.
        """
        found = await self._ask("GET", "/models", None, _Models)
        return tuple(model.id for model in found.data)

    async def complete(self, body: Mapping[str, Any]) -> ChatReply:
        """Ask until there is an answer, the retries are used up, or the deadline comes.

        Raises:
            RequestRejectedError: a 4xx that is not retried, with the server's words.
            ServerUnavailableError: no answer after all retries.
            MalformedReplyError: an answer that is no chat completion.
            DeadlineError: the deadline came first, or would come during the next pause.
        """
        payload = msgspec.json.encode(body)
        reply = await self._ask("POST", "/chat/completions", payload, ChatReply)
        if not reply.choices:
            raise MalformedReplyError(f"{self.base_url}: a chat completion without choices")
        return reply

    async def _ask(self, method: str, path: str, payload: bytes | None, form: type[T]) -> T:
        deadline = self._clock.now() + self.limits.deadline_s
        num_retries = 0
        while True:
            timeout_s = min(self.limits.request_deadline_s, deadline - self._clock.now())
            try:
                # Waits for the server; bounded by the request's deadline.
                answer = await self._transport.exchange(
                    method, self.base_url, path, payload, timeout_s
                )
            except (RetryableError, ServerUnavailableError) as failure:
                pause = self._pause_after(failure, num_retries, deadline)
            else:
                return self._transport.decode(answer, form)
            await self._clock.sleep(pause)  # bounded by the same deadline
            num_retries += 1

    def _pause_after(self, failure: Exception, num_retries: int, deadline: float) -> float:
        """Seconds until the next try; raises where there is none."""
        if num_retries >= self.limits.max_retries:
            raise ServerUnavailableError(
                f"no answer after {num_retries + 1} tries; last: {failure}"
            ) from failure.__cause__
        longest = min(self.limits.retry_backoff_s * 2.0**num_retries, self.limits.longest_backoff_s)
        pause = self._rng.uniform(0.0, longest)
        if isinstance(failure, RetryableError):
            pause += failure.retry_after_s or 0.0
        if self._clock.now() + pause >= deadline:
            raise DeadlineError(
                f"the next try would start in {pause:.3g} s, past the deadline of "
                f"{self.limits.deadline_s:.3g} s, after {num_retries + 1} tries; last: {failure}"
            ) from failure.__cause__
        return pause
