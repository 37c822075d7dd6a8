"""How often a pool may start its actors anew before the run gives up."""

from __future__ import annotations

from collections import deque

from miniverl_dist.config.cluster import ClusterConfig
from miniverl_dist.ports import Clock


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
