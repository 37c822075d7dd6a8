"""Packed sequences as the microbatches of every rank."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.backends.megatron.data import (
    RankLayout,
    RankMicrobatch,
    rank_microbatches,
)
from miniverl_dist.backends.padding import sequences_with_targets
from miniverl_dist.schemas.batch import BoolArray, IntArray


@dataclass
class Packed:
    rows: IntArray
    starts: IntArray
    mask: BoolArray

    @property
    def sequences(self) -> IntArray:
        return sequences_with_targets(self.starts, self.mask)


def packed(lengths: list[int], seed: int = 0) -> Packed:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    # Every row differs: a token can be told by its row.
    rows = np.random.default_rng(seed).permutation(int(starts[-1])).astype(np.int64) + 100
    mask = np.ones(len(rows), dtype=np.bool_)
    mask[starts[:-1]] = False
    return Packed(rows, starts, mask)


def layouts(data_size: int, context_size: int, sequence_size: int = 1) -> list[RankLayout]:
    return [
        RankLayout(data_size, data, context_size, context, sequence_size)
        for data in range(data_size)
        for context in range(context_size)
    ]


def of_all_ranks(
    batch: Packed, layouts: list[RankLayout], budget: int
) -> list[list[RankMicrobatch]]:
    return [
        rank_microbatches(batch.rows, batch.starts, batch.mask, batch.sequences, layout, budget)
        for layout in layouts
    ]


def check_predictions(batch: Packed, parts: list[list[RankMicrobatch]]) -> None:
    """Every masked token is predicted once, from the token before it, in its own sequence."""
    sequence_of = np.repeat(np.arange(len(batch.starts) - 1), np.diff(batch.starts))
    found: list[int] = []
    for part in (part for mine in parts for part in mine):
        found += part.packed.tolist()
        before = part.token_rows.reshape(-1)[part.places]
        assert before.tolist() == batch.rows[part.packed - 1].tolist()
        assert part.inputs.reshape(-1)[part.places].tolist() == (part.packed - 1).tolist()
        is_inside = part.inputs >= 0
        assert part.token_rows[is_inside].tolist() == batch.rows[part.inputs[is_inside]].tolist()
        # Rows begin at 100: 0 is padding.
        assert (is_inside == (part.token_rows > 0)).all()
        assert part.targets.tolist() == batch.rows[part.packed].tolist()
        assert part.sequences.tolist() == sequence_of[part.packed].tolist()
        position = part.position_ids.reshape(-1)[part.places]
        assert (position + 1 == part.packed - batch.starts[part.sequences]).all()
    wanted = np.flatnonzero(batch.mask & np.isin(sequence_of, batch.sequences))
    assert sorted(found) == wanted.tolist()


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 23), min_size=1, max_size=14),
    sizes=st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2])),
    budget=st.integers(1, 90),
    data=st.data(),
)
def test_all_ranks_together_predict_every_token_once(
    lengths: list[int], sizes: tuple[int, int, int], budget: int, data: st.DataObject
) -> None:
    batch = packed(lengths)
    drawn = data.draw(st.lists(st.booleans(), min_size=len(batch.mask), max_size=len(batch.mask)))
    batch.mask &= np.array(drawn)
    if not len(batch.sequences):
        return
    ranks = layouts(*sizes)
    parts = of_all_ranks(batch, ranks, budget)
    check_predictions(batch, parts)
    assert len({len(mine) for mine in parts}) == 1
    for layout, mine in zip(ranks, parts, strict=True):
        for part in mine:
            assert part.padded_length % layout.length_multiple == 0
            assert part.token_rows.shape[1] * layout.context_size == part.padded_length


def test_thirteen_sequences_on_four_replicas_make_equally_many_microbatches() -> None:
    batch = packed([12] * 13)
    parts = of_all_ranks(batch, layouts(4, 1), 12)
    assert [len(mine) for mine in parts] == [4, 4, 4, 4]
    assert sum(part.num_predictions == 0 for mine in parts for part in mine) == 3
    check_predictions(batch, parts)


def test_one_sequence_leaves_the_other_replicas_a_dummy_each() -> None:
    parts = of_all_ranks(packed([9]), layouts(3, 2), 100)
    assert [len(mine) for mine in parts] == [1] * 6
    assert [mine[0].num_predictions for mine in parts] == [3, 5, 0, 0, 0, 0]
    assert parts[2][0].token_rows.shape == (1, 2)
    assert parts[2][0].position_ids.tolist() == [[0, 3]]


def test_an_odd_length_under_context_parallelism() -> None:
    """7 tokens on 2 ranks: 4 chunks of 2 columns, of which rank 0 has the outer ones."""
    batch = packed([7])
    first, second = (mine[0] for mine in of_all_ranks(batch, layouts(1, 2), 100))
    assert first.position_ids.tolist() == [[0, 1, 6, 7]]
    assert second.position_ids.tolist() == [[2, 3, 4, 5]]
    # Column 1 predicts token 2, which the other rank holds: the shift came before the cut.
    assert first.packed.tolist() == [1, 2]
    assert second.packed.tolist() == [3, 4, 5, 6]
    assert first.token_rows[0, :3].tolist() == batch.rows[[0, 1, 6]].tolist()
    assert first.token_rows[0, 3] == 0


@pytest.mark.parametrize(
    ("layout", "multiple"),
    [
        (RankLayout(), 1),
        (RankLayout(sequence_size=2), 2),
        (RankLayout(context_size=2), 4),
        (RankLayout(context_size=2, sequence_size=2), 8),
    ],
)
def test_lengths_are_padded_only_as_far_as_the_layout_asks(
    layout: RankLayout, multiple: int
) -> None:
    batch = packed([5])
    part = of_all_ranks(batch, [layout], 100)[0][0]
    assert layout.length_multiple == multiple
    assert part.padded_length == -(-5 // multiple) * multiple


def test_long_and_short_sequences_are_spread_over_the_replicas() -> None:
    lengths = [40, 39, 21, 20, 5, 4, 3, 2]
    parts = of_all_ranks(packed(lengths), layouts(2, 1), 1000)
    shares = [sum(part.num_predictions for part in mine) for mine in parts]
    assert shares == [63, 63]
