"""Scored batches that are trained on but not yet committed.

A batch is written here before its update. After a crash the run resumes from the last checkpoint
and trains on these batches again instead of sampling anew; a commit clears them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from miniverl_dist.errors import ChecksumError
from miniverl_dist.observability.run_dir import write_atomic
from miniverl_dist.ports import ScoredGroup

_GROUPS = TypeAdapter(tuple[ScoredGroup, ...])


class Journal:
    """One file per batch: a line with the body's SHA-256, then the body."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def write(self, step: int, groups: Sequence[ScoredGroup]) -> None:
        """Store the batch of ``step`` (counted from 0) durably.

        Batches of later steps were sampled by a student that this batch is about to change in
        another way; they are forgotten first.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        for path, number in self._batches():
            if number > step:
                path.unlink()
        body = _GROUPS.dump_json(tuple(groups))
        head = json.dumps({"sha256": hashlib.sha256(body).hexdigest()}).encode()
        write_atomic(self._path(step), head + b"\n" + body)

    def read(self, step: int) -> list[ScoredGroup] | None:
        """The batch of ``step``, or None where none was journalled.

        Raises:
            ChecksumError: the file is damaged.
        """
        path = self._path(step)
        if not path.exists():
            return None
        head, _, body = path.read_bytes().partition(b"\n")
        found = hashlib.sha256(body).hexdigest()
        if head != json.dumps({"sha256": found}).encode():
            raise ChecksumError(
                f"journal/{path.name} differs from its checksum; delete it to sample that step "
                "again (the run is then no longer bit-exact)"
            )
        return list(_GROUPS.validate_json(body, strict=True))

    def verify(self) -> int:
        """Read every batch; returns their number. Raises ``ChecksumError`` for a damaged one."""
        return sum(self.read(number) is not None for _, number in self._batches())

    def clear(self, *, before_step: int) -> None:
        """Forget the batches of steps below ``before_step``; call after that step's commit.

        Later ones stay: a replay that was stopped half-way goes on with them.
        """
        for path, number in self._batches():
            if number < before_step:
                path.unlink()

    def _batches(self) -> list[tuple[Path, int]]:
        return [
            (path, int(path.stem.removeprefix("step-")))
            for path in self._folder.glob("step-*.json")
        ]

    def _path(self, step: int) -> Path:
        return self._folder / f"step-{step:06d}.json"
