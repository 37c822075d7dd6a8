"""Several servers of one model: which of them a request goes to.

Requests of one key (a group's siblings) go to one server, whose prefix cache then holds what they
share. Where that one is left alone by its breaker or has no room, the next one of the key's own
order takes them: rendezvous hashing, so that a server that comes or goes moves no other key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Sequence

from miniverl_dist.config.urls import server_url
from miniverl_dist.errors import ConfigError, ServerUnavailableError
from miniverl_dist.generate_api.breaker import BreakerLimits, BreakerState, CircuitBreaker
from miniverl_dist.generate_api.budget import TokenBudget
from miniverl_dist.ports import Clock

OnBreaker = Callable[[str, BreakerState], None]
"""Told the URL of a server and the new state of its breaker."""


class Endpoint:
    """One server: its address, its share of tokens in flight, and whether it is left alone."""

    def __init__(
        self,
        url: str,
        *,
        max_inflight_tokens: int,
        breaker: BreakerLimits,
        clock: Clock,
        on_breaker: OnBreaker | None = None,
    ) -> None:
        self.url = checked_url(url)
        self.budget = TokenBudget(max_inflight_tokens)
        self.breaker = CircuitBreaker(
            breaker,
            clock=clock,
            on_change=None if on_breaker is None else lambda state: on_breaker(self.url, state),
        )
        self.last_failure = ""
        """How its last hang or broken connection read."""


def checked_url(url: str) -> str:
    """The URL as ``config.urls.server_url`` writes it.

    Raises:
        ConfigError: it is not ``http(s)://host[:port][/prefix]``, or holds credentials.
    """
    try:
        return server_url(url)
    except ValueError as error:
        raise ConfigError(f"server URL: {error}") from None


class Endpoints:
    """Chooses; raises ``ConfigError`` where there is none, or one of them twice."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        urls = [endpoint.url for endpoint in endpoints]
        if not urls or len(set(urls)) < len(urls):
            raise ConfigError(f"server URLs: expected one or more, each once, found {urls}")
        self.all = tuple(endpoints)

    def choose(self, num_tokens: int, key: bytes, *, failed: Collection[str] = ()) -> Endpoint:
        """The server to ask.

        Args:
            num_tokens: of the request.
            key: requests of one key belong together.
            failed: URLs that have failed this call; they come last.

        Raises:
            ServerUnavailableError: the breakers leave all of them alone.
        """
        if len(self.all) == 1 and self.all[0].breaker.is_admitting:
            return self.all[0]
        admitting = [endpoint for endpoint in self._ranked(key) if endpoint.breaker.is_admitting]
        if not admitting:
            raise self._all_left_alone()
        fresh = [endpoint for endpoint in admitting if endpoint.url not in failed] or admitting
        for endpoint in fresh:
            if endpoint.budget.has_room(num_tokens):
                return endpoint
        return min(fresh, key=lambda endpoint: endpoint.budget.outstanding)

    @property
    def are_left_alone(self) -> bool:
        """True when ``choose`` would raise."""
        return not any(endpoint.breaker.is_admitting for endpoint in self.all)

    @property
    def trial_in_s(self) -> float:
        """Seconds until the first breaker lets somebody try; 0 while a trial is out."""
        return min(endpoint.breaker.trial_in_s for endpoint in self.all)

    def has_other(self, failed: Collection[str]) -> bool:
        """True when a server that has not failed this call can be asked at once."""
        return any(e.url not in failed and e.breaker.is_admitting for e in self.all)

    def _ranked(self, key: bytes) -> Sequence[Endpoint]:
        def weight(endpoint: Endpoint) -> bytes:
            return hashlib.blake2b(key, digest_size=8, key=_hash_key(endpoint.url)).digest()

        return sorted(self.all, key=weight, reverse=True)

    def _all_left_alone(self) -> ServerUnavailableError:
        first = self.trial_in_s
        urls = ", ".join(endpoint.url for endpoint in self.all)
        failures = [endpoint.last_failure for endpoint in self.all if endpoint.last_failure]
        last = f" (the last: {failures[-1]})" if failures else ""
        return ServerUnavailableError(
            f"{urls}: left alone after hangs or broken connections{last}; "
            + (f"the next try is let through in {first:.3g} s" if first else "a trial is out")
        )


def _hash_key(url: str) -> bytes:
    return hashlib.blake2b(url.encode(), digest_size=16).digest()
