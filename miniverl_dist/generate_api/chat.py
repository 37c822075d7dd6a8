"""A client of OpenAI-compatible chat completions: what a model says, and the calls it makes.

A request that fails in transport, or that the server is too busy or too broken to answer, is asked
again word for word, seed included. Whatever has been answered is never asked again.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeVar

import msgspec

from miniverl_dist.errors import DeadlineError, MalformedReplyError, ServerUnavailableError
from miniverl_dist.generate_api.endpoints import checked_url
from miniverl_dist.generate_api.transport import RetryableError, Transport
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Clock

T = TypeVar("T")

_LONGEST_LIST_BYTES: Final = 16 * 2**20
"""Of a list of models: resellers serve hundreds, each with a description."""


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
    reply_bytes: int = 2**20
    """That a reply may have whatever was asked for."""
    reply_bytes_per_token: int = 512
    """On top, for each token allowed: one of the longest (128 blanks, say), escaped, and written
    twice, as servers do that give the reasoning under two names."""


# Only what is read is declared: a field that nobody needs cannot make a reply unreadable.


class FunctionCall(msgspec.Struct, frozen=True):
    """``arguments`` should be JSON text; some servers send the value itself.

    Any value is taken: whether it is an object is the model's affair, not the server's.
    """

    name: str | None = None
    arguments: Any = None


class ChatToolCall(msgspec.Struct, frozen=True):
    """One call of a reply."""

    function: FunctionCall


class ContentPart(msgspec.Struct, frozen=True):
    """A piece of a message whose content is a list; reasoning is not read here either."""

    type: Literal["text", "output_text", "refusal", "thinking", "reasoning"]
    text: str | None = None
    refusal: str | None = None

    @property
    def said(self) -> str:
        """The piece of the answer."""
        if self.type in ("thinking", "reasoning"):
            return ""
        return self.text or self.refusal or ""


class ChatMessage(msgspec.Struct, frozen=True):
    """What the model wrote; its reasoning, where the server gives it apart, is not read."""

    content: str | tuple[ContentPart, ...] | None = None
    refusal: str | None = None
    """The model's words where it declines; ``content`` is then empty."""
    tool_calls: tuple[ChatToolCall, ...] | None = None
    function_call: FunctionCall | None = None
    """One call in the form that came before ``tool_calls``."""

    @property
    def text(self) -> str:
        """What was said, the parts joined."""
        content = self.content or ""
        if not isinstance(content, str):
            content = "".join(part.said for part in content)
        return content or self.refusal or ""

    @property
    def calls(self) -> tuple[FunctionCall, ...]:
        """What was called, in either form; a server that sends both means the same calls."""
        if self.tool_calls:
            return tuple(call.function for call in self.tool_calls)
        return () if self.function_call is None else (self.function_call,)


class ChatChoice(msgspec.Struct, frozen=True):
    """One continuation."""

    message: ChatMessage
    finish_reason: str | None = None


class ChatReply(msgspec.Struct, frozen=True):
    """Reply to ``/chat/completions``."""

    choices: tuple[ChatChoice, ...]


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
        found = await self._ask("GET", "/models", None, _Models, _LONGEST_LIST_BYTES)
        return tuple(model.id for model in found.data)

    async def complete(self, body: Mapping[str, Any]) -> ChatReply:
        """Ask until there is an answer, the retries are used up, or the deadline comes.

        Args:
            body: Of the request; its ``max_tokens`` bounds how long a reply may be.

        Raises:
            RequestRejectedError: a 4xx that is not retried, with the server's words.
            ServerUnavailableError: no answer after all retries.
            MalformedReplyError: an answer that is no chat completion, or a longer one than was
                asked for.
            DeadlineError: the deadline came first, or would come during the next pause.
        """
        payload = msgspec.json.encode(body)
        limits = self.limits
        longest = limits.reply_bytes + limits.reply_bytes_per_token * body["max_tokens"]
        reply = await self._ask("POST", "/chat/completions", payload, ChatReply, longest)
        if not reply.choices:
            raise MalformedReplyError(f"{self.base_url}: a chat completion without choices")
        return reply

    async def _ask(
        self, method: str, path: str, payload: bytes | None, form: type[T], max_body_bytes: int
    ) -> T:
        deadline = self._clock.now() + self.limits.deadline_s
        num_retries = 0
        while True:
            timeout_s = min(self.limits.request_deadline_s, deadline - self._clock.now())
            try:
                # Waits for the server; bounded by the request's deadline.
                answer = await self._transport.exchange(
                    method, self.base_url, path, payload, timeout_s, max_body_bytes=max_body_bytes
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
