from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import BatchError
from miniverl_dist.packing import sequence_ids, sequence_starts, split_minibatches

Lengths = st.lists(st.integers(1, 9), max_size=12)


@settings(deadline=None)
@given(Lengths)
def test_starts_tile_and_ids_name_their_sequence(lengths: list[int]) -> None:
    starts = sequence_starts(lengths)
    assert starts.dtype == "int64"
    assert starts[0] == 0
    assert starts[-1] == sum(lengths)
    expected = [index for index, length in enumerate(lengths) for _ in range(length)]
    assert sequence_ids(starts).tolist() == expected


@pytest.mark.parametrize("lengths", [[0], [3, 0, 2], [-1]])
def test_an_empty_sequence_is_an_error(lengths: list[int]) -> None:
    with pytest.raises(BatchError, match="at least one token"):
        sequence_starts(lengths)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_no_optimizer_step_is_empty_or_much_larger(num_sequences: int, num_steps: int) -> None:
    sizes = Counter(split_minibatches(num_sequences, num_steps).tolist())
    assert sorted(sizes) == list(range(min(num_sequences, num_steps)))
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_siblings_spread_over_the_steps() -> None:
    # Two groups of four, laid out one after the other, in two steps.
    steps = split_minibatches(8, 2)
    assert Counter(steps[:4].tolist()) == Counter(steps[4:].tolist()) == {0: 2, 1: 2}


def test_no_sequences_make_no_steps() -> None:
    assert split_minibatches(0, 4).tolist() == []
