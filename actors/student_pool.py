"""The student pool of the in-process runtime: one rank, called directly."""

from __future__ import annotations

from pathlib import Path

from miniverl_dist.backends.base import StudentBackend
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.batch import FloatArray, SftBatch, TrainBatch, UpdateResult


class InProcessStudentPool:
    """Implements `ports.StudentPool` over one rank in this process.

    Calls run inline, so that a breakpoint in the update just works; the event loop stands still
    meanwhile, as it would wait for the update anyway.
    """

    def __init__(self, rank: StudentBackend) -> None:
        self._rank = rank

    @property
    def policy_version(self) -> int:
        """Committed optimizer steps."""
        return self._rank.policy_version

    async def update(self, batch: TrainBatch) -> UpdateResult:
        """See `ports.StudentPool`."""
        return self._rank.update(batch)

    async def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        """See `ports.StudentPool`."""
        return self._rank.sft_update(batch, learning_rate)

    async def finish_warmup(self) -> None:
        """See `ports.StudentPool`."""
        self._rank.finish_warmup()

    async def logprobs(self, batch: TrainBatch) -> FloatArray:
        """See `ports.StudentPool`."""
        return self._rank.logprobs(batch)

    async def snapshot(self) -> WeightSnapshot:
        """See `ports.StudentPool`."""
        return self._rank.snapshot()

    async def save(self, directory: Path) -> None:
        """See `ports.StudentPool`."""
        self._rank.save(directory)

    async def load(self, directory: Path, policy_version: int) -> None:
        """See `ports.StudentPool`."""
        self._rank.load(directory, policy_version)
