from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.schemas.weights import NamedArrays, weights_checksum


def test_the_order_of_insertion_does_not_matter() -> None:
    one, two = np.arange(3.0), np.ones(2)
    assert weights_checksum({"a": one, "b": two}) == weights_checksum({"b": two, "a": one})


def test_memory_layout_does_not_matter() -> None:
    array = np.arange(12.0).reshape(3, 4)
    assert weights_checksum({"a": np.asfortranarray(array)}) == weights_checksum({"a": array})
    assert weights_checksum({"a": np.repeat(array, 2, axis=0)[::2]}) == weights_checksum(
        {"a": array}
    )


def test_names_dtypes_and_shapes_count() -> None:
    array = np.zeros(4, dtype=np.float32)
    variants: list[NamedArrays] = [
        {"a": array},
        {"b": array},
        {"a": array.reshape(2, 2)},
        {"a": array.astype(np.int32)},
        {"a": array.astype(np.float64)},
        {"a": array, "b": array},
        {"a": np.zeros(5, dtype=np.float32)},
        {"a": np.zeros(0, dtype=np.float32)},
        {"a": np.zeros((), dtype=np.float32)},
        {"a": np.zeros(1, dtype=np.float32)},
        {},
    ]
    assert len({weights_checksum(tensors) for tensors in variants}) == len(variants)


def test_swapped_tensors_differ() -> None:
    one, two = np.zeros(2), np.ones(2)
    assert weights_checksum({"a": one, "b": two}) != weights_checksum({"a": two, "b": one})


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 8 * 24 - 1))
def test_every_bit_counts(bit: int) -> None:
    array = np.linspace(-1, 1, 6, dtype=np.float32)
    flipped = array.copy()
    flipped.view(np.uint8)[bit // 8] ^= 1 << (bit % 8)
    assert weights_checksum({"a": array}) != weights_checksum({"a": flipped})
