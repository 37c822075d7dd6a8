"""Forward and backward passes of an hf student over packed sequences.

Shapes: N packed tokens, M predictions of a microbatch, H hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from miniverl_dist.backends.distilled import TwoStages
from miniverl_dist.backends.hf_adapters import ACTOR
from miniverl_dist.backends.hf_model import Named
from miniverl_dist.backends.hf_optimizer import MasterAdamW
from miniverl_dist.backends.hf_student import HFStudent
from miniverl_dist.backends.padding import Microbatch
from miniverl_dist.backends.policy_step import Scored, StepArrays, policy_term
from miniverl_dist.config.recipe import LossConfig
from miniverl_dist.objective.logprobs import (
    Predictions,
    predictions,
    selected_logprobs_with_entropy,
)
from miniverl_dist.objective.policy_loss import Metrics, merge_metrics
from miniverl_dist.objective.reduction import Denominators
from miniverl_dist.schemas.batch import BoolArray, FloatArray, IntArray, TrainBatch
from miniverl_dist.schemas.seeds import derive_seed


@dataclass
class HFSteps:
    """Passes through a student's model.

    Args:
        student: Whose.
        optimizer: Sums the gradients.
        loss: The policy loss.
        chunk_size: Rows of the vocabulary projection held at once.
    """

    student: HFStudent
    optimizer: MasterAdamW
    loss: LossConfig
    chunk_size: int = field(init=False)

    def __post_init__(self) -> None:
        self.chunk_size = self.loss.chunk_size

    @torch.no_grad()
    def logprobs(
        self,
        rows: IntArray,
        parts: Sequence[Microbatch],
        mask: BoolArray,
        temperature: float,
        role: str = ACTOR,
    ) -> FloatArray:
        """[N] nats on the mask, NaN off it."""
        packed = np.full(len(rows), np.nan)
        with self.student.acting_as(role) as weights:
            head = self.student.model.head(weights)
            for part in parts:
                found = self._predictions(rows, part, mask, weights)
                scored = self._scored(found, part, head, temperature)
                packed[scored.packed] = scored.logprobs.cpu().numpy()
        return packed

    def policy_gradients(
        self,
        arrays: StepArrays,
        batch: TrainBatch,
        parts: Sequence[Microbatch],
        denominators: Denominators,
        stages: TwoStages | None,
        seed: int,
    ) -> Metrics:
        """Add the gradients of some microbatches of a batch to those that are there.

        Args:
            arrays: Of the batch.
            batch: The whole batch.
            parts: Its microbatches.
            denominators: Of the optimizer step.
            stages: Where whole distributions are compared too.
            seed: Of what dropout draws.
        """
        sums: list[Metrics] = []
        for index, part in enumerate(parts):
            with self._gradient_pass(derive_seed(seed, index)) as head:
                found = self._predictions(arrays.rows, part, batch.loss_mask)

                def policy(states: Tensor) -> tuple[Tensor, Metrics]:
                    moved = found._replace(hidden=states)  # noqa: B023 - called at once
                    scored = self._scored(moved, part, head, batch.temperature)  # noqa: B023
                    return policy_term(scored, arrays, batch, self.loss, denominators)

                if stages is None:
                    loss, metrics = policy(found.hidden)
                    loss.backward()  # type: ignore[no-untyped-call]
                    sums.append(metrics | {"loss": loss.detach()})
                    continue
                packed, term = _packed_places(found, part), policy if batch.is_sampled else None
                sums.append(stages.backward(found, packed, head, batch, part, term))
        return merge_metrics(*sums)

    def sft_gradients(
        self,
        rows: IntArray,
        parts: Sequence[Microbatch],
        mask: BoolArray,
        num_tokens: int,
        seed: int,
    ) -> float:
        """Mean cross-entropy over ``num_tokens`` masked tokens; its gradients are added."""
        total = 0.0
        for index, part in enumerate(parts):
            with self._gradient_pass(derive_seed(seed, index)) as head:
                scored = self._scored(self._predictions(rows, part, mask), part, head, 1.0)
                loss = -scored.logprobs.sum() / num_tokens
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
        return total

    @contextmanager
    def _gradient_pass(self, seed: int) -> Iterator[Tensor]:
        """The head of one forward and backward pass; leaves all its gradients with the masters.

        The head is a leaf of its own, so that whoever computes its gradient apart from the
        decoder's can put it there.
        """
        weight = self.student.model.head()
        head = weight.detach().requires_grad_(weight.requires_grad)
        adapters = self.student.adapters
        if adapters is None:
            yield head
        else:
            with adapters.dropout(seed):
                yield head
        if head.grad is not None:
            # Tied weights have a gradient from the embedding already; padding rows get none.
            weight.backward(head.grad)  # type: ignore[no-untyped-call]
        self.optimizer.collect()

    def _predictions(
        self, rows: IntArray, part: Microbatch, mask: BoolArray, weights: Named | None = None
    ) -> Predictions:
        device = self.student.model.device
        token_rows = torch.from_numpy(rows[part.packed]).to(device)
        return predictions(
            self.student.model.hidden(token_rows, weights),
            token_rows,
            torch.from_numpy(part.lengths).to(device),
            torch.from_numpy(mask[part.packed] & ~part.is_padding).to(device),
        )

    def _scored(
        self, found: Predictions, part: Microbatch, head: Tensor, temperature: float
    ) -> Scored:
        logprobs, entropy = selected_logprobs_with_entropy(
            found.hidden, head, found.targets, self.chunk_size, temperature=temperature
        )
        sequences = found.positions // part.packed.shape[1]
        return Scored(_packed_places(found, part), sequences, logprobs, entropy)


def _packed_places(found: Predictions, part: Microbatch) -> IntArray:
    """[M] place of each predicted token in the packed batch."""
    places: IntArray = part.packed.reshape(-1)[found.positions.cpu().numpy()]
    return places
