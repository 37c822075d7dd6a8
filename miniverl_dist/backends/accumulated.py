"""What a backend remembers of the parts of one optimizer step.

A part's loss is a plain sum: how many tokens and sequences the step has is known only when its
last part has come. Gradients are linear in the loss, so dividing them once, before the step, gives
what the ordinary update computes with its denominators, up to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from miniverl_dist.errors import BatchError, UpdateError
from miniverl_dist.objective.policy_loss import Metrics, merge_metrics
from miniverl_dist.objective.reduction import Denominators, Reduction
from miniverl_dist.schemas.batch import TrainBatch

SUMS = Denominators(num_loss_tokens=1.0, num_sequences=1.0)
"""Denominators of a part: none yet."""

Gradients = Mapping[str, Tensor]


@dataclass
class AccumulatedParts:
    """Counts, metrics and gradients of the parts so far, by their place in the batch.

    What is summed is summed in the order of the places: rounding depends on the order, and that
    of arrival differs from run to run.
    """

    num_loss_tokens: int = 0
    num_sequences: int = 0
    seconds: float = 0.0
    """Spent on the parts."""
    _parts: dict[int, tuple[Metrics, Gradients]] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._parts)

    def add(
        self,
        place: int,
        batch: TrainBatch,
        metrics: Metrics,
        gradients: Gradients,
        started_s: float,
    ) -> None:
        """Remember a part.

        Args:
            place: In the batch.
            batch: The part.
            metrics: Its losses are sums (``SUMS``).
            gradients: Empty where the backend adds them up itself.
            started_s: When its computation began, by ``time.perf_counter``.

        Raises:
            BatchError: this place has come before.
        """
        if place in self._parts:
            raise BatchError(f"place {place} of the batch was accumulated twice")
        self._parts[place] = (metrics, gradients)
        self.num_loss_tokens += batch.num_loss_tokens[0]
        self.num_sequences += batch.num_sequences[0]
        self.seconds += time.perf_counter() - started_s

    @property
    def gradients(self) -> list[Gradients]:
        """In the order of the places."""
        return [self._parts[place][1] for place in sorted(self._parts)]

    def divisor(self, reduction: Reduction) -> int:
        """What gradients and losses are divided by.

        Raises:
            BatchError: there are no parts.
        """
        if not self._parts:
            raise BatchError("nothing has been accumulated that a step could be taken with")
        return self.num_loss_tokens if reduction == "token_mean" else self.num_sequences

    def step_metrics(self, reduction: Reduction) -> Metrics:
        """Merged metrics of the step, its losses divided."""
        divisor = self.divisor(reduction)
        merged = merge_metrics(*(self._parts[place][0] for place in sorted(self._parts)))
        return {
            name: value / divisor if name.endswith("loss") else value
            for name, value in merged.items()
        }


def require_one_minibatch(batch: TrainBatch) -> None:
    """A part belongs to one optimizer step.

    Raises:
        BatchError: it asks for several.
    """
    if batch.num_minibatches != 1:
        raise BatchError(
            f"a batch of {batch.num_minibatches} minibatches cannot be accumulated: its parts all "
            "go into one optimizer step (loop.num_minibatches: 1)"
        )


def require_no_parts(parts: AccumulatedParts, what: str) -> None:
    """Nothing else may change the student while a step is being accumulated.

    Raises:
        UpdateError: parts are waiting.
    """
    if len(parts):
        raise UpdateError(
            f"{what} in the middle of an accumulated step ({len(parts)} parts): commit or "
            "discard it first"
        )
