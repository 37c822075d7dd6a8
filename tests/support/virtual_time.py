"""An asyncio event loop whose time is a number: waiting costs nothing, and order is exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.DefaultSelector):
    """Where the loop would wait for its next timer, time jumps to it."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise RuntimeError("everything waits for something that no timer will bring: deadlock")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Simulated seconds; for work in one thread without real input or output."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        # Timers within this of each other fire together; the real clock's resolution would let
        # the loop ask for a jump that rounds to nothing, over and over.
        self._clock_resolution = 1e-9

    def time(self) -> float:
        """Simulated seconds since the start."""
        return self._jumping.now


class VirtualClock:
    """`ports.Clock` of the running virtual loop."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtually(work: Coroutine[Any, Any, Result]) -> Result:
    """Run to the end in simulated time; what waits for nothing is an error, not a hang."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
