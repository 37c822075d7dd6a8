"""What the teacher wants at chosen positions: distributions, or texts that give them; numpy only.

A row is one position of a trajectory at which student and teacher are compared: the token at
position t, predicted by both from what stands before it.

Shapes: m rows of one trajectory, M rows of a batch, k kept tokens, P tokens of a
teacher's text, N packed student tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import BatchError

NO_TOKEN = -1
"""Pads ``TopKTargets.token_ids`` where fewer than k tokens are kept."""


@dataclass(frozen=True)
class TopKTargets:
    """The teacher's k most likely tokens at each row, and the mass of all others as one bucket.

    Kept tokens are ids of the *student*; where the teacher has another tokenizer, those of its
    tokens that the student spells as one token too, and the rest is in the bucket.
    """

    token_ids: NDArray[np.int64]
    """[m, k] real student ids, distinct within a row; ``NO_TOKEN`` behind the last kept one."""
    logprobs: NDArray[np.float64]
    """[m, k] nats under the teacher; -inf where there is no token."""
    tail_logprobs: NDArray[np.float64]
    """[m] nats of all that is not kept; -inf where nothing is left."""
    entropies: NDArray[np.float64]
    """[m] nats of the teacher's whole distribution."""

    def __post_init__(self) -> None:
        """Check shapes and that every row is a distribution."""
        num_rows = len(self.tail_logprobs)
        if self.token_ids.shape != self.logprobs.shape or self.token_ids.ndim != 2:
            raise BatchError(
                f"top-k targets hold ids {list(self.token_ids.shape)} and logprobs "
                f"{list(self.logprobs.shape)}, expected [rows, k] twice"
            )
        if not len(self.token_ids) == num_rows == len(self.entropies):
            raise BatchError(
                f"top-k targets hold {len(self.token_ids)} rows of tokens, {num_rows} tails and "
                f"{len(self.entropies)} entropies"
            )
        is_empty = self.token_ids == NO_TOKEN
        if not np.array_equal(np.isneginf(self.logprobs), is_empty):
            raise BatchError("top-k targets: a logprob is -inf exactly where there is no token")
        total = np.exp(self.logprobs).sum(axis=1) + np.exp(self.tail_logprobs)
        if not (np.abs(total - 1) <= 1e-3).all():  # NaN fails too
            worst = int(np.argmax(np.where(np.isnan(total), np.inf, np.abs(total - 1))))
            raise BatchError(f"top-k targets: row {worst} has mass {total[worst]}, expected 1")

    def __len__(self) -> int:
        return len(self.tail_logprobs)

    def rows(self, chosen: NDArray[np.int64] | slice) -> TopKTargets:
        """Some of the rows."""
        return TopKTargets(
            self.token_ids[chosen],
            self.logprobs[chosen],
            self.tail_logprobs[chosen],
            self.entropies[chosen],
        )


def join_top_k(parts: Sequence[TopKTargets]) -> TopKTargets:
    """Rows of several targets behind each other; a smaller k is padded."""
    width = max(part.token_ids.shape[1] for part in parts)

    def widened(array: NDArray[np.generic], fill: float) -> NDArray[np.generic]:
        missing = width - array.shape[1]
        return np.pad(array, ((0, 0), (0, missing)), constant_values=fill)

    return TopKTargets(
        np.concatenate([widened(part.token_ids, NO_TOKEN) for part in parts]).astype(np.int64),
        np.concatenate([widened(part.logprobs, -np.inf) for part in parts]).astype(np.float64),
        np.concatenate([part.tail_logprobs for part in parts]),
        np.concatenate([part.entropies for part in parts]),
    )


@dataclass(frozen=True)
class TeacherContext:
    """One text in the teacher's own ids, and where in it each row's token stands.

    A teacher that stays in memory computes its distributions from this when they are needed.
    """

    token_ids: NDArray[np.int64]
    """[P]."""
    positions: NDArray[np.int64]
    """[m] place of each row's token, at least 1: the teacher predicts it from the one before."""

    def __post_init__(self) -> None:
        """Check that every row is predicted by something."""
        if len(self.positions) and not (
            self.positions.min() >= 1 and self.positions.max() < len(self.token_ids)
        ):
            raise BatchError(
                f"teacher context of {len(self.token_ids)} tokens has rows at positions "
                f"{self.positions.min()} .. {self.positions.max()}, expected 1 .. "
                f"{len(self.token_ids) - 1}"
            )


@dataclass(frozen=True)
class TrajectoryTargets:
    """What one trajectory is compared with: stored distributions, or the teacher's text.

    With neither, the written tokens themselves are the targets (``sampled_nll``).
    """

    trajectory_id: str
    policy_version: int
    """Oldest version of the trajectory that this was made for."""
    positions: NDArray[np.int64]
    """[m] rising places in ``Trajectory.token_ids``, at least 1."""
    num_candidates: int
    """Written tokens that could have been rows, before any selection."""
    top_k: TopKTargets | None = None
    """[m] rows."""
    context: TeacherContext | None = None

    def __post_init__(self) -> None:
        """Check the rows against each other."""
        if self.top_k is not None and self.context is not None:
            raise BatchError("trajectory targets hold top-k rows and a teacher's context: one only")
        rows = len(self.positions)
        if self.top_k is not None:
            rows = len(self.top_k)
        if self.context is not None:
            rows = len(self.context.positions)
        if rows != len(self.positions):
            raise BatchError(f"{rows} target rows for {len(self.positions)} positions")
        if len(self.positions) and (self.positions[0] < 1 or (np.diff(self.positions) <= 0).any()):
            raise BatchError("target positions must rise from at least 1")


@dataclass(frozen=True)
class Distillation:
    """The divergence term of a batch: which packed tokens are compared, and with what."""

    positions: NDArray[np.int64]
    """[M] rising places in the packed arrays."""
    num_rows: tuple[int, ...]
    """Global denominator, one per minibatch: rows of all its sequences."""
    top_k: TopKTargets | None = None
    """[M] rows."""
    contexts: tuple[TeacherContext, ...] = ()
    """One per sequence where the teacher computes its distributions itself; together M rows."""
    num_candidates: int = 0
    """Written tokens of all sequences, before any selection."""
    kinds: tuple[str, ...] = ()
    """[M] kind of the span that each row lies in (``schemas.trajectory.SpanKind``)."""
