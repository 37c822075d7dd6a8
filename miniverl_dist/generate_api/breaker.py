"""A circuit breaker: a server that hangs or cannot be reached is left alone for a while.

Without one, every call to a server that hangs waits out its whole deadline, and all of them hold
tokens of the budget meanwhile.

    closed --failures--> open --open_s--> half-open --one call answered--> closed
                          ^-------------------'  that call failed

Only hangs and broken connections are failures. An answer of any status shows that somebody is
there: a busy server (429, 503) says itself how long to stay away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from miniverl_dist.errors import ServerUnavailableError
from miniverl_dist.ports import Clock


class BreakerState(StrEnum):
    """What a breaker lets through."""

    CLOSED = "closed"
    """Every call."""
    OPEN = "open"
    """None."""
    HALF_OPEN = "half_open"
    """One at a time, to see whether the server is back."""


@dataclass(frozen=True)
class BreakerLimits:
    """When to leave a server alone; the fields of ``config.roles.BreakerConfig``."""

    failures_in_a_row: int = 5
    failure_share: float = 0.5
    """Share of failures among the last ``window`` calls that opens as well."""
    window: int = 20
    """Calls the share is taken over; fewer than these say nothing yet."""
    open_s: float = 10.0
    """Until the first call is let through again."""


class CircuitBreaker:
    """Counts how calls to one server end, and says whether to try another.

    Args:
        limits: when to open, and for how long.
        clock: for ``open_s``.
        on_change: told every new state.
    """

    def __init__(
        self,
        limits: BreakerLimits,
        *,
        clock: Clock,
        on_change: Callable[[BreakerState], None] | None = None,
    ) -> None:
        self._limits = limits
        self._clock = clock
        self._on_change = on_change
        self._outcomes: deque[bool] = deque(maxlen=limits.window)
        self._failures_in_a_row = 0
        self._open_until: float | None = None
        self._trial: int | None = None
        # The admission that is out to see whether the server is back.
        self._era = 0
        # Grows with every change of state: an admission of a former era says nothing any more.
        self.num_opened = 0

    @property
    def state(self) -> BreakerState:
        """Now."""
        if self._open_until is None:
            return BreakerState.CLOSED
        is_over = self._clock.now() >= self._open_until
        return BreakerState.HALF_OPEN if is_over else BreakerState.OPEN

    @property
    def is_admitting(self) -> bool:
        """True when ``admit`` would let a call through."""
        state = self.state
        return state is BreakerState.CLOSED or (
            state is BreakerState.HALF_OPEN and self._trial is None
        )

    @property
    def trial_in_s(self) -> float:
        """Seconds until a call is let through on trial; 0 when not open."""
        return max((self._open_until or 0.0) - self._clock.now(), 0.0)

    def admit(self) -> int:
        """Let one call through.

        Returns:
            An admission; give it back to ``record``, once.

        Raises:
            ServerUnavailableError: not now.
        """
        if self._open_until is None:
            return self._era
        if not self.is_admitting:
            raise ServerUnavailableError(
                f"left alone after hangs or broken connections, for {self.trial_in_s:.3g} s more"
            )
        self._era += 1
        self._trial = self._era
        self._tell(BreakerState.HALF_OPEN)
        return self._era

    def record(self, admission: int, *, is_failure: bool | None) -> None:
        """Learn how an admitted call ended; calls of a former state are ignored.

        Args:
            admission: what ``admit`` gave.
            is_failure: None for a call that says nothing about the server: it was cancelled, or had
                too little time.
        """
        if admission != self._era:
            return
        if self._trial is not None:
            self._end_trial(is_failure=is_failure)
        elif is_failure is not None:
            self._outcomes.append(is_failure)
            self._failures_in_a_row = self._failures_in_a_row + 1 if is_failure else 0
            if is_failure and self._is_too_much():
                self._open()

    def _is_too_much(self) -> bool:
        if self._failures_in_a_row >= self._limits.failures_in_a_row:
            return True
        share = sum(self._outcomes) / self._limits.window
        return len(self._outcomes) == self._limits.window and share >= self._limits.failure_share

    def _end_trial(self, *, is_failure: bool | None) -> None:
        self._trial = None
        if is_failure:
            self._open()
        elif is_failure is not None:
            self._era += 1
            self._open_until = None
            self._tell(BreakerState.CLOSED)

    def _open(self) -> None:
        self._era += 1
        self.num_opened += 1
        self._open_until = self._clock.now() + self._limits.open_s
        self._outcomes.clear()
        self._failures_in_a_row = 0
        self._tell(BreakerState.OPEN)

    def _tell(self, state: BreakerState) -> None:
        if self._on_change is not None:
            self._on_change(state)
