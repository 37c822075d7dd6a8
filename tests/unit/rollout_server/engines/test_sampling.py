"""Drawing tokens: distributions, truncation, and independence of the company."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from miniverl_dist.errors import EngineError, GenerateApiError
from miniverl_dist.generate_api.wire import SamplingParams
from rollout_server.engines.sampling import check_sampling, sample, uniforms

LOGITS = np.log(np.array([[0.1, 0.4, 0.05, 0.25, 0.2]], dtype=np.float32))


def frequencies(params: SamplingParams, logits: NDArray[np.float32] = LOGITS) -> list[float]:
    """Share of each token over an even grid of 10,000 draws, exact to 1e-4."""
    num = 10_000
    draws = (np.arange(num) + 0.5) / num
    rows, _ = sample(np.repeat(logits, num, axis=0), [params] * num, draws)
    counts = np.bincount(rows, minlength=logits.shape[1])
    return [round(count / num, 3) for count in counts.tolist()]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (SamplingParams(), [0.1, 0.4, 0.05, 0.25, 0.2]),
        (SamplingParams(temperature=0), [0, 1, 0, 0, 0]),
        (SamplingParams(top_k=1), [0, 1, 0, 0, 0]),
        (SamplingParams(top_k=2), [0, 0.615, 0, 0.385, 0]),
        (SamplingParams(top_k=99), [0.1, 0.4, 0.05, 0.25, 0.2]),
        (SamplingParams(top_p=0.3), [0, 1, 0, 0, 0]),
        (SamplingParams(top_p=0.66), [0, 0.471, 0, 0.294, 0.235]),
        (SamplingParams(top_p=1e-9), [0, 1, 0, 0, 0]),
        (SamplingParams(min_p=0.45), [0, 0.471, 0, 0.294, 0.235]),
        (SamplingParams(min_p=1.0), [0, 1, 0, 0, 0]),
        # top-p looks at the mass that top-k has left: 0.4 / 0.65 < 0.62.
        (SamplingParams(top_k=2, top_p=0.62), [0, 0.615, 0, 0.385, 0]),
        (SamplingParams(top_k=2, top_p=0.61), [0, 1, 0, 0, 0]),
    ],
)
def test_shares_are_those_of_the_distribution(
    params: SamplingParams, expected: list[float]
) -> None:
    assert frequencies(params) == pytest.approx(expected, abs=1.01e-3)


def test_temperature_sharpens_draws_and_logprobs() -> None:
    squared = np.array([0.01, 0.16, 0.0025, 0.0625, 0.04])
    squared /= squared.sum()
    assert frequencies(SamplingParams(temperature=0.5)) == pytest.approx(squared, abs=1e-3)
    rows, logprobs = sample(LOGITS, [SamplingParams(temperature=0.5)], np.array([0.5]))
    assert logprobs[0] == pytest.approx(np.log(squared[rows[0]]), rel=1e-6)


@pytest.mark.parametrize(
    "params", [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(top_p=0.3)]
)
def test_logprobs_are_those_of_the_plain_softmax(params: SamplingParams) -> None:
    rows, logprobs = sample(LOGITS, [params], np.array([0.9]))
    assert rows.tolist() == [1]
    assert logprobs[0] == pytest.approx(np.log(0.4), rel=1e-6)


def test_extreme_draws_take_possible_tokens() -> None:
    logits = np.array([[-1e30, 0.0, 0.0, -1e30]], dtype=np.float32)
    params = [SamplingParams()]
    assert sample(logits, params, np.array([0.0]))[0].tolist() == [1]
    assert sample(logits, params, np.array([np.nextafter(1.0, 0.0)]))[0].tolist() == [2]


def test_huge_logits_do_not_overflow() -> None:
    logits = np.array([[3e38, 0.0, -3e38], [900.0, 900.0, 0.0]], dtype=np.float32)
    rows, logprobs = sample(logits, [SamplingParams()] * 2, np.array([0.9, 0.9]))
    assert rows.tolist() == [0, 1]
    assert logprobs.tolist() == pytest.approx([0, np.log(0.5)])


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 20))
def test_a_row_is_drawn_alike_alone_and_in_company(seed: int, num: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(scale=3, size=(num, 40)).astype(np.float32)
    params = [
        SamplingParams(temperature=float(t), top_k=int(k), top_p=float(p))
        for t, k, p in zip(
            rng.choice([0, 0.5, 1], num),
            rng.choice([-1, 5], num),
            rng.choice([0.8, 1], num),
            strict=True,
        )
    ]
    draws = rng.random(num)
    rows, logprobs = sample(logits, params, draws)
    for i in range(num):
        alone = sample(logits[i : i + 1], params[i : i + 1], draws[i : i + 1])
        assert (alone[0][0], alone[1][0]) == (rows[i], logprobs[i])


def test_uniforms_belong_to_the_seed() -> None:
    assert np.array_equal(uniforms(5, 10), uniforms(5, 100)[:10])
    assert not np.array_equal(uniforms(5, 10), uniforms(6, 10))
    assert not np.array_equal(uniforms(None, 10), uniforms(None, 10))
    assert np.array_equal(uniforms(-1, 3), uniforms(2**64 - 1, 3))


def test_logits_that_are_not_finite_are_an_engine_error() -> None:
    logits = LOGITS.copy()
    logits[0, 2] = np.nan
    with pytest.raises(EngineError, match="not finite"):
        sample(logits, [SamplingParams()], np.array([0.5]))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=-0.1),
        SamplingParams(temperature=float("nan")),
        SamplingParams(temperature=float("inf")),
        SamplingParams(top_p=0),
        SamplingParams(top_p=1.1),
        SamplingParams(top_k=0),
        SamplingParams(top_k=-2),
        SamplingParams(min_p=-0.1),
        SamplingParams(min_p=1.1),
        SamplingParams(max_new_tokens=0),
    ],
)
def test_parameters_out_of_range_are_refused(params: SamplingParams) -> None:
    with pytest.raises(GenerateApiError, match=r"sampling_params\.\w+ is .*, expected"):
        check_sampling(params)


def test_ordinary_parameters_pass() -> None:
    check_sampling(SamplingParams(temperature=0, top_p=0.5, top_k=1, min_p=1))
