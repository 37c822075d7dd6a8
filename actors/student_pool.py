"""The student behind its port: one rank in this process, or a group of ranks in their own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from actors.supervisor import RestartBudget
from miniverl_dist.backends.base import StudentBackend
from miniverl_dist.errors import MiniverlError, StudentLostError, UpdateError
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.batch import FloatArray, SftBatch, TrainBatch, UpdateResult

AGREEMENT_S = 30.0
"""After the first rank's error, how long the others may take to come to the same one. All ranks
leave a step at the same collective, so those that do not come are stuck in another."""


class InProcessStudentPool:
    """Implements `ports.StudentPool` over one rank in this process.

    Calls run inline, so that a breakpoint in the update just works; the event loop stands still
    meanwhile, as it would wait for the update anyway.
    """

    def __init__(self, rank: StudentBackend) -> None:
        self._rank = rank
        self._was_rebuilt = False

    @property
    def policy_version(self) -> int:
        """Committed optimizer steps."""
        return self._rank.policy_version

    async def update(self, batch: TrainBatch) -> UpdateResult:
        """See `ports.StudentPool`."""
        return self._rank.update(batch)

    async def accumulate(self, batch: TrainBatch, place: int) -> None:
        """See `ports.StudentPool`."""
        self._rank.accumulate(batch, place)

    async def commit_accumulated(self) -> UpdateResult:
        """See `ports.StudentPool`."""
        return self._rank.commit_accumulated()

    async def discard_accumulated(self) -> None:
        """See `ports.StudentPool`."""
        self._rank.discard_accumulated()

    async def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        """See `ports.StudentPool`."""
        return self._rank.sft_update(batch, learning_rate)

    async def finish_warmup(self) -> None:
        """See `ports.StudentPool`."""
        self._rank.finish_warmup()

    async def logprobs(self, batch: TrainBatch) -> FloatArray:
        """See `ports.StudentPool`."""
        return self._rank.logprobs(batch)

    def snapshot(self, policy_version: int) -> WeightSnapshot:
        """The current weights, for the engines of this process."""
        del policy_version  # the weight store compares it with the snapshot's own
        return self._rank.snapshot()

    async def save(self, directory: Path) -> None:
        """See `ports.StudentPool`."""
        self._rank.save(directory)

    async def load(self, directory: Path, policy_version: int) -> None:
        """See `ports.StudentPool`."""
        self._rank.load(directory, policy_version)

    async def rebuild(self) -> None:
        """See `ports.StudentPool`: nothing to start anew here, the load restores everything.

        Once only: what was lost in this process twice would be lost again.
        """
        if self._was_rebuilt:
            raise UpdateError("the update stopped half way again: see the events before this one")
        self._was_rebuilt = True


class RankGroup(Protocol):
    """Ranks that have met, each in a process of its own (`actors.cluster` has Ray's)."""

    def call(self, method: str, *arguments: object) -> Sequence[Awaitable[Any]]:
        """Ask every rank the same, at once.

        Each answer is the method's result, or raises what it raised; ``StudentLostError`` where
        the rank is gone.
        """

    async def end(self) -> None:
        """End every process; may be repeated."""


GroupT = TypeVar("GroupT", bound=RankGroup)


class RankPool(Generic[GroupT]):
    """Implements `ports.StudentPool` over ranks that commit together or not at all.

    Args:
        start: Starts all ranks with their initial weights.
        budget: How often the ranks may be started anew.
        deadline_s: For any call but an update, which the loop bounds.
    """

    def __init__(
        self,
        start: Callable[[], Awaitable[GroupT]],
        budget: RestartBudget,
        *,
        deadline_s: float,
        agreement_s: float = AGREEMENT_S,
    ) -> None:
        self._start, self._budget = start, budget
        self._deadline_s, self._agreement_s = deadline_s, agreement_s
        self._group: GroupT | None = None
        self._policy_version = 0

    @property
    def policy_version(self) -> int:
        """Committed optimizer steps."""
        return self._policy_version

    @property
    def group(self) -> GroupT:
        """The ranks that stand.

        Raises:
            StudentLostError: none do.
        """
        if self._group is None:
            raise StudentLostError("the student's ranks have ended: a rebuild comes first")
        return self._group

    async def open(self) -> None:
        """Start the ranks."""
        self._group = await self._start()
        self._policy_version = 0

    async def close(self) -> None:
        """End the ranks."""
        group, self._group = self._group, None
        if group is not None:
            await group.end()

    async def update(self, batch: TrainBatch) -> UpdateResult:
        """See `ports.StudentPool`."""
        return await self._committed("update", batch)

    async def accumulate(self, batch: TrainBatch, place: int) -> None:
        """See `ports.StudentPool`."""
        await self._all("accumulate", batch, place, is_bounded=False)

    async def commit_accumulated(self) -> UpdateResult:
        """See `ports.StudentPool`."""
        return await self._committed("commit_accumulated")

    async def discard_accumulated(self) -> None:
        """See `ports.StudentPool`."""
        await self._all("discard_accumulated")

    async def _committed(self, method: str, *arguments: object) -> UpdateResult:
        """Take optimizer steps on all ranks; the loop bounds it."""
        results: list[UpdateResult] = await self._all(method, *arguments, is_bounded=False)
        versions = sorted({result.policy_version for result in results})
        if len(versions) > 1:
            await self.close()
            raise StudentLostError(f"the ranks stand at different policy versions: {versions}")
        self._policy_version = versions[0]
        return results[0]

    async def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        """See `ports.StudentPool`."""
        results: list[dict[str, float]] = await self._all("sft_update", batch, learning_rate)
        return results[0]

    async def finish_warmup(self) -> None:
        """See `ports.StudentPool`."""
        await self._all("finish_warmup")

    async def logprobs(self, batch: TrainBatch) -> FloatArray:
        """See `ports.StudentPool`."""
        results: list[FloatArray] = await self._all("logprobs", batch)
        return results[0]

    async def save(self, directory: Path) -> None:
        """See `ports.StudentPool`; all ranks write below one directory."""
        await self._all("save", directory)

    async def load(self, directory: Path, policy_version: int) -> None:
        """See `ports.StudentPool`."""
        await self._all("load", directory, policy_version)
        self._policy_version = policy_version

    async def rebuild(self) -> None:
        """See `ports.StudentPool`; a start that fails is tried again within the budget."""
        await self.close()
        failed: StudentLostError | None = None
        while self._budget.spend():
            try:
                await self.open()
            except StudentLostError as error:
                failed = error
            else:
                return
        why = f"; the last start failed: {failed}" if failed is not None else ""
        raise UpdateError(f"the student was lost again, beyond {self._budget}{why}") from failed

    async def _all(self, method: str, *arguments: object, is_bounded: bool = True) -> list[Any]:
        """Every rank's answer.

        Raises:
            MiniverlError: every rank raised this, so that all of them stand where they stood.
            StudentLostError: a rank is gone, or the ranks do not agree; all have been ended.
        """
        calls = [asyncio.ensure_future(call) for call in self.group.call(method, *arguments)]
        bound = self._deadline_s if is_bounded else None
        try:
            # Waits for all ranks, or for the first that raises.
            _, late = await asyncio.wait(calls, timeout=bound, return_when=asyncio.FIRST_EXCEPTION)
            if errors := _errors(calls):
                await self._agree(method, calls, errors[0])
            _require_all(method, calls, late, bound)
            return [call.result() for call in calls]
        except StudentLostError:
            await self.close()
            raise
        finally:
            for call in calls:
                call.cancel()

    async def _agree(
        self, method: str, calls: Sequence[asyncio.Future[Any]], first: BaseException
    ) -> None:
        """Raise the one error of all ranks, or say that they differ."""
        if isinstance(first, StudentLostError) or not isinstance(first, MiniverlError):
            raise StudentLostError(f"a rank failed to {method}: {first}") from first
        await asyncio.wait(calls, timeout=self._agreement_s)
        kinds = {type(error) for error in _errors(calls)}
        if kinds == {type(first)} and len(_errors(calls)) == len(calls):
            raise first
        raise StudentLostError(
            f"only {len(_errors(calls))} of {len(calls)} ranks failed to {method}, so they differ; "
            f"the first with {type(first).__name__}: {first}"
        ) from first


def _require_all(
    method: str, calls: Sequence[object], late: Collection[object], deadline_s: float | None
) -> None:
    if late:
        raise StudentLostError(
            f"{len(late)} of {len(calls)} ranks took longer than {deadline_s} s to {method}"
        )


def _errors(calls: Sequence[asyncio.Future[Any]]) -> list[BaseException]:
    done = (call for call in calls if call.done() and not call.cancelled())
    return [error for call in done if (error := call.exception()) is not None]
