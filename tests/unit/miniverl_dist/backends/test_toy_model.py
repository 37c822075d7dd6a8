"""The toy decoder's training forward, against a float64 oracle written with loops."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.vocabulary import Vocabulary
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import BatchError, CheckpointError, TokenizerMismatchError
from tests.reference.toy_decoder import decoder_logprobs
from tests.support.toy import VOCABULARY_IDS, tiny_config


def full_logits(model: ToyModel, rows: list[list[int]]) -> torch.Tensor:
    with torch.no_grad():
        return torch.nn.functional.linear(model.hidden(torch.tensor(rows)), model.head)


def test_forward_equals_the_oracle() -> None:
    model = ToyModel(tiny_config(), VOCABULARY_IDS, seed=3)
    rng = np.random.default_rng(0)
    # Norm weights start at 1, which would hide a norm that forgets them.
    for name, weight in model.weights.items():
        if name.endswith("norm"):
            weight.copy_(torch.from_numpy(rng.normal(1, 0.3, weight.shape)))
    rows = rng.integers(0, len(VOCABULARY_IDS), 40).tolist()
    found = torch.log_softmax(full_logits(model, [rows])[0].double(), -1).numpy()
    expected = decoder_logprobs(model.arrays(), rows, num_layers=2, num_heads=2)
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_default_sizes_make_a_few_hundred_thousand_parameters() -> None:
    model = ToyModel(ToyModelConfig(kind="toy"), range(658))
    assert model.num_parameters == 284_832


def test_a_later_token_never_reaches_an_earlier_position() -> None:
    model = ToyModel(tiny_config(), VOCABULARY_IDS)
    one = full_logits(model, [[1, 2, 3, 4, 5, 6]])
    other = full_logits(model, [[1, 2, 3, 9, 8, 7]])
    torch.testing.assert_close(one[:, :3], other[:, :3])
    assert not torch.allclose(one[:, 3], other[:, 3])


def test_padding_and_company_leave_a_sequence_alone() -> None:
    model = ToyModel(tiny_config(), VOCABULARY_IDS)
    alone = full_logits(model, [[5, 6, 7]])
    padded = full_logits(model, [[5, 6, 7, 0, 0], [1, 2, 3, 4, 5]])
    torch.testing.assert_close(alone[0], padded[0, :3], rtol=0, atol=1e-6)


def test_seed_makes_the_weights() -> None:
    first, again, other = (ToyModel(tiny_config(), VOCABULARY_IDS, s).arrays() for s in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert not np.array_equal(first["embed"], other["embed"])


def test_a_sequence_longer_than_the_context_is_refused() -> None:
    model = ToyModel(tiny_config(max_context_tokens=8), VOCABULARY_IDS)
    with pytest.raises(BatchError, match="9 tokens exceeds max_context_tokens 8"):
        model.hidden(torch.zeros(1, 9, dtype=torch.int64))


def test_weights_that_do_not_fit_change_nothing() -> None:
    model = ToyModel(tiny_config(), VOCABULARY_IDS)
    before = model.arrays()
    wrong = {name: array + 1 for name, array in before.items()}
    wrong["final_norm"] = wrong["final_norm"][:-1]
    with pytest.raises(CheckpointError, match="final_norm"):
        model.load_arrays(wrong)
    assert all(np.array_equal(before[name], model.arrays()[name]) for name in before)


@settings(deadline=None)
@given(st.sets(st.integers(0, 300_000), min_size=1, max_size=60))
def test_rows_find_every_id(ids: set[int]) -> None:
    vocabulary = Vocabulary(list(ids))
    given_ids = np.array(sorted(ids, key=lambda i: i * 7919 % 1009))
    assert np.array_equal(vocabulary.ids[vocabulary.rows(given_ids)], given_ids)


@pytest.mark.parametrize("foreign", [9, 11, 10 + 7 * 53, -1])
def test_a_foreign_id_is_an_error(foreign: int) -> None:
    vocabulary = Vocabulary(VOCABULARY_IDS)
    with pytest.raises(TokenizerMismatchError, match=f"token id {foreign} at position 1"):
        vocabulary.rows([10, foreign, 17])


@pytest.mark.parametrize("ids", [[], [3, 3], [-1, 2]])
def test_a_vocabulary_needs_distinct_ids(ids: list[int]) -> None:
    with pytest.raises(TokenizerMismatchError, match="distinct ids"):
        Vocabulary(ids)
