"""Packed sequences cut into padded microbatches; torch-free.

Sequences of like length share a microbatch, so little is padded. What pads a sequence never
reaches its tokens, and losses carry global denominators: the cut changes time and memory only.

Shapes: N packed tokens, b sequences of one microbatch, L its longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.batch import BoolArray, IntArray, TrainBatch


@dataclass(frozen=True)
class Microbatch:
    """Sequences that are computed together, padded on the right."""

    sequences: IntArray
    """[b] index of each sequence in the packed batch."""
    lengths: IntArray
    """[b]."""
    packed: IntArray
    """[b, L] place of each token in the packed arrays; padding repeats the sequence's last."""

    @property
    def is_padding(self) -> np.ndarray[tuple[int, int], np.dtype[np.bool_]]:
        """[b, L] True behind a sequence's end."""
        return np.arange(self.packed.shape[1]) >= self.lengths[:, None]


def sequences_with_targets(sequence_starts: IntArray, mask: BoolArray) -> IntArray:
    """Sequences that have a token on the mask: those that are worth computing."""
    return np.flatnonzero(np.add.reduceat(mask.astype(np.int64), sequence_starts[:-1]))


def cut_microbatches(
    sequence_starts: IntArray, sequences: IntArray, max_padded_tokens: int
) -> list[Microbatch]:
    """Cut some sequences of a packed batch into microbatches, shortest sequences first.

    Args:
        sequence_starts: [B + 1].
        sequences: indices below B of the sequences to cut.
        max_padded_tokens: b * L of a microbatch; a longer sequence gets one of its own.
    """
    lengths = np.diff(sequence_starts)[sequences]
    order = np.argsort(lengths, kind="stable")
    cuts: list[Microbatch] = []
    start = 0
    for end in range(1, len(order) + 1):
        is_last = end == len(order)
        if is_last or (end + 1 - start) * lengths[order[end]] > max_padded_tokens:
            cuts.append(_pad(sequence_starts, sequences[order[start:end]]))
            start = end
    return cuts


def minibatches(batch: TrainBatch, max_padded_tokens: int) -> dict[int, list[Microbatch]]:
    """Microbatches of each optimizer step; a step without a token to train on is left out.

    Raises:
        BatchError: no step has one.
    """
    useful = sequences_with_targets(batch.sequence_starts, batch.loss_mask)
    steps = {}
    for minibatch in np.unique(batch.minibatch_ids[useful]).tolist():
        chosen = useful[batch.minibatch_ids[useful] == minibatch]
        steps[minibatch] = cut_microbatches(batch.sequence_starts, chosen, max_padded_tokens)
    if not steps:
        raise BatchError(
            f"none of the batch's {len(batch.group_ids)} sequences has a token to train on"
        )
    return steps


def _pad(sequence_starts: IntArray, sequences: IntArray) -> Microbatch:
    starts = sequence_starts[sequences]
    lengths = sequence_starts[sequences + 1] - starts
    offsets = np.minimum(np.arange(lengths.max()), lengths[:, None] - 1)
    return Microbatch(sequences, lengths, starts[:, None] + offsets)
