"""The float64 log-softmax of toy sampling and scoring."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.backends.softmax import log_softmax


def test_values_at_two_temperatures() -> None:
    logits = np.array([[0.0, np.log(3.0)], [2.0, 0.0]], dtype=np.float32)
    found = log_softmax(logits, np.array([1.0, 2.0]))
    np.testing.assert_allclose(np.exp(found[0]), [0.25, 0.75], rtol=1e-7)
    np.testing.assert_allclose(np.exp(found[1]), np.array([np.e, 1]) / (np.e + 1), rtol=1e-7)


def test_large_logits_do_not_overflow() -> None:
    found = log_softmax(np.array([[3e38, 0.0, -3e38]], dtype=np.float32))
    assert found[0, 0] == 0
    assert np.isfinite(found).all()


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 300))
def test_a_row_has_the_same_bits_alone_and_in_company(seed: int, rows: int, width: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=5, size=(rows, width)).astype(np.float32)
    temperatures = rng.uniform(0.3, 2, rows)
    together = log_softmax(logits, temperatures)
    for row in range(rows):
        alone = log_softmax(logits[row : row + 1], temperatures[row : row + 1])
        assert np.array_equal(together[row], alone[0])
