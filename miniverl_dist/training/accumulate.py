"""One step's update of the student: of the whole batch at once, or group by group.

    whole:        take every group -> build batch -> update
    accumulating: a group arrives -> build its part -> accumulate (while others are sampled)
                  ... -> build batch (for its record and its limits) -> commit what is accumulated

Which groups make the batch is as before: those that are next in FIFO order. Their gradients are
computed in the order of arrival, for else everything behind a slow group would wait for it. The
optimizer step is the same up to rounding: losses are sums over tokens, and the student divides at
the commit. The journal keeps the order of computation, so a replay adds the same numbers in the
same order. A student that is lost loses its gradients too: the parts wait here until the commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeVar

from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import StudentLostError
from miniverl_dist.ports import ScoredGroup, StudentPool
from miniverl_dist.schemas.batch import TrainBatch, UpdateResult
from miniverl_dist.training.batch_builder import SpanByteEnds, build_batch

Result = TypeVar("Result")


class StepUpdate(Protocol):
    """What the loop does with the groups of one step."""

    def add(self, place: int, group: ScoredGroup) -> None:
        """A group that has arrived, and its index in the batch; nothing is computed yet."""

    async def advance(self) -> None:
        """Compute what can be computed with the groups so far; safe to repeat."""

    async def finish(self, batch: TrainBatch) -> UpdateResult:
        """Take the optimizer step; safe to repeat when the student was lost meanwhile.

        Args:
            batch: All groups together.
        """

    async def discard(self) -> None:
        """The step is abandoned."""

    def computed_order(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """The batch's groups in the order in which their gradients were computed."""


class WholeUpdate:
    """Waits for the whole batch."""

    def __init__(self, students: StudentPool, deadline: UpdateDeadline) -> None:
        self._students, self._deadline = students, deadline

    def add(self, place: int, group: ScoredGroup) -> None:
        """See `StepUpdate`."""

    async def advance(self) -> None:
        """See `StepUpdate`."""

    async def finish(self, batch: TrainBatch) -> UpdateResult:
        """See `StepUpdate`."""
        return await self._deadline.bound(self._students.update(batch))

    async def discard(self) -> None:
        """See `StepUpdate`."""

    def computed_order(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """See `StepUpdate`: all at once, in their own."""
        return groups


class AccumulatingUpdate:
    """Gives the student each group's part as soon as it may."""

    def __init__(
        self,
        students: StudentPool,
        deadline: UpdateDeadline,
        config: RunConfig,
        byte_ends: SpanByteEnds,
    ) -> None:
        self._students, self._deadline = students, deadline
        self._config, self._byte_ends = _without_drop_limit(config), byte_ends
        self._added: list[ScoredGroup] = []
        self._parts: list[tuple[int, TrainBatch]] = []
        self._num_given = 0
        """Parts that the student holds the gradients of."""

    def add(self, place: int, group: ScoredGroup) -> None:
        """See `StepUpdate`. A group without a token to train on has no part."""
        self._added.append(group)
        part = build_batch([group], self._config, self._byte_ends).batch
        if part is not None:
            self._parts.append((place, part))

    async def advance(self) -> None:
        """See `StepUpdate`."""
        try:
            while self._num_given < len(self._parts):
                place, part = self._parts[self._num_given]
                await self._deadline.bound(self._students.accumulate(part, place))
                self._num_given += 1
        except StudentLostError:
            self._num_given = 0
            raise

    async def finish(self, batch: TrainBatch) -> UpdateResult:
        """See `StepUpdate`; the parts are what counts, the batch is their record."""
        del batch
        await self.advance()
        try:
            return await self._deadline.bound(self._students.commit_accumulated())
        except StudentLostError:
            self._num_given = 0
            raise

    async def discard(self) -> None:
        """See `StepUpdate`."""
        if self._parts:
            await self._deadline.bound(self._students.discard_accumulated())

    def computed_order(self, groups: Sequence[ScoredGroup]) -> Sequence[ScoredGroup]:
        """See `StepUpdate`: as they came."""
        del groups  # these very ones have been added
        return self._added


class UpdateDeadline:
    """Bounds each call that computes gradients; the student is lost when it runs out.

    Args:
        step: For the message.
        seconds: ``deadlines.update_s``.
    """

    def __init__(self, step: int, seconds: float) -> None:
        self._step, self._seconds = step, seconds

    async def bound(self, work: Awaitable[Result]) -> Result:
        """The work's result.

        Raises:
            StudentLostError: it took too long: a rank hangs in a collective, where only its end
                helps.
        """
        try:
            # Not `wait_for`: before Python 3.12 it swallows a stop that comes as the work ends.
            async with asyncio.timeout(self._seconds):
                # Waits for every rank; they commit together or not at all.
                return await work
        except TimeoutError as error:
            raise StudentLostError(
                f"step {self._step}: the update took longer than {self._seconds} s "
                "(deadlines.update_s)"
            ) from error


def open_update(
    students: StudentPool, config: RunConfig, byte_ends: SpanByteEnds, step: int
) -> StepUpdate:
    """The update of ``step`` in the way that config asks for."""
    deadline = UpdateDeadline(step, config.deadlines.update_s)
    if config.loop.accumulate:
        return AccumulatingUpdate(students, deadline, config, byte_ends)
    return WholeUpdate(students, deadline)


def add_all(update: StepUpdate, groups: Sequence[ScoredGroup]) -> list[ScoredGroup]:
    """Give an update the groups of a journalled batch, in the order of the journal.

    Returns:
        The groups in FIFO order.
    """
    in_order = sorted(groups, key=lambda group: group.assignment.ticket)
    places = {group.assignment.ticket: place for place, group in enumerate(in_order)}
    for group in groups:
        update.add(places[group.assignment.ticket], group)
    return in_order


def _without_drop_limit(config: RunConfig) -> RunConfig:
    """The limit is on the share of a step: one group may lack all its scores."""
    if config.teacher is None:
        return config
    teacher = config.teacher.model_copy(update={"max_drop_fraction": 1.0})
    return config.model_copy(update={"teacher": teacher})
