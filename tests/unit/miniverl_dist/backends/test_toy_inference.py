"""Cached inference: equal to the full forward, and the same bits in any slot and company."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from miniverl_dist.backends.toy_inference import BLOCK, ToyDecoder
from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import BatchError
from tests.reference.toy_decoder import decoder_logprobs
from tests.support.toy import VOCABULARY_IDS, tiny_config

V = len(VOCABULARY_IDS)
MODEL = ToyModel(tiny_config(), VOCABULARY_IDS, seed=1)


def one_by_one(decoder: ToyDecoder, tokens: NDArray[np.int64], slot: int) -> NDArray[np.float32]:
    """[T, V] logits of plain decoding, nothing else in the batch."""
    steps = []
    for position in range(len(tokens)):
        logits = decoder.step(
            np.array([slot]), np.array([position]), tokens[position : position + 1]
        )
        assert logits is not None
        steps.append(logits[0])
    return np.array(steps)


def prefill(
    decoder: ToyDecoder, slot: int, tokens: NDArray[np.int64], num_cached: int = 0
) -> NDArray[np.float32]:
    """[V] logits behind the last token, as many rows at a time as a step takes."""
    for start in range(num_cached, len(tokens), decoder.num_rows):
        at = np.arange(start, min(start + decoder.num_rows, len(tokens)))
        logits = decoder.step(np.full(len(at), slot), at, tokens[at])
    assert logits is not None
    return logits[-1]


def test_cached_decoding_equals_the_full_forward() -> None:
    tokens = np.random.default_rng(0).integers(0, V, 2 * BLOCK + 9)
    with torch.no_grad():
        full = torch.nn.functional.linear(MODEL.hidden(torch.from_numpy(tokens[None])), MODEL.head)
    cached = one_by_one(ToyDecoder(MODEL, 2), tokens, 1)
    np.testing.assert_allclose(cached, full[0].numpy(), atol=1e-5)


@settings(deadline=None, max_examples=25)
@given(
    seed=st.integers(0, 2**32 - 1),
    slot=st.integers(0, 5),
    length=st.integers(1, 100),
    num_others=st.integers(0, 5),
)
def test_bits_depend_on_the_own_sequence_only(
    seed: int, slot: int, length: int, num_others: int
) -> None:
    """Any slot, any company, any cut of the prompt into steps, any order of rows."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, V, length)
    expected = one_by_one(ToyDecoder(MODEL, 6), tokens, 0)

    decoder = ToyDecoder(MODEL, 6)
    others = {int(s): rng.integers(0, V, 150) for s in rng.permutation(6)[:num_others] if s != slot}
    at = dict.fromkeys(others, 0)
    done = 0
    while done < length:
        taken = min(int(rng.integers(1, 9)), length - done)
        rows = [(slot, done + i, tokens[done + i]) for i in range(taken)]
        for other, sequence in others.items():
            if rng.random() < 0.8 and at[other] < 150:
                rows.append((other, at[other], sequence[at[other]]))
                at[other] += 1
        mixed = np.array(rows)[rng.permutation(len(rows))]
        logits = decoder.step(*mixed.T)
        assert logits is not None
        for (row_slot, position, _), row in zip(mixed, logits, strict=True):
            if row_slot == slot:
                assert np.array_equal(row, expected[position])
        done += taken


def test_default_sizes_keep_the_bits_too() -> None:
    """Other matrix shapes, other kernels: 64 full rows against one."""
    config = ToyModelConfig(kind="toy", max_context_tokens=2 * BLOCK)
    decoder = ToyDecoder(ToyModel(config, range(658)), 64)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 658, (64, 20))
    company = [
        decoder.step(np.arange(64), np.full(64, position), tokens[:, position])
        for position in range(20)
    ]
    decoder.flush()
    for slot in (0, 17, 63):
        alone = one_by_one(decoder, tokens[slot], 63 - slot)
        assert all(
            step is not None and np.array_equal(step[slot], row)
            for step, row in zip(company, alone, strict=True)
        )


@pytest.mark.parametrize("shared", [1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_a_copied_prefix_is_as_good_as_a_computed_one(shared: int) -> None:
    tokens = np.random.default_rng(2).integers(0, V, shared + 5)
    decoder = ToyDecoder(MODEL, 3)
    expected = prefill(decoder, 0, tokens)
    # The target held something longer before: what is left of it must not be seen.
    prefill(decoder, 2, np.random.default_rng(3).integers(0, V, 150))
    decoder.copy_prefix(0, 2, shared)
    found = prefill(decoder, 2, tokens, num_cached=shared)
    assert np.array_equal(found, expected)


def test_scores_are_those_of_the_oracle_and_the_same_bits_every_time() -> None:
    rng = np.random.default_rng(4)
    texts = [rng.integers(0, V, n) for n in (84, 20, 1, 60)]
    decoder = ToyDecoder(MODEL, 1)
    first = [decoder.score(text) for text in texts]
    again = [decoder.score(text) for text in reversed(texts)]
    for text, one, other in zip(texts, first, reversed(again), strict=True):
        np.testing.assert_array_equal(one, other)
        oracle = decoder_logprobs(MODEL.arrays(), text.tolist(), num_layers=2, num_heads=2)
        expected = [np.nan, *oracle[np.arange(len(text) - 1), text[1:]]]
        np.testing.assert_allclose(one, expected, atol=1e-5)
    with pytest.raises(BatchError, match="151 tokens to score exceed"):
        decoder.score(np.zeros(151, dtype=np.int64))


def test_flush_removes_what_diverged_weights_left_behind() -> None:
    model = ToyModel(tiny_config(), VOCABULARY_IDS, seed=1)
    decoder = ToyDecoder(model, 1)
    good = model.arrays()
    model.load_arrays({name: array * np.float32(np.nan) for name, array in good.items()})
    prefill(decoder, 0, np.arange(20))
    model.load_arrays(good)
    decoder.flush()
    expected = prefill(ToyDecoder(MODEL, 1), 0, np.arange(5))
    found = prefill(decoder, 0, np.arange(5))
    assert np.array_equal(found, expected)


def test_a_step_has_room_for_every_slot() -> None:
    assert [ToyDecoder(MODEL, n).num_rows for n in (1, 16, 17)] == [16, 16, 32]
