"""Advantages against loop oracles, the sign against the KL itself, and the group maths of peers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.advantage import (
    group_advantages,
    leave_one_out,
    token_advantages,
    zero_variance_groups,
)
from miniverl_dist.alignment.credit import opd_weights, stopped
from miniverl_dist.alignment.mau import align
from miniverl_dist.errors import BatchError
from tests.reference.advantage import (
    slow_group_advantages,
    slow_leave_one_out,
    slow_token_advantages,
)
from tests.reference.enumeration import (
    STUDY,
    episode_gradients,
    estimator_weights,
    expected_gradient,
    sequence_kl,
    weigher,
)

rewards_with_groups = st.lists(
    st.tuples(st.floats(-2, 2, width=32), st.sampled_from(["a", "b", "c"])), max_size=12
)
tokens = st.lists(
    st.tuples(st.floats(-5, 5, width=32), st.booleans(), st.integers(0, 3)), max_size=20
)


def columns(
    rows: list[tuple[float, bool, int]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights (NaN off the mask, as credit returns them), mask, sequence ids."""
    mask = np.array([row[1] for row in rows], dtype=bool)
    weights = np.where(mask, np.array([row[0] for row in rows], dtype=float), np.nan)
    return weights, mask, np.array([row[2] for row in rows], dtype=int)


@settings(deadline=None, max_examples=200)
@given(rewards_with_groups, st.booleans())
def test_group_advantages_equal_the_exact_oracle(
    rows: list[tuple[float, str]], normalize_std: bool
) -> None:
    rewards, groups = [row[0] for row in rows], [row[1] for row in rows]
    found = group_advantages(rewards, groups, normalize_std=normalize_std)
    expected = slow_group_advantages(rewards, groups, normalize_std=normalize_std)
    np.testing.assert_allclose(found, expected, atol=1e-11)
    assert found.dtype == np.float64


def test_tutorial_raw_rewards_are_not_advantages() -> None:
    # Rewards of 0.9 and 0.8 are both high, yet the second is the worse of its group.
    found = group_advantages([0.9, 0.8, 0.2, 0.1], ["easy", "easy", "hard", "hard"])
    np.testing.assert_allclose(found, [0.05, -0.05, 0.05, -0.05])
    np.testing.assert_allclose(group_advantages([10.9, 10.8], "ab"), [0.0, 0.0])


def test_group_of_one_and_constant_group_give_exactly_zero() -> None:
    found = group_advantages([0.3, 0.1, 0.1, 0.1], [7, 8, 8, 8], normalize_std=True)
    assert found.tolist() == [0.0, 0.0, 0.0, 0.0]


def test_std_floor_bounds_the_blow_up() -> None:
    rewards = [0.5, 0.5 + 1e-6]
    floored = group_advantages(rewards, "aa", normalize_std=True)
    np.testing.assert_allclose(floored, [-5e-4, 5e-4])
    free = group_advantages(rewards, "aa", normalize_std=True, std_floor=1e-12)
    np.testing.assert_allclose(free, [-1.0, 1.0], rtol=1e-4)


@pytest.mark.parametrize(
    ("rewards", "groups", "says"),
    [
        ([1.0], ["a", "b"], r"shape \(1,\) for 2 group ids"),
        ([1.0, float("nan")], ["a", "a"], "reward 1 is nan"),
    ],
)
def test_refuses_broken_rewards(rewards: list[float], groups: list[str], says: str) -> None:
    with pytest.raises(BatchError, match=says):
        group_advantages(rewards, groups)
    with pytest.raises(BatchError, match=says):
        zero_variance_groups(rewards, groups)


def test_refuses_a_floor_that_is_none() -> None:
    with pytest.raises(BatchError, match="std_floor"):
        group_advantages([1.0], ["a"], normalize_std=True, std_floor=0.0)


def test_empty_batch() -> None:
    assert group_advantages([], []).size == zero_variance_groups([], []).size == 0
    empty = np.zeros(0)
    assert leave_one_out(empty, empty.astype(bool), []).size == 0


@settings(deadline=None)
@given(rewards_with_groups)
def test_zero_variance_flags_whole_groups(rows: list[tuple[float, str]]) -> None:
    rewards, groups = [row[0] for row in rows], [row[1] for row in rows]
    expected = [
        len({other for other, its in zip(rewards, groups, strict=True) if its == own}) == 1
        for own in groups
    ]
    assert zero_variance_groups(rewards, groups).tolist() == expected


def test_peer_13_uneven_groups_use_their_own_mean() -> None:
    rewards = [1, 0, 0, 0, 1, 1, 0, 1, 0, 1, 0]
    groups = ["a"] * 4 + ["b"] * 3 + ["c"] * 4
    found = group_advantages(rewards, groups, normalize_std=True)
    np.testing.assert_allclose(found, slow_group_advantages(rewards, groups, normalize_std=True))
    for name in "abc":
        own = found[[group == name for group in groups]]
        assert own.mean() == pytest.approx(0, abs=1e-12)
        assert own.std() == pytest.approx(1)
    order = np.random.default_rng(0).permutation(11)
    shuffled = group_advantages(
        np.array(rewards, dtype=float)[order], [groups[i] for i in order], normalize_std=True
    )
    np.testing.assert_allclose(shuffled, found[order])


def test_peer_14_no_residue_blows_up_the_normalised_advantage() -> None:
    for others in (np.float32(0.35), 0.35):
        found = group_advantages([0.0, *[others] * 7], ["a"] * 8, normalize_std=True)
        np.testing.assert_allclose(found, [-np.sqrt(7), *[1 / np.sqrt(7)] * 7])
        equal = group_advantages([others] * 7, ["a"] * 7, normalize_std=True, std_floor=1e-30)
        assert equal.tolist() == [0.0] * 7


def test_peer_15_filter_keeps_or_drops_the_whole_group() -> None:
    assert not zero_variance_groups([0.0] + [0.95] * 7, ["a"] * 8).any()


def test_peer_16_equal_rewards_are_zero_variance_whatever_their_mean() -> None:
    rewards = [0.6] * 8 + [0.1] * 3
    assert np.mean([0.1] * 3) != 0.1  # why comparing with the mean would pass them
    assert zero_variance_groups(rewards, ["a"] * 8 + ["b"] * 3).all()


@settings(deadline=None, max_examples=200)
@given(tokens)
def test_leave_one_out_equals_the_loop_oracle(rows: list[tuple[float, bool, int]]) -> None:
    weights, mask, ids = columns(rows)
    expected = slow_leave_one_out(weights.tolist(), mask.tolist(), ids.tolist())
    np.testing.assert_allclose(leave_one_out(weights, mask, ids), expected, atol=1e-12)


def test_leave_one_out_keeps_the_expected_gradient() -> None:
    # Over all pairs of episodes, exactly: what the baseline takes off has expectation 0.
    case, logits = STUDY["prefix"](1)
    weights = estimator_weights(case, logits, weigher("unit", 1, clip=3.0))
    scores = episode_gradients(case, logits, [np.ones(w.size) for w in weights])
    probs = np.exp(case.episode_logprobs(logits))
    removed = np.zeros(logits.size)
    largest = 0.0
    for first, one in enumerate(weights):
        for second, two in enumerate(weights):
            ids = np.repeat([0, 1], [one.size, two.size])
            both = np.concatenate((one, two))
            baseline = leave_one_out(both, np.ones(both.size, dtype=bool), ids)
            taken = baseline[0] * scores[first] + baseline[-1] * scores[second]
            removed += probs[first] * probs[second] * taken
            largest = max(largest, float(np.abs(taken).max()))
    assert largest > 0.1
    np.testing.assert_allclose(removed, 0, atol=1e-12)


@settings(deadline=None, max_examples=200)
@given(tokens, st.floats(0, 2))
def test_token_advantages_equal_the_loop_oracle(
    rows: list[tuple[float, bool, int]], opd_coef: float
) -> None:
    weights, mask, ids = columns(rows)
    group_advantage = np.array([0.5, -0.25, 0.0, 1.0])
    found = token_advantages(group_advantage, weights, mask, ids, opd_coef=opd_coef)
    expected = slow_token_advantages(
        group_advantage.tolist(), weights.tolist(), mask.tolist(), ids.tolist(), opd_coef
    )
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_tutorial_sign_maximising_the_advantage_lowers_the_kl() -> None:
    case, logits = STUDY["prefix"](0)
    weights = estimator_weights(case, logits, weigher("unit", "return_to_go"))
    advantages = [
        token_advantages(
            np.zeros(1), own, np.ones(own.size, dtype=bool), np.zeros(own.size, int), opd_coef=1.0
        )
        for own in weights
    ]
    ascent = expected_gradient(case, logits, advantages)
    assert sequence_kl(case, logits + 0.1 * ascent) < sequence_kl(case, logits) - 0.01


def test_student_surplus_lowers_the_advantage() -> None:
    found = token_advantages(
        np.array([0.5]), np.array([2.0, -2.0]), np.array([True, True]), [0, 0], opd_coef=0.1
    )
    np.testing.assert_allclose(found, [0.3, 0.7])


def test_tutorial_uncovered_token_gets_no_bonus() -> None:
    # Neither from a weight of 0 less a baseline, nor from a NaN read as a number.
    weights, mask = np.array([np.nan, 1.0, 1.0]), np.array([False, True, True])
    baseline = leave_one_out(weights, mask, [0, 0, 1])
    found = token_advantages(
        np.array([0.5, 0.5]), weights, mask, [0, 0, 1], opd_coef=1.0, baseline=baseline
    )
    assert baseline.tolist() == [0.0, 1.0, 1.0]
    assert found.tolist() == [0.5, 0.5, 0.5]


def test_tokens_behind_a_stop_get_no_bonus_from_the_baseline() -> None:
    ends = [1, 2, 3]
    units = align(ends, ends)
    student, teacher = [-1.0] * 3, [-1.0, -9.0, -1.5]
    weights, mask = opd_weights(
        student, teacher, units, rule="unit", clip=3.0, lookahead=0, stop_after=3.0
    )
    behind = stopped(student, teacher, units, stop_after=3.0)
    pooled, ids = np.tile(weights, 2), np.repeat([0, 1], 3)
    kept = np.tile(mask & ~behind, 2)
    baseline = leave_one_out(pooled, kept, ids)
    found = token_advantages(
        np.zeros(2), pooled, np.tile(mask, 2), ids, opd_coef=1.0, baseline=baseline
    )
    assert found.tolist() == [1.5, -1.5, 0.0] * 2


def test_opd_term_is_added_after_normalisation_and_never_normalised() -> None:
    rewards, ids = [0.0, 1.0, 2.0, 3.0], [0, 1, 2, 3]
    weights, mask = np.array([1.0, -2.0, 0.5, 3.0]), np.ones(4, dtype=bool)
    for normalize_std in (False, True):
        group = group_advantages(rewards, "aaaa", normalize_std=normalize_std)
        found = token_advantages(group, weights, mask, ids, opd_coef=0.5)
        np.testing.assert_allclose(group - found, 0.5 * weights)


def test_without_a_teacher_the_group_advantage_stays() -> None:
    weights, mask = np.full(3, np.nan), np.zeros(3, dtype=bool)
    found = token_advantages(np.array([0.5, -0.5]), weights, mask, [0, 0, 1], opd_coef=0.3)
    assert found.tolist() == [0.5, 0.5, -0.5]


def test_peer_9_tool_tokens_get_no_advantage_and_no_share_in_the_baseline() -> None:
    # model / tool / model, twice
    weights = np.array([1.0, np.nan, 3.0, 2.0, np.nan, 4.0])
    mask = np.array([True, False, True] * 2)
    ids = [0, 0, 0, 1, 1, 1]
    baseline = leave_one_out(weights, mask, ids)
    assert baseline.tolist() == [3.0, 0.0, 3.0, 2.0, 0.0, 2.0]
    found = token_advantages(
        np.array([0.5, -0.5]), weights, mask, ids, opd_coef=1.0, baseline=baseline, loss_mask=mask
    )
    assert found.tolist() == [2.5, 0.0, 0.5, -0.5, 0.0, -2.5]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"opd_coef": -0.1}, "opd_coef is -0.1"),
        ({"weights": np.array([np.nan, 1.0])}, "weight of token 0 is nan but its mask is True"),
        ({"mask": np.array([True])}, "mask has shape"),
        ({"sequence_ids": [0, 1]}, "expected 0 to 0"),
        ({"sequence_ids": [0, -1]}, "span -1 to 0"),
        ({"sequence_ids": [0.0, 0.0]}, "dtype float64"),
        ({"baseline": np.zeros(3)}, "baseline has shape"),
        ({"baseline": np.array([np.inf, 0.0])}, "advantage of token 0 is -?inf"),
        ({"loss_mask": np.array([True, False])}, "token 1 is scored but not sampled"),
        ({"group_advantage": np.array([np.nan])}, "advantage of token 0 is nan"),
    ],
)
def test_refuses_contradictions(change: dict[str, object], says: str) -> None:
    arguments: dict[str, object] = {
        "group_advantage": np.zeros(1),
        "weights": np.ones(2),
        "mask": np.ones(2, dtype=bool),
        "sequence_ids": [0, 0],
        "opd_coef": 1.0,
    }
    with pytest.raises(BatchError, match=says):
        token_advantages(**arguments | change)  # type: ignore[arg-type]
