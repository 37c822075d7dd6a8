"""A cap on tokens in flight that serves in order of arrival."""

from __future__ import annotations

import asyncio
from collections import deque


class TokenBudget:
    """A semaphore that counts tokens and serves in order of arrival.

    A request larger than the whole capacity takes all of it: it is admitted, alone.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._waiting_tokens = 0

    @property
    def used(self) -> int:
        """Tokens in flight."""
        return self._used

    @property
    def outstanding(self) -> int:
        """Tokens in flight and tokens waited for: the load an arrival has to stand behind."""
        return self._used + self._waiting_tokens

    def has_room(self, num_tokens: int) -> bool:
        """True when ``acquire`` would not wait."""
        return not self._waiting and self._used + min(num_tokens, self.capacity) <= self.capacity

    async def acquire(self, num_tokens: int, *, timeout_s: float) -> int:
        """Take ``num_tokens``, or the whole capacity where they are more.

        Returns:
            The tokens taken; give exactly these to ``release``.

        Raises:
            TimeoutError: they were not free within ``timeout_s``.
        """
        weight = min(num_tokens, self.capacity)
        if self.has_room(weight):
            self._used += weight
            return weight
        async with asyncio.timeout(timeout_s):
            await self._wait_turn(weight)
        return weight

    def release(self, weight: int) -> None:
        """Give back what ``acquire`` took."""
        self._used -= weight
        self._admit_waiting()

    async def _wait_turn(self, weight: int) -> None:
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (weight, turn)
        self._waiting.append(entry)
        self._waiting_tokens += weight
        try:
            # Waits for earlier requests to end; _admit_waiting frees it.
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.release(weight)  # admitted and cancelled in the same moment
            else:
                self._waiting.remove(entry)
                self._waiting_tokens -= weight
                self._admit_waiting()  # whoever stood behind may fit now
            raise

    def _admit_waiting(self) -> None:
        # A turn cancelled a moment ago still stands here and removes itself: it is passed over,
        # not taken away, and whoever stands behind it is let in by that removal.
        while self._waiting and self._used + self._waiting[0][0] <= self.capacity:
            if self._waiting[0][1].done():
                return
            weight, turn = self._waiting.popleft()
            self._waiting_tokens -= weight
            self._used += weight
            turn.set_result(None)
