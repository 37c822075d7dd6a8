"""Real time behind the clock port."""

from __future__ import annotations

import asyncio
import time


class SystemClock:
    """Implements `ports.Clock`."""

    def now(self) -> float:
        """Monotonic seconds."""
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        await asyncio.sleep(seconds)
