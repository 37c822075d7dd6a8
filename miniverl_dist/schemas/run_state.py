"""The state of a run that a checkpoint names together with weights and optimizer."""

from __future__ import annotations

import hashlib
from typing import Any, Self

from pydantic import model_validator

from miniverl_dist.errors import ChecksumError
from miniverl_dist.schemas.messages import FrozenModel


class RunState(FrozenModel):
    """Everything but tensors that resuming needs; its step counts trained batches."""

    step: int
    policy_version: int
    num_publishes: int
    next_ticket: int
    """FIFO place of the next group that has not been handed out."""
    curriculum: dict[str, Any]
    counters: dict[str, int]
    """Drops, refusals, harness faults and the like since the start."""
    file_positions: dict[str, int]
    """Bytes of each append-only record (metrics, trajectories) that belong to this state."""
    config_digest: str
    seed: int
    warmup_done: bool


class CheckpointFile(FrozenModel):
    """One file of a checkpoint with its size and SHA-256."""

    path: str
    num_bytes: int
    sha256: str


class CheckpointManifest(FrozenModel):
    """``checkpoint.json``, the completion marker: written last, names every file."""

    format_version: int
    name: str
    state: RunState
    files: tuple[CheckpointFile, ...]
    sha256: str = ""
    """Over the other fields; computed where it is left empty, checked where it is given."""

    @model_validator(mode="after")
    def _seal(self) -> Self:
        found = hashlib.sha256(self.model_dump_json(exclude={"sha256"}).encode()).hexdigest()
        if not self.sha256:
            object.__setattr__(self, "sha256", found)  # frozen for everyone else
        elif self.sha256 != found:
            raise ChecksumError(
                f"manifest of checkpoint {self.name}: SHA-256 {found[:12]}, expected "
                f"{self.sha256[:12]}; it is damaged, use another checkpoint"
            )
        return self

    def to_bytes(self) -> bytes:
        """The one way this manifest is written; any other bytes are damage."""
        return self.model_dump_json(indent=2).encode()
