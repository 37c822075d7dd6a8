"""Starting the actors of a pool: all of them or none, and how often anew."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable
from typing import TypeVar

from miniverl_dist.config.cluster import ClusterConfig
from miniverl_dist.errors import MiniverlError
from miniverl_dist.ports import Clock

Started = TypeVar("Started")


async def all_started(
    starts: Iterable[Awaitable[Started]], end: Callable[[Started], Awaitable[None]]
) -> list[Started]:
    """What was started, all at once; when one start fails, the others are ended.

    Raises:
        BaseException: what the first of the failed starts raised.
    """
    # Each start has a deadline of its own.
    results = await asyncio.gather(*starts, return_exceptions=True)
    failed = [result for result in results if isinstance(result, BaseException)]
    started = [result for result in results if not isinstance(result, BaseException)]
    if failed:
        await asyncio.gather(*(end(one) for one in started))
        raise failed[0]
    return started


async def started_within(
    work: Awaitable[Started], who: str, deadline_s: float, lost: type[MiniverlError]
) -> Started:
    """What ``work`` gives once ``who`` has started.

    Raises:
        MiniverlError: ``lost``, when that took longer than ``cluster.start_deadline_s``.
    """
    try:
        # Waits for the actor's process and its model to come up.
        async with asyncio.timeout(deadline_s):
            return await work
    except TimeoutError as error:
        raise lost(
            f"{who} did not start within {deadline_s:g} s (cluster.start_deadline_s)"
        ) from error


class RestartBudget:
    """At most ``max_restarts`` within any ``restart_window_s``.

    A window rather than a total: a run of weeks may lose a node now and then, while a part that
    dies whenever it is started must end the run.
    """

    def __init__(self, config: ClusterConfig, clock: Clock) -> None:
        self._max, self._window_s = config.max_restarts, config.restart_window_s
        self._clock = clock
        self._spent: deque[float] = deque()

    def spend(self) -> bool:
        """Take one restart; False when there is none left."""
        now = self._clock.now()
        while self._spent and self._spent[0] <= now - self._window_s:
            self._spent.popleft()
        if len(self._spent) >= self._max:
            return False
        self._spent.append(now)
        return True

    def __str__(self) -> str:
        """For messages: what the budget is."""
        return (
            f"{self._max} restarts in {self._window_s:g} s "
            "(cluster.max_restarts, cluster.restart_window_s)"
        )
