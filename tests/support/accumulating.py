"""A student on the ports that accumulates, and can be lost at any of its calls."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path

from miniverl_dist.errors import StudentLostError
from miniverl_dist.schemas.batch import TrainBatch, UpdateResult
from tests.fakes import FakeStudents, Log

Loss = tuple[str, int]
"""(call, the how manieth time)."""


class AccumulatingStudents(FakeStudents):
    """Its weight after a commit is the one that an update of all parts together would give."""

    def __init__(self, log: Log, losses: Collection[Loss] = ()) -> None:
        super().__init__(log)
        self.parts: dict[int, TrainBatch] = {}
        """Accumulated by place, and not committed yet."""
        self.committed: list[list[TrainBatch]] = []
        self.on_accumulate: Callable[[], None] = lambda: None
        self._losses, self._times, self._is_lost = set(losses), Counter[str](), False

    def _reach(self, what: str) -> None:
        self._times[what] += 1
        if (what, self._times[what]) in self._losses:
            self._is_lost = True
            self.digest, self.policy_version = "half way", 99
        if self._is_lost:
            raise StudentLostError("rank 1 is gone")

    async def accumulate(self, batch: TrainBatch, place: int) -> None:
        self.log.append(f"accumulate {int(batch.group_ids[0].split('.')[0])}")
        self._reach("accumulate")
        assert place not in self.parts, "a part came twice"
        self.parts[place] = batch
        self.on_accumulate()

    async def commit_accumulated(self) -> UpdateResult:
        self.log.append("commit_accumulated")
        self._reach("commit_accumulated")
        assert self.parts, "nothing to commit"
        parts = [self.parts[place] for place in sorted(self.parts)]
        self.parts = {}
        self.committed.append(parts)
        arrays = [
            self.digest.encode(),
            *(part.token_ids.tobytes() for part in parts),
            *(part.advantages.tobytes() for part in parts),
        ]
        self.digest = hashlib.sha256(b"".join(arrays)).hexdigest()
        self.policy_version += 1
        self._reach("after the commit")
        return UpdateResult(self.policy_version, 1, {"loss": 0.5})

    async def discard_accumulated(self) -> None:
        self.log.append("discard_accumulated")
        self._reach("discard_accumulated")
        self.parts = {}

    async def save(self, directory: Path) -> None:
        self._reach("save")
        assert not self.parts, "a commit in the middle of a step"
        await super().save(directory)

    async def load(self, directory: Path, policy_version: int) -> None:
        self._reach("load")
        self.parts = {}
        await super().load(directory, policy_version)

    async def rebuild(self) -> None:
        await super().rebuild()
        self.parts, self._is_lost = {}, False
