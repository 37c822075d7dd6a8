"""The client of ``/generate``: one pooled session, deadlines, retries, a cap on tokens in flight.

A request waits for its share of a server's token cap, is sent, and gives the share back before
anything else happens: a pause before a retry holds none, so one refused request never keeps others
waiting. What a server can mend (429, 502, 503, 504, timeouts, broken connections) is asked for
again, of another server where there is one; what it says about the request itself (other 4xx) is an
error at once and keeps its words. A server that hangs is left alone by its breaker; while all are,
a call fails at once, or with ``outlast_breaker`` waits for a trial within its own deadline.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import (
    DeadlineError,
    GenerateApiError,
    ServerUnavailableError,
)
from miniverl_dist.generate_api.breaker import BreakerLimits
from miniverl_dist.generate_api.budget import TokenBudget
from miniverl_dist.generate_api.endpoints import Endpoint, Endpoints, OnBreaker
from miniverl_dist.generate_api.transport import Answer, RetryableError, Transport, TryOutcome
from miniverl_dist.generate_api.wire import (
    GenerateReply,
    GenerateRequest,
    ModelInfo,
    ScoringReply,
    decode_input_logprobs,
    encode_request,
    scoring_request,
)
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Clock

_MAX_BACKOFF_DOUBLINGS = 16
_FAIR_SHARE = 0.5
"""A timeout is the server's fault where it had this share of its full deadline."""
_TRIAL_PAUSE_S = 0.5
"""At least the upper end of what a call waits beyond the time at which a trial is due: of all that
wait, one goes first, and the others look again while it is out."""
_HELD_UP = 1.5
"""A timeout that fires this much too late comes from a busy event loop on this side."""


@dataclass(frozen=True)
class ClientLimits:
    """What a client may take; the fields of ``config.roles.TeacherConfig`` of the same names."""

    deadline_s: float = 120.0
    """For one call: waits for tokens, requests and pauses together."""
    request_deadline_s: float = 60.0
    """For one request, beside what its length adds."""
    request_deadline_s_per_1k_tokens: float = 1.0
    """Added for each 1,000 tokens, prompt and new ones together."""
    max_retries: int = 4
    retry_backoff_s: float = 0.5
    """Upper end of the first pause; doubles with each retry, the pause is drawn from [0, end]."""
    max_inflight_tokens: int = 200_000
    """At each server."""
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    outlast_breaker: bool = False
    """While all servers are left alone, wait for a trial until the call's deadline; what was tried
    before does not count as retries. False: fail at once."""

    def request_deadline_for(self, num_tokens: int) -> float:
        """Seconds that one request of this length may take."""
        per_token_s = self.request_deadline_s_per_1k_tokens / 1000
        return self.request_deadline_s + per_token_s * num_tokens


T = TypeVar("T")
_BREAKER_FAILURES = frozenset({TryOutcome.TIMEOUT, TryOutcome.CONNECTION, TryOutcome.GATEWAY})


class _Slot(NamedTuple):
    """Leave to send one request."""

    endpoint: Endpoint
    weight: int
    """Tokens of its budget."""
    admission: int
    """By its breaker."""


@dataclass
class _Call:
    """What one call to ``generate`` knows across its tries."""

    request: GenerateRequest
    key: bytes
    whole_s: float
    """Seconds it had at its start."""
    deadline: float
    num_retries: int = 0
    num_outlasted: int = 0
    """Retries up to the last wait for a breaker; they do not count against the limit."""
    last: str = ""
    """URL asked last."""
    failed: set[str] = field(default_factory=set)
    """URLs that have failed since the last time that none was left."""

    @property
    def num_tokens(self) -> int:
        return len(self.request.input_ids) + self.request.sampling_params.max_new_tokens


class GenerateClient:
    """Talks to one server, or several of one model; an async context manager, or call ``close``.

    Args:
        base_url: ``http(s)://host[:port][/prefix]``, or several; the paths of the contract go
            behind it.
        limits: deadlines, retries, the token cap, and when to leave a server alone.
        headers: sent with every request, never logged; see ``headers.read_headers_file``.
        clock: for deadlines and pauses.
        rng: for the jitter of pauses; must not be one that a run's results depend on.
        on_breaker: told the URL and the new state when a server is left alone, or is back.
    """

    def __init__(
        self,
        base_url: str | Sequence[str],
        *,
        limits: ClientLimits | None = None,
        headers: Mapping[str, str] | None = None,
        clock: Clock | None = None,
        rng: random.Random | None = None,
        on_breaker: OnBreaker | None = None,
    ) -> None:
        self.limits = limits or ClientLimits()
        self._transport = Transport(headers or {})
        self._clock: Clock = clock or SystemClock()
        self._endpoints = Endpoints(
            [
                Endpoint(
                    url,
                    max_inflight_tokens=self.limits.max_inflight_tokens,
                    breaker=self.limits.breaker,
                    clock=self._clock,
                    on_breaker=on_breaker,
                )
                for url in ([base_url] if isinstance(base_url, str) else base_url)
            ]
        )
        self._rng = rng or random.Random()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """The servers."""
        return self._endpoints.all

    @property
    def base_url(self) -> str:
        """The server's URL; of several, all."""
        return ", ".join(endpoint.url for endpoint in self.endpoints)

    @property
    def budget(self) -> TokenBudget:
        """Tokens in flight at the first server, which mostly is the only one."""
        return self.endpoints[0].budget

    @property
    def num_inflight_tokens(self) -> int:
        """At all servers."""
        return sum(endpoint.budget.used for endpoint in self.endpoints)

    @property
    def tries(self) -> Counter[TryOutcome]:
        """How the requests so far have ended, those for ``/health`` and the like included."""
        return self._transport.tries

    async def close(self) -> None:
        """Close the pooled connections; a later call opens new ones."""
        await self._transport.close()

    def only(self, endpoint: Endpoint) -> GenerateClient:
        """The same client, asking this one server; close only one of the two."""
        narrowed = copy.copy(self)
        narrowed._endpoints = Endpoints([endpoint])
        return narrowed

    async def generate(
        self, request: GenerateRequest, *, deadline_s: float | None = None, key: str | None = None
    ) -> GenerateReply:
        """Ask until there is an answer, the retries are used up, or the deadline comes.

        Args:
            request: one prompt; a retry after the first try gets its own ``rid``, because the
                server may still be at work on the former one.
            deadline_s: for this call; by default the client's.
            key: requests of one key go to one server while that has room (a group's id); by default
                what the prompts share decides: the tokens before the first logprob.

        Raises:
            RequestRejectedError: a 4xx that is not retried, with the server's words and status.
            ServerUnavailableError: no answer after all retries, an error inside the server, or all
                servers are left alone by their breakers.
            MalformedReplyError: an answer that is not one of the contract.
            DeadlineError: the deadline came first, or would come during the next pause.
        """
        return await self._ask(request, GenerateReply, deadline_s, key)

    async def score(
        self,
        input_ids: Sequence[int],
        start: int,
        *,
        extra_key: str | None = None,
        deadline_s: float | None = None,
        key: str | None = None,
    ) -> NDArray[np.float64]:
        """Have ``input_ids[start:]`` scored; ``start`` >= 1.

        Args:
            input_ids: context and scored tokens.
            start: first scored token.
            extra_key: prefixes are reused only among requests of one key; see ``version_key``.
            deadline_s: as in ``generate``.
            key: as in ``generate``.

        Returns:
            [len(input_ids) - start] nats, finite, <= 0.

        Raises:
            GenerateApiError, DeadlineError: what ``generate`` and ``decode_input_logprobs`` raise;
                ``ServerUnavailableError`` also for a request that the server has aborted.
        """
        request = scoring_request(input_ids, start, extra_key=extra_key)
        reply = await self._ask(request, ScoringReply, deadline_s, key)
        finish = reply.meta_info.finish_reason
        if finish is not None and finish.type == "abort":
            why = finish.message or "no reason given"
            raise ServerUnavailableError(f"{self.base_url} aborted the request: {why}")
        return decode_input_logprobs(reply, input_ids=input_ids, start=start)

    async def _ask(
        self, request: GenerateRequest, form: type[T], deadline_s: float | None, key: str | None
    ) -> T:
        whole_s = self.limits.deadline_s if deadline_s is None else deadline_s
        call = _Call(request, self._key(request, key), whole_s, self._clock.now() + whole_s)
        while True:
            try:
                return self._transport.decode(await self._attempt(call), form)
            except RetryableError as failure:
                pause = self._pause_after(failure, call)
            # Holds no share of the token budget: others go on meanwhile.
            await self._clock.sleep(pause)
            call.num_retries += 1

    async def health(self) -> bool:
        """True when a server's ``/health`` answers 200 in its deadline; asks each at most once."""
        for endpoint in self.endpoints:
            try:
                await self._ask_once(endpoint, "/health")
            except GenerateApiError:
                continue
            return True
        return False

    async def model_info(self) -> ModelInfo:
        """What the first server says about its model; asks once. Raises ``GenerateApiError``."""
        return await self._model_info(self.endpoints[0])

    async def model_infos(self) -> dict[str, ModelInfo]:
        """What each server says about its model, by URL; asks once. Raises ``GenerateApiError``."""
        return {each.url: await self._model_info(each) for each in self.endpoints}

    async def _model_info(self, endpoint: Endpoint) -> ModelInfo:
        return self._transport.decode(await self._ask_once(endpoint, "/model_info"), ModelInfo)

    def _key(self, request: GenerateRequest, key: str | None) -> bytes:
        if len(self.endpoints) == 1:
            return b""
        if key is not None:
            return key.encode()
        start = request.logprob_start_len
        shared = request.input_ids[: start if start > 0 else None]
        return np.asarray(shared, dtype=np.int64).tobytes()

    async def _attempt(self, call: _Call) -> Answer:
        """One try, with a slot of its own; raises what ``Transport.exchange`` does."""
        slot = await self._take_slot(call)
        call.last = slot.endpoint.url
        full_s = self.limits.request_deadline_for(call.num_tokens)
        timeout_s = min(full_s, call.deadline - self._clock.now())
        started = self._clock.now()
        is_failure: bool | None = None  # cancelled: that says nothing about the server
        try:
            answer = await self._transport.exchange(
                "POST", slot.endpoint.url, "/generate", self._payload(call), timeout_s
            )
            is_failure = False
        except RetryableError as failure:
            is_failure = failure.outcome in _BREAKER_FAILURES
            had_little = timeout_s < _FAIR_SHARE * min(full_s, call.whole_s)
            was_held_up = self._clock.now() - started > _HELD_UP * timeout_s
            if failure.outcome is TryOutcome.TIMEOUT and (had_little or was_held_up):
                is_failure = None
            if is_failure:
                slot.endpoint.last_failure = str(failure)
            raise
        except GenerateApiError:
            is_failure = False
            raise
        finally:
            slot.endpoint.breaker.record(slot.admission, is_failure=is_failure)
            slot.endpoint.budget.release(slot.weight)
        return answer

    async def _take_slot(self, call: _Call) -> _Slot:
        """Choose a server, take the request's share of its token cap, and pass its breaker."""
        while True:
            try:
                endpoint = self._endpoints.choose(call.num_tokens, call.key, failed=call.failed)
            except ServerUnavailableError as left_alone:
                # Waits for a breaker to let somebody try, or for that trial; holds no tokens.
                await self._clock.sleep(self._pause_for_trial(left_alone, call))
                continue
            remaining = call.deadline - self._clock.now()
            try:
                # Waits for tokens of other requests; each of them is bounded by its own deadline.
                weight = await endpoint.budget.acquire(call.num_tokens, timeout_s=remaining)
            except TimeoutError as exc:
                raise DeadlineError(
                    f"{endpoint.url}: {call.num_tokens} tokens did not become free within "
                    f"{remaining:.3g} s ({endpoint.budget.used} of {endpoint.budget.capacity} in "
                    "flight)"
                ) from exc
            if endpoint.breaker.is_admitting:
                return _Slot(endpoint, weight, endpoint.breaker.admit())
            # Its breaker opened during the wait; another server may be left.
            endpoint.budget.release(weight)

    def _pause_for_trial(self, left_alone: ServerUnavailableError, call: _Call) -> float:
        """Seconds until the servers may be asked again; raises where this call does not wait."""
        if not self.limits.outlast_breaker:
            raise left_alone
        jitter = self._rng.uniform(0.0, max(self.limits.retry_backoff_s, _TRIAL_PAUSE_S))
        pause = self._endpoints.trial_in_s + jitter
        if self._clock.now() + pause >= call.deadline:
            raise ServerUnavailableError(
                f"{left_alone}; that would be past the {call.whole_s:.3g} s of this call"
            ) from None
        return pause

    def _payload(self, call: _Call) -> bytes:
        request = call.request
        if call.num_retries and request.rid is not None:
            name = f"{request.rid}_retry{call.num_retries}"
            request = msgspec.structs.replace(request, rid=name)
        return encode_request(request)

    async def _ask_once(self, endpoint: Endpoint, path: str) -> Answer:
        try:
            return await self._transport.exchange(
                "GET", endpoint.url, path, None, self.limits.request_deadline_s
            )
        except RetryableError as failure:
            raise ServerUnavailableError(str(failure)) from failure.__cause__

    def _pause_after(self, failure: RetryableError, call: _Call) -> float:
        """Seconds until the next try; raises where there is none."""
        if self.limits.outlast_breaker and self._endpoints.are_left_alone:
            call.num_outlasted = call.num_retries + 1  # with the servers back it begins anew
            return 0.0  # `_take_slot` waits for a trial
        if call.num_retries - call.num_outlasted >= self.limits.max_retries:
            raise ServerUnavailableError(
                f"no answer after {call.num_retries + 1} tries; last: {failure}"
            ) from failure.__cause__
        call.failed.add(call.last)
        doublings = min(call.num_retries - call.num_outlasted, _MAX_BACKOFF_DOUBLINGS)
        pause = self._rng.uniform(0.0, self.limits.retry_backoff_s * 2.0**doublings)
        if not self._endpoints.has_other(call.failed):
            # On top of Retry-After, else all that were refused together come back together.
            pause += failure.retry_after_s or 0.0
            call.failed.clear()
        if self._clock.now() + pause >= call.deadline:
            raise DeadlineError(
                f"the next try would start in {pause:.3g} s, past the deadline, "
                f"after {call.num_retries + 1} tries; last: {failure}"
            ) from failure.__cause__
        return pause
