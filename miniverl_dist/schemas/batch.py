"""The training batch and what an update gives back; numpy only.

Shapes: N packed tokens of all sequences, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.routing import PackedRows
from miniverl_dist.schemas.targets import Distillation

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class TrainBatch:
    """Sequences laid end to end: sequence b is ``[sequence_starts[b], sequence_starts[b + 1])``.

    Every per-token array belongs to the token at its own position t; the model predicts it from
    position t - 1, and only the backend performs that shift.
    """

    token_ids: IntArray
    """[N] student ids."""
    sequence_starts: IntArray
    """[B + 1], from 0 to N."""
    loss_mask: BoolArray
    """[N] True on trainable sampled tokens; never at a sequence's position 0."""
    advantages: FloatArray
    """[N]; 0 off the mask."""
    rollout_logprobs: FloatArray
    """[N] nats by the engine when sampling; NaN off the mask."""
    group_ids: tuple[str, ...]
    """[B]."""
    minibatch_ids: IntArray
    """[B] optimizer step (0 .. num_minibatches - 1) that each sequence belongs to."""
    num_loss_tokens: tuple[int, ...]
    """Global denominator of ``token_mean``, one per minibatch."""
    num_sequences: tuple[int, ...]
    """Global denominator of ``trajectory_mean``, one per minibatch."""
    policy_version: int
    """Version the sampling engines held (the oldest in the batch)."""
    temperature: float
    """Sampling temperature; the trainer divides its logits by it."""
    routed_experts: PackedRows | None = None
    """[N, layers, experts per token] the engine's routing of each token, -1 where a token has none;
    None: the trainer routes by itself."""
    is_sampled: bool = True
    """False for stored episodes: there is no sampling engine, so no policy loss, and
    ``rollout_logprobs`` are NaN throughout."""
    has_policy_term: bool = True
    """False where no advantage enters the loss: then nothing is clipped."""
    distillation: Distillation | None = None
    """Rows that are compared with a teacher's distribution, or learned as they stand."""
    metrics: dict[str, float] = field(default_factory=dict)
    """What building the batch measured (reward, reverse KL, drops); for the step's record."""

    def __post_init__(self) -> None:
        """Check the arrays against each other."""
        num_tokens = len(self.token_ids)
        for name in ("loss_mask", "advantages", "rollout_logprobs"):
            found = len(getattr(self, name))
            if found != num_tokens:
                raise BatchError(f"{name} has {found} entries for {num_tokens} tokens")
        starts = self.sequence_starts
        if len(starts) != len(self.group_ids) + 1 or starts[0] != 0 or starts[-1] != num_tokens:
            raise BatchError(f"sequence_starts {starts.tolist()} do not tile {num_tokens} tokens")
        if (np.diff(starts) <= 0).any():
            raise BatchError("every sequence needs at least one token")
        if self.loss_mask[starts[:-1]].any():
            raise BatchError("position 0 of a sequence has no prediction and cannot be trained")
        if (self.advantages[~self.loss_mask] != 0).any() or not np.isfinite(self.advantages).all():
            raise BatchError("advantages must be finite, and 0 off the loss mask")
        sampled = self.loss_mask if self.is_sampled else np.zeros_like(self.loss_mask)
        if not np.array_equal(np.isfinite(self.rollout_logprobs), sampled):
            raise BatchError(
                "rollout_logprobs must be finite exactly on the loss mask, and nowhere in a batch "
                "that nobody sampled"
            )
        if self.routed_experts is not None and (
            self.routed_experts.ndim != 3 or len(self.routed_experts) != num_tokens
        ):
            raise BatchError(
                f"routed_experts have shape {list(self.routed_experts.shape)}, expected "
                f"[{num_tokens}, layers, experts per token]"
            )
        self._check_minibatches()
        self._check_distillation()

    def _check_distillation(self) -> None:
        rows = self.distillation
        if rows is None:
            if not self.is_sampled:
                raise BatchError("a batch that nobody sampled has nothing to learn without rows")
            return
        if len(rows.num_rows) != self.num_minibatches:
            raise BatchError(
                f"{len(rows.num_rows)} row counts for {self.num_minibatches} minibatches"
            )
        if len(rows.positions) and not (
            (np.diff(rows.positions) > 0).all()
            and rows.positions[0] >= 0
            and rows.positions[-1] < len(self.token_ids)
            and self.loss_mask[rows.positions].all()
        ):
            raise BatchError("distillation rows must rise and lie on the loss mask")
        if rows.top_k is not None and len(rows.top_k) != len(rows.positions):
            raise BatchError(f"{len(rows.top_k)} target rows for {len(rows.positions)} positions")
        if rows.kinds and len(rows.kinds) != len(rows.positions):
            raise BatchError(f"{len(rows.kinds)} kinds for {len(rows.positions)} rows")
        if rows.contexts and len(rows.contexts) != len(self.group_ids):
            raise BatchError(
                f"{len(rows.contexts)} teacher contexts for {len(self.group_ids)} sequences"
            )
        if rows.contexts:
            wanted = self.rows_per_sequence
            found = [len(context.positions) for context in rows.contexts]
            if found != wanted.tolist():
                raise BatchError(
                    f"teacher contexts hold {found} rows, the sequences {wanted.tolist()}"
                )

    @property
    def rows_per_sequence(self) -> IntArray:
        """[B] distillation rows of each sequence."""
        positions = (
            np.zeros(0, np.int64) if self.distillation is None else self.distillation.positions
        )
        edges = np.searchsorted(positions, self.sequence_starts)
        return np.diff(edges).astype(np.int64)

    def _check_minibatches(self) -> None:
        steps, found = self.num_minibatches, self.minibatch_ids
        if len(found) != len(self.group_ids) or len(self.num_sequences) != steps:
            raise BatchError(
                f"{len(found)} minibatch_ids for {len(self.group_ids)} sequences, "
                f"{len(self.num_sequences)} num_sequences for {steps} num_loss_tokens"
            )
        if len(found) and not 0 <= found.min() <= found.max() < steps:
            raise BatchError(f"minibatch_ids {found.tolist()} are not all in 0 .. {steps - 1}")

    @property
    def num_minibatches(self) -> int:
        """Optimizer steps this batch asks for."""
        return len(self.num_loss_tokens)


@dataclass(frozen=True)
class SftBatch:
    """Supervised sequences (warm-up): mean cross-entropy over the masked tokens."""

    token_ids: IntArray
    sequence_starts: IntArray
    loss_mask: BoolArray


@dataclass(frozen=True)
class UpdateResult:
    """What one committed update reports."""

    policy_version: int
    """Committed optimizer steps after the update."""
    num_optimizer_steps: int
    metrics: dict[str, float]
    """Loss parts, grad norm, clip fractions, entropy, engine mismatch, tokens, seconds."""
    chunk_halvings: tuple[tuple[int, int], ...] = ()
    """(from, to) rows of the vocabulary projection, each time memory ran out."""
