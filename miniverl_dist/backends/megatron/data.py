"""Packed sequences as the padded microbatches of one rank; torch-free.

Every rank computes the plan of all ranks from the same batch, so that none has to ask another:

* data parallel: sequences are dealt over the replicas in a snake, longest first. All replicas get
  the same number of microbatches, because experts and pipeline stages wait for each other; a
  replica that lacks some gets dummies, which hold no predictions.
* shapes: a microbatch is as long as its longest sequence, rounded up to what context and sequence
  parallelism divide. Microbatches differ in shape, so pipeline stages exchange shapes with the
  activations (``variable_seq_lengths``): padding all of a step to its longest would cost far more
  than a message of three numbers.
* context parallel: a rank holds chunks r and 2 CP - 1 - r of 2 CP equal ones, which balances causal
  attention. The shift by one happens *before* that cut: column t carries the target t + 1, its
  packed place and its sequence, so nothing ever looks across a chunk's edge.

Shapes: N packed tokens, b sequences of a microbatch, L padded length, C columns of this rank
(L / CP), M predictions of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from miniverl_dist.backends.padding import Microbatch, cut_microbatches
from miniverl_dist.schemas.batch import BoolArray, IntArray


@dataclass(frozen=True)
class RankLayout:
    """Where a rank stands among those that share the work on a batch."""

    data_size: int = 1
    data_rank: int = 0
    context_size: int = 1
    context_rank: int = 0
    sequence_size: int = 1
    """Ranks that the columns are split over once more (TP with sequence parallelism)."""

    @property
    def length_multiple(self) -> int:
        """What every padded length is a multiple of."""
        chunks = 2 * self.context_size if self.context_size > 1 else 1
        return chunks * self.sequence_size

    def columns(self, padded_length: int) -> IntArray:
        """[C] the columns that this rank computes, in its order."""
        if self.context_size == 1:
            return np.arange(padded_length)
        chunks = np.arange(padded_length).reshape(2 * self.context_size, -1)
        mirrored = 2 * self.context_size - 1 - self.context_rank
        return np.concatenate([chunks[self.context_rank], chunks[mirrored]])


@dataclass(frozen=True)
class RankMicrobatch:
    """What one rank computes of one microbatch."""

    token_rows: IntArray
    """[b, C] vocabulary rows; 0 behind a sequence's end."""
    position_ids: IntArray
    """[b, C] position of each column within its sequence."""
    inputs: IntArray
    """[b, C] place of each column's own token in the packed batch; -1 behind a sequence's end."""
    places: IntArray
    """[M] where in the flattened [b, C] the state stands that predicts."""
    targets: IntArray
    """[M] vocabulary rows that are predicted."""
    packed: IntArray
    """[M] place of each predicted token in the packed batch."""
    sequences: IntArray
    """[M] index of each prediction's sequence in the packed batch."""
    padded_length: int
    """L, before context parallelism cuts it."""

    @property
    def num_predictions(self) -> int:
        """M."""
        return len(self.targets)


def rank_microbatches(
    rows: IntArray,
    sequence_starts: IntArray,
    mask: BoolArray,
    sequences: IntArray,
    layout: RankLayout,
    max_padded_tokens: int,
) -> list[RankMicrobatch]:
    """This rank's microbatches, as many as on every other rank.

    Args:
        rows: [N] vocabulary rows.
        sequence_starts: [B + 1].
        mask: [N] tokens to predict; never at a sequence's position 0.
        sequences: indices below B of the sequences to compute, at least one.
        layout: this rank's.
        max_padded_tokens: b * L of a microbatch, before L is rounded up; a longer sequence gets
            one of its own.
    """
    shares = _deal(np.diff(sequence_starts)[sequences], sequences, layout.data_size)
    cuts = [cut_microbatches(sequence_starts, share, max_padded_tokens) for share in shares]
    wanted = max(len(cut) for cut in cuts)
    mine = [_on_rank(rows, mask, part, layout) for part in cuts[layout.data_rank]]
    return mine + [_dummy(layout)] * (wanted - len(mine))


def _deal(lengths: IntArray, sequences: IntArray, num_shares: int) -> list[IntArray]:
    """Sequences per replica: longest first, there and back again, so that no replica is slow."""
    order = sequences[np.argsort(-lengths, kind="stable")]
    turn = np.arange(len(order)) % (2 * num_shares)
    share = np.minimum(turn, 2 * num_shares - 1 - turn)
    return [np.sort(order[share == index]) for index in range(num_shares)]


def _on_rank(
    rows: IntArray, mask: BoolArray, part: Microbatch, layout: RankLayout
) -> RankMicrobatch:
    longest = part.packed.shape[1]
    padded_length = -(-longest // layout.length_multiple) * layout.length_multiple
    columns = layout.columns(padded_length)
    # Columns behind the longest sequence repeat its last one; they are padding in every row.
    packed = part.packed[:, np.minimum(columns, longest - 1)]
    following = part.packed[:, np.minimum(columns + 1, longest - 1)]
    is_target = (columns + 1 < part.lengths[:, None]) & mask[following]
    places = np.flatnonzero(is_target)
    chosen = following.reshape(-1)[places]
    is_inside = columns < part.lengths[:, None]
    return RankMicrobatch(
        token_rows=np.where(is_inside, rows[packed], 0),
        position_ids=np.broadcast_to(columns, packed.shape).copy(),
        inputs=np.where(is_inside, packed, -1),
        places=places,
        targets=rows[chosen],
        packed=chosen,
        sequences=np.repeat(part.sequences, len(columns))[places],
        padded_length=padded_length,
    )


def _dummy(layout: RankLayout) -> RankMicrobatch:
    """The shortest microbatch there is; it predicts nothing."""
    columns = layout.columns(layout.length_multiple)[None]
    nothing = np.zeros(0, dtype=np.int64)
    return RankMicrobatch(
        token_rows=np.zeros_like(columns),
        position_ids=columns,
        inputs=np.full_like(columns, -1),
        places=nothing,
        targets=nothing,
        packed=nothing,
        sequences=nothing,
        padded_length=layout.length_multiple,
    )
