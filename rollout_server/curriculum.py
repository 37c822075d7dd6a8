"""Reverse-K: the model takes over T = N - K calls before the end, and T grows.

Assignments are a function of the ticket and of the results committed when its slot opens, never of
which worker is free. With strict on-policy sampling a resumed run therefore hands out the same
tasks; with a lag, places that were open at the crash are drawn anew under the committed horizons.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from miniverl_dist.config.recipe import CurriculumConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import CheckpointError, ConfigError
from miniverl_dist.ports import Assignment, GroupOutcome, ScoredGroup
from miniverl_dist.schemas.seeds import derive_seed


class ReverseK:
    """Implements `ports.Curriculum` for tasks with an expert call list.

    Each epoch visits every task once in an order drawn from the seed. ``fixed`` raises T for all
    tasks after each committed batch; ``on_success`` raises the T of a task whose group, played at
    that T, passed at least ``pass_threshold`` of its episodes.
    """

    def __init__(
        self,
        tasks: Mapping[str, TaskInfo],
        task_ids: Sequence[str],
        config: CurriculumConfig,
        *,
        seed: int,
    ) -> None:
        usable = [task_id for task_id in task_ids if tasks[task_id].num_calls > 0]
        if not usable:
            raise ConfigError(
                f"curriculum: none of the {len(task_ids)} training tasks has an expert call"
            )
        self._ids = usable
        self._config = config
        self._seed = seed
        limit = config.max_tail_calls
        self._limit = {
            task_id: tasks[task_id].num_calls
            if limit is None
            else min(limit, tasks[task_id].num_calls)
            for task_id in usable
        }
        self._num_calls = {task_id: tasks[task_id].num_calls for task_id in usable}
        self._tail = {i: min(config.initial_tail_calls, self._limit[i]) for i in usable}
        self._finished: set[str] = set()

    def assign(self, ticket: int) -> Assignment:
        """The assignment of FIFO place ``ticket`` under the committed horizons."""
        epoch, place = divmod(ticket, len(self._ids))
        order = sorted(
            self._ids, key=lambda task_id: derive_seed(self._seed, "order", epoch, task_id)
        )
        return self._assignment(ticket, 0, order[place])

    def reassign(self, dropped: Assignment) -> Assignment:
        """Another task in the same FIFO place (the same one where there is no other)."""
        attempt = dropped.attempt + 1
        others = [task_id for task_id in self._ids if task_id != dropped.task_id] or self._ids
        draw = random.Random(derive_seed(self._seed, "refill", dropped.ticket, attempt))
        return self._assignment(dropped.ticket, attempt, draw.choice(others))

    def _assignment(self, ticket: int, attempt: int, task_id: str) -> Assignment:
        tail = self._tail[task_id]
        return Assignment(
            ticket=ticket,
            attempt=attempt,
            task_id=task_id,
            prefix_calls=self._num_calls[task_id] - tail,
            tail_calls=tail,
        )

    def advance(self, groups: Sequence[ScoredGroup]) -> None:
        """Learn from one committed batch; groups without a countable episode teach nothing."""
        if self._config.schedule == "fixed":
            self._tail = {i: min(tail + 1, self._limit[i]) for i, tail in self._tail.items()}
            return
        for group in groups:
            for outcome in (*group.replaced, group.outcome):
                self._learn(outcome)

    def _learn(self, outcome: GroupOutcome) -> None:
        task_id, tail = outcome.task_id, outcome.tail_calls
        if not outcome.num_counted or tail != self._tail[task_id]:
            return  # a result at a former horizon says nothing about the present one
        if outcome.num_passed / outcome.num_counted < self._config.pass_threshold:
            return
        if tail == self._limit[task_id]:
            self._finished.add(task_id)
        else:
            self._tail[task_id] = tail + 1

    def summary(self) -> dict[str, float]:
        """The share of finished tasks.

        A task is finished when it passed at its largest T (``on_success``) or has reached it
        (``fixed``).
        """
        if self._config.schedule == "fixed":
            num_finished = sum(self._tail[i] == self._limit[i] for i in self._ids)
        else:
            num_finished = len(self._finished)
        return {
            "finished_tasks_fraction": num_finished / len(self._ids),
        }

    def histogram(self) -> dict[int, int]:
        """Number of tasks at each T."""
        return dict(sorted(Counter(self._tail.values()).items()))

    def state(self) -> dict[str, Any]:
        """JSON state: horizons and finished tasks."""
        return {"tail_calls": dict(self._tail), "finished": sorted(self._finished)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a saved state; it must be about the same tasks."""
        if set(state["tail_calls"]) != set(self._ids):
            raise CheckpointError(
                f"curriculum state is about {len(state['tail_calls'])} tasks, the config about "
                f"{len(self._ids)} others: resume needs the config that the run began with"
            )
        self._tail = dict(state["tail_calls"])
        self._finished = set(state["finished"])
