"""Whole distributions in an update: which rows, which targets, and the two backward stages.

Stage one walks through the vocabulary projection in chunks and leaves a gradient on the hidden
states; stage two takes it through the decoder. The policy loss, where there is one, adds to the
same gradient in between, so the decoder runs forward once and backward once.

Shapes: M rows of a batch, m rows of a microbatch, n rows of a chunk, P predictions of a microbatch,
H hidden, V rows of the head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from miniverl_dist.backends.padding import Microbatch
from miniverl_dist.backends.update_report import KIND_ROWS, KIND_SUM
from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.errors import BatchError
from miniverl_dist.objective.chunked import ChunkTargetProvider, distillation_gradients
from miniverl_dist.objective.distribution import Targets, TopKRows
from miniverl_dist.objective.logprobs import Predictions
from miniverl_dist.objective.policy_loss import Metrics
from miniverl_dist.schemas.batch import IntArray, TrainBatch
from miniverl_dist.schemas.targets import NO_TOKEN, TeacherContext, TopKTargets

PolicyTerm = Callable[[Tensor], tuple[Tensor, Metrics]]
"""[P, H] hidden states -> loss with its graph, and metrics."""


class ResidentTargets(Protocol):
    """A teacher that is in memory during the update."""

    def provider(self, contexts: Sequence[TeacherContext]) -> ChunkTargetProvider:
        """Its distributions at the contexts' positions, one context after the other."""


class WrittenTokens:
    """No distribution at all: the rows' own tokens are learned."""

    def targets(self, rows: slice) -> Targets | None:
        """None, for any rows."""
        del rows
        return None


class StoredTargets:
    """Implements ``ChunkTargetProvider`` over stored top-k rows.

    Args:
        targets: [m] rows.
        vocabulary: Of the student; a kept token that it lacks moves into the bucket.
        dtype: Of the student's logits.
        device: Where they are.
    """

    def __init__(
        self,
        targets: TopKTargets,
        vocabulary: AnyVocabulary,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        rows = known_rows(vocabulary, targets.token_ids)
        lost = np.where((rows < 0) & (targets.token_ids != NO_TOKEN), targets.logprobs, -np.inf)
        tail = np.logaddexp.reduce(np.column_stack([lost, targets.tail_logprobs]), axis=1)
        kept = np.where(rows < 0, -np.inf, targets.logprobs)
        self._rows = torch.from_numpy(rows).to(device)
        self._kept, self._tail, self._entropies = (
            torch.from_numpy(array).to(device, dtype) for array in (kept, tail, targets.entropies)
        )

    def targets(self, rows: slice) -> Targets:
        """The rows [start, stop)."""
        return TopKRows(self._rows[rows], self._kept[rows], self._tail[rows], self._entropies[rows])


def known_rows(vocabulary: AnyVocabulary, token_ids: IntArray) -> IntArray:
    """Head row of every id, -1 where there is none; any shape."""
    ids = vocabulary.ids
    places = np.minimum(np.searchsorted(ids, token_ids), len(ids) - 1)
    return np.where(ids[places] == token_ids, places, -1).astype(np.int64)


@dataclass(frozen=True)
class RowLoss:
    """How a backend compares rows; the same for every batch.

    Args:
        config: Divergence, support, coefficient.
        vocabulary: Of the student.
        teacher: In memory; None where targets are stored, or the written tokens are learned.
    """

    config: DistillConfig
    vocabulary: AnyVocabulary
    teacher: ResidentTargets | None = None

    def provider(
        self,
        batch: TrainBatch,
        part: Microbatch,
        rows: IntArray,
        device: torch.device | str = "cpu",
    ) -> ChunkTargetProvider:
        """Targets of one microbatch.

        Args:
            batch: The whole batch.
            part: Which sequences.
            rows: [m] index of each row among the batch's M.
            device: The student's.

        Raises:
            BatchError: the batch lacks the targets that the divergence needs.
        """
        distillation = batch.distillation
        if distillation is None or not self.config.needs_teacher:
            return WrittenTokens()
        if distillation.top_k is not None:
            return StoredTargets(distillation.top_k.rows(rows), self.vocabulary, device=device)
        if not distillation.contexts or self.teacher is None:
            raise BatchError(
                f"divergence {self.config.divergence} needs the teacher's distributions, but the "
                "batch holds neither stored ones nor texts for a teacher in memory"
            )
        return self.teacher.provider([distillation.contexts[i] for i in part.sequences])


@dataclass
class TwoStages:
    """The backward pass of one optimizer step with rows.

    Args:
        loss: Of single rows.
        denominator: Rows of the whole step.
        chunk_size: Rows projected at once; halved when memory runs out, and stays so.
    """

    loss: RowLoss
    denominator: float
    chunk_size: int
    halvings: list[tuple[int, int]] = field(default_factory=list)

    def backward(
        self,
        found: Predictions,
        packed: IntArray,
        head: Tensor,
        batch: TrainBatch,
        part: Microbatch,
        policy: PolicyTerm | None,
    ) -> Metrics:
        """Add the gradients of one microbatch to decoder and head.

        Args:
            found: Predictions of all trained tokens, with the decoder's graph.
            packed: [P] place of each in the packed batch.
            head: [V, H].
            batch: The whole batch.
            part: This microbatch.
            policy: The policy loss over all predictions; None where nothing was sampled.
        """
        states = found.hidden.detach().requires_grad_()
        metrics: Metrics = {"num_tokens": len(packed), "loss": 0.0}
        if policy is not None:
            loss, metrics = policy(states)
            loss.backward()  # type: ignore[no-untyped-call]
            metrics = metrics | {"loss": loss.detach()}
        slopes = torch.zeros_like(states) if states.grad is None else states.grad
        chosen, rows = _rows_among(packed, batch)
        if len(rows):
            metrics = metrics | self._rows(found, slopes, head, chosen, batch, part, rows)
            metrics["loss"] = metrics["loss"] + metrics["distill_loss"]
        found.hidden.backward(slopes)  # type: ignore[no-untyped-call]
        return metrics

    def _rows(
        self,
        found: Predictions,
        slopes: Tensor,
        head: Tensor,
        chosen: IntArray,
        batch: TrainBatch,
        part: Microbatch,
        rows: IntArray,
    ) -> Metrics:
        """Stage one: the gradient of the rows, into ``slopes`` and the head."""
        where = torch.from_numpy(chosen).to(slopes.device)
        result = distillation_gradients(
            found.hidden.detach()[where],
            head.detach(),
            found.targets[where],
            self.loss.provider(batch, part, rows, slopes.device),
            self.loss.config,
            denominator=self.denominator,
            chunk_size=self.chunk_size,
            on_retry=lambda old, new: self.halvings.append((old, new)),
            needs_weight=head.requires_grad,
        )
        self.chunk_size = result.chunk_size
        slopes.index_add_(0, where, result.grad_hidden.to(slopes.dtype))
        if result.grad_weight is not None:
            if head.grad is None:
                head.grad = result.grad_weight
            else:
                head.grad += result.grad_weight
        total = result.losses.sum()
        measured: Metrics = {
            "divergence_sum": total,
            "num_rows": float(len(rows)),
            "distill_loss": total * (self.loss.config.coef / self.denominator),
        }
        return measured | result.metrics | _by_kind(batch, rows, result.losses)


def open_stages(
    loss: RowLoss | None,
    batch: TrainBatch,
    minibatch: int,
    chunk_size: int,
    halvings: list[tuple[int, int]],
) -> TwoStages | None:
    """The backward pass of an optimizer step with rows; None where the batch has none.

    Raises:
        BatchError: the student was not built to compare rows.
    """
    if batch.distillation is None:
        return None
    if loss is None:
        raise BatchError(
            "the batch compares whole distributions, but this student was not built for it"
        )
    num_rows = max(batch.distillation.num_rows[minibatch], 1)
    return TwoStages(loss, num_rows, chunk_size, halvings)


def _by_kind(batch: TrainBatch, rows: IntArray, losses: Tensor) -> Metrics:
    """Sum and count of the rows in each kind of span."""
    if batch.distillation is None or not batch.distillation.kinds:
        return {}
    kinds = np.asarray(batch.distillation.kinds)[rows]
    values = losses.cpu().double().numpy()
    sums: Metrics = {}
    for kind in np.unique(kinds).tolist():
        here = kinds == kind
        sums[f"{KIND_SUM}{kind}"] = float(values[here].sum())
        sums[f"{KIND_ROWS}{kind}"] = float(here.sum())
    return sums


def _rows_among(packed: IntArray, batch: TrainBatch) -> tuple[IntArray, IntArray]:
    """([m] which predictions are rows, [m] which of the batch's rows they are)."""
    positions = (
        np.zeros(0, np.int64) if batch.distillation is None else batch.distillation.positions
    )
    if not len(positions):
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    places = np.minimum(np.searchsorted(positions, packed), len(positions) - 1)
    chosen = np.flatnonzero(positions[places] == packed)
    return chosen, places[chosen]
