"""Cutting packed sequences into padded microbatches."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.backends.padding import cut_microbatches


def starts_of(lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def test_like_lengths_share_a_microbatch() -> None:
    parts = cut_microbatches(starts_of([5, 1, 6, 2, 5]), np.arange(5), 12)
    assert [part.sequences.tolist() for part in parts] == [[1, 3], [0, 4], [2]]
    assert parts[0].packed.tolist() == [[5, 5], [12, 13]]
    assert parts[0].is_padding.tolist() == [[False, True], [False, False]]


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    budget=st.integers(1, 120),
    data=st.data(),
)
def test_every_token_of_the_chosen_sequences_stands_once(
    lengths: list[int], budget: int, data: st.DataObject
) -> None:
    starts = starts_of(lengths)
    chosen = np.array(
        sorted(data.draw(st.sets(st.integers(0, len(lengths) - 1), min_size=1))), dtype=np.int64
    )
    parts = cut_microbatches(starts, chosen, budget)
    seen = np.concatenate([part.packed[~part.is_padding] for part in parts])
    expected = np.concatenate([np.arange(starts[s], starts[s + 1]) for s in chosen])
    assert sorted(seen.tolist()) == expected.tolist()
    for part in parts:
        assert part.packed.size <= budget or len(part.sequences) == 1
        for sequence, row in zip(part.sequences, part.packed, strict=True):
            assert starts[sequence] <= row.min()
            assert row.max() < starts[sequence + 1]


def test_no_sequences_make_no_microbatches() -> None:
    assert cut_microbatches(starts_of([3, 4]), np.array([], dtype=np.int64), 10) == []
