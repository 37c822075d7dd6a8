"""The bounded FIFO between rollout workers and the trainer.

Slots bound the staleness: at most ``(max_policy_lag + 1) * num_groups`` groups are handed out and
not yet trained on, and a slot is freed only after the publish that follows its batch. A group's
assignment is drawn when its slot opens, so it depends on committed results, not on which worker
was free first. Groups leave in the order of their tickets, not of their completion: the late ones
are the long ones, and dropping or delaying them would bias the batch.

    worker:  next_assignment -> (rollout, score) -> put | drop
    trainer: take -> ... update, publish ... -> release
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field

from miniverl_dist.errors import DeadlineError, EngineError
from miniverl_dist.ports import (
    Assignment,
    Curriculum,
    GroupOutcome,
    GroupTaker,
    ScoredGroup,
)

Arrival = asyncio.Future[ScoredGroup]

_MAX_STALE_REFILLS = 3
"""Per place. A refill is sampled under the weights of now; one that is stale again is a fault."""


@dataclass(frozen=True)
class BufferSizes:
    """Bounds of the buffer, from config."""

    num_groups: int
    max_policy_lag: int
    max_refills: int
    take_deadline_s: float

    @property
    def capacity(self) -> int:
        """Groups handed out and not yet released."""
        return (self.max_policy_lag + 1) * self.num_groups


@dataclass
class BufferCounters:
    """What happened to groups since the start."""

    refilled: int = 0
    """Groups dropped and replaced in their place."""
    too_stale: int = 0
    """Groups whose lag exceeded the bound at take."""


@dataclass
class _Place:
    """One FIFO place: its present assignment, and its group once that is there."""

    assignment: Assignment
    replaced: tuple[GroupOutcome, ...] = ()
    """Groups dropped from this place, for the curriculum."""
    group: ScoredGroup | None = None
    arrived: asyncio.Event = field(default_factory=asyncio.Event)


class GroupBuffer:
    """Implements `ports.TrajectorySource` over rollout workers in the same event loop."""

    def __init__(
        self,
        curriculum: Curriculum,
        sizes: BufferSizes,
        *,
        next_ticket: int = 0,
        num_tickets: int | None = None,
        num_publishes: int = 0,
        publish_of_version: Mapping[int, int] | None = None,
        on_drop: Callable[[Assignment, str], None] = lambda assignment, reason: None,
    ) -> None:
        """Open the first slots.

        Args:
            curriculum: Draws the assignments.
            sizes: Bounds.
            next_ticket: First FIFO place to hand out (a resumed run: the state's).
            num_tickets: Place behind the last one; None has no end.
            num_publishes: Publishes confirmed so far.
            publish_of_version: Publish number of each policy version the engines may still
                sample under, for the lag check.
            on_drop: Told about each dropped group, with the reason.
        """
        self._curriculum, self._sizes = curriculum, sizes
        self._last_ticket = num_tickets
        self._next_ticket = next_ticket
        self._places: deque[_Place] = deque()
        self._waiting: asyncio.PriorityQueue[tuple[int, int, Assignment]] = asyncio.PriorityQueue()
        self._taken = 0
        self._on_drop = on_drop
        self.num_publishes = num_publishes
        self._publish_of_version = dict(publish_of_version or {})
        self.counters = BufferCounters()
        self._open(sizes.capacity)

    @property
    def next_ticket(self) -> int:
        """First FIFO place that has not been trained on: where a resumed run goes on."""
        return self._places[0].assignment.ticket if self._places else self._next_ticket

    def _open(self, count: int) -> None:
        for _ in range(count):
            if self._last_ticket is not None and self._next_ticket >= self._last_ticket:
                return
            self._offer(self._curriculum.assign(self._next_ticket), new=True)
            self._next_ticket += 1

    def _offer(self, assignment: Assignment, *, new: bool) -> None:
        if new:
            self._places.append(_Place(assignment))
        self._waiting.put_nowait((assignment.ticket, assignment.attempt, assignment))

    async def next_assignment(self) -> Assignment:
        """The open assignment with the lowest ticket; waits for the trainer to release slots.

        Unbounded by design: a worker without work is idle, not stuck. The trainer's own deadlines
        bound the step that it waits for.
        """
        return (await self._waiting.get())[2]

    def put(self, group: ScoredGroup) -> None:
        """Fill the group's place."""
        place = self._place(group.assignment)
        place.group = group.model_copy(update={"replaced": place.replaced})
        place.arrived.set()

    def drop(self, group: ScoredGroup, reason: str) -> bool:
        """Refill a group's place with another assignment; False when its refills are used up.

        The caller then puts the group as it is, so that the place never stays empty. A dropped
        group's outcome stays with its place: a task that always passes has no variance, and would
        otherwise never advance.
        """
        place = self._place(group.assignment)
        if group.assignment.attempt >= self._sizes.max_refills:
            return False
        place.replaced = (*place.replaced, group.outcome)
        self._refill(place, reason)
        return True

    def _refill(self, place: _Place, reason: str) -> None:
        self._on_drop(place.assignment, reason)
        self.counters.refilled += 1
        place.assignment = self._curriculum.reassign(place.assignment)
        place.group = None
        place.arrived.clear()
        self._offer(place.assignment, new=False)

    def _place(self, assignment: Assignment) -> _Place:
        for place in self._places:
            if place.assignment == assignment:
                return place
        raise KeyError(f"no open place for group {assignment.group_id}: put or dropped twice?")

    async def take(self, num_groups: int, each: GroupTaker | None = None) -> list[ScoredGroup]:
        """The oldest ``num_groups`` groups, in order; a group that is too stale is replaced.

        Args:
            num_groups: Size of the batch.
            each: Called with each group and its index in the batch while later ones are still
                sampled, one at a time and in the order of their arrival; its time does not count
                against the deadline.

        Raises:
            DeadlineError: they did not arrive within ``deadlines.take_s``.
            EngineError: a place stays too stale however often it is refilled.
        """
        places = [self._places[index] for index in range(num_groups)]
        awaited: dict[Arrival, int] = {
            asyncio.ensure_future(self._fresh_group(place)): index
            for index, place in enumerate(places)
        }
        taken: dict[int, ScoredGroup] = {}
        try:
            async for arrived in self._in_time(awaited):
                index = awaited[arrived]
                taken[index] = arrived.result()
                if each is not None:
                    await each(index, taken[index])
        finally:
            for waiting in awaited:
                waiting.cancel()
            await asyncio.wait(awaited)  # a place that fails late must not fail unheard
        self._taken = num_groups
        return [taken[index] for index in range(num_groups)]

    async def _in_time(self, awaited: Collection[Arrival]) -> AsyncIterator[Arrival]:
        """Places as they are filled; the deadline counts the waiting only."""
        left_s, now = self._sizes.take_deadline_s, asyncio.get_running_loop().time
        open_places = list(awaited)
        while open_places:
            started = now()
            # Waits for a worker of these places; it always puts, drops or fails the run.
            done, _ = await asyncio.wait(
                open_places, timeout=left_s, return_when=asyncio.FIRST_COMPLETED
            )
            left_s = max(left_s - (now() - started), 0.0)
            if not done:
                raise DeadlineError(
                    f"only {len(awaited) - len(open_places)} of {len(awaited)} groups arrived "
                    f"within {self._sizes.take_deadline_s} s (deadlines.take_s); see events.jsonl "
                    "for what the rollout workers are doing"
                )
            for arrived in [place for place in open_places if place in done]:
                yield arrived
            open_places = [place for place in open_places if place not in done]

    async def _fresh_group(self, place: _Place) -> ScoredGroup:
        for _ in range(_MAX_STALE_REFILLS + 1):
            await place.arrived.wait()
            group = place.group
            assert group is not None, "arrived is set only together with a group"
            lag = self.lag(group)
            if lag <= self._sizes.max_policy_lag:
                return group
            self.counters.too_stale += 1
            self._refill(place, f"policy lag {lag} > {self._sizes.max_policy_lag}")
        raise EngineError(
            f"group {place.assignment.group_id} was sampled {_MAX_STALE_REFILLS + 1} times and was "
            f"too stale each time (policy lag {lag}, bound {self._sizes.max_policy_lag}): an "
            "engine keeps old weights"
        )

    @property
    def num_finished(self) -> int:
        """Groups that wait in their places, behind those that have been taken."""
        waiting = list(self._places)[self._taken :]
        return sum(place.group is not None for place in waiting)

    def lag(self, group: ScoredGroup) -> int:
        """Publishes between the oldest span of the group and now."""
        oldest = min(
            (
                self._publish_of_version.get(member.trajectory.oldest_version, group.num_publishes)
                for member in group.members
                if member.trajectory.sampled_spans
            ),
            default=group.num_publishes,
        )
        return self.num_publishes - oldest

    def note_publish(self, policy_version: int) -> None:
        """Record a confirmed publish; call before `release`."""
        self.num_publishes += 1
        self._publish_of_version[policy_version] = self.num_publishes

    def release(self, num_publishes: int, *, trained: bool) -> None:
        """Free the slots of the batch taken last and hand out as many new places."""
        if num_publishes != self.num_publishes:
            raise ValueError(
                f"release after publish {num_publishes}, but {self.num_publishes} are confirmed"
            )
        if not trained and self._last_ticket is not None:
            self._last_ticket += self._taken
        for _ in range(self._taken):
            self._places.popleft()
        freed, self._taken = self._taken, 0
        self._open(freed)
