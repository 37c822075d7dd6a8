"""An environment's Python work in threads, so that hundreds of episodes share one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class OffLoop:
    """Runs blocking calls in threads of its own.

    Args:
        num_threads: 0 calls on the loop itself, where a debugger stops everything.
    """

    def __init__(self, num_threads: int) -> None:
        self._threads = (
            ThreadPoolExecutor(num_threads, thread_name_prefix="environment")
            if num_threads
            else None
        )

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of ``work``; one that is cancelled still waits until ``work`` has ended.

        So nobody closes what a thread is working on. ``work`` has to be bounded by itself.
        """
        if self._threads is None:
            return work()
        job = self._threads.submit(work)
        ended = asyncio.wrap_future(job)
        try:
            # Waits for earlier work of other episodes and then for this.
            return await asyncio.shield(ended)
        except asyncio.CancelledError:
            if not job.cancel():
                await asyncio.wait([ended])
            raise
