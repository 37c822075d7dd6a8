"""The toy student's step in parts: the step of the whole batch, in any order of arrival."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miniverl_dist.backends.toy import ToyBackend
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.errors import BatchError, TokenizerMismatchError, UpdateError
from miniverl_dist.schemas.batch import TrainBatch
from tests.support.parts import parts_of
from tests.support.toy import random_batch, sft_batch, state_of, tiny_backend

SMOOTH = OptimConfig(lr=0.5, eps=1.0, weight_decay=0.01)
"""A step nearly proportional to the gradient: rounding of tiny gradients decides no sign."""
SIZES = (2, 1, 3)
LOSSES = [
    LossConfig(kind=kind, reduction=reduction, kl_coef=kl, kl_estimator=estimator)
    for kind in ("ppo", "gspo_token", "cispo")
    for reduction in ("token_mean", "trajectory_mean")
    for kl, estimator in ((0.0, "k3"), (0.1, "k3"), (0.1, "k1_in_reward"))
]


def moved(loss: LossConfig) -> ToyBackend:
    """A student that is no longer its reference."""
    backend = tiny_backend(loss=loss, optim=SMOOTH)
    backend.update(random_batch(99))
    return backend


def in_parts(
    backend: ToyBackend, batch: TrainBatch, order: Sequence[int] = (0, 1, 2)
) -> dict[str, float]:
    parts = parts_of(batch, SIZES)
    for place in order:
        backend.accumulate(parts[place], place)
    return backend.commit_accumulated().metrics


@pytest.mark.parametrize(
    "loss", LOSSES, ids=lambda c: f"{c.kind}-{c.reduction}-{c.kl_coef}-{c.kl_estimator}"
)
def test_it_is_the_step_of_the_whole_batch(loss: LossConfig) -> None:
    whole, parted, start = moved(loss), moved(loss), moved(loss)
    for seed in (1, 2):
        expected = whole.update(random_batch(seed)).metrics
        found = in_parts(parted, random_batch(seed))
        assert found.keys() == expected.keys()
        for name in found.keys() - {"seconds_update"}:
            assert found[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-6), name
    before, wanted = start.model.arrays(), whole.model.arrays()
    for name, weight in parted.model.arrays().items():
        np.testing.assert_allclose(weight, wanted[name], rtol=0, atol=1e-6, err_msg=name)
        assert np.abs(weight - before[name]).max() > 1e-4  # something was learned
    assert (parted.policy_version, parted.num_updates) == (3, 3)
    assert (whole.policy_version, whole.num_updates) == (3, 3)


def test_the_order_of_arrival_changes_not_one_bit(tmp_path: Path) -> None:
    states = []
    for index, order in enumerate(permutations(range(3))):
        backend = moved(LossConfig())
        in_parts(backend, random_batch(1), order)
        (tmp_path / str(index)).mkdir()
        states.append(state_of(backend, tmp_path / str(index)))
    assert all(state == states[0] for state in states)


def test_an_abandoned_step_leaves_nothing_behind(tmp_path: Path) -> None:
    clean, used = moved(LossConfig()), moved(LossConfig())
    used.accumulate(parts_of(random_batch(5), SIZES)[2], 2)
    used.discard_accumulated()
    used.discard_accumulated()
    for backend, folder in ((clean, tmp_path / "clean"), (used, tmp_path / "used")):
        folder.mkdir()
        backend.update(random_batch(1))
        in_parts(backend, random_batch(2))
    assert state_of(clean, tmp_path / "clean") == state_of(used, tmp_path / "used")


def test_a_load_discards(tmp_path: Path) -> None:
    backend = moved(LossConfig())
    backend.save(tmp_path)
    backend.accumulate(parts_of(random_batch(5), SIZES)[0], 0)
    backend.load(tmp_path, 1)
    with pytest.raises(BatchError, match="nothing has been accumulated"):
        backend.commit_accumulated()


def bad_ids(part: TrainBatch) -> TrainBatch:
    return replace(part, token_ids=part.token_ids + 1)


def no_targets(part: TrainBatch) -> TrainBatch:
    nothing = np.zeros_like(part.loss_mask)
    return replace(
        part,
        loss_mask=nothing,
        advantages=np.zeros(len(nothing)),
        rollout_logprobs=np.full(len(nothing), np.nan),
    )


def infinite(part: TrainBatch) -> TrainBatch:
    return replace(part, advantages=np.where(part.loss_mask, 1e300, 0.0))


@pytest.mark.parametrize(
    ("spoil", "place", "error"),
    [
        (bad_ids, 1, TokenizerMismatchError),
        (no_targets, 1, BatchError),
        (infinite, 1, UpdateError),
        (lambda part: random_batch(1, num_minibatches=2), 1, BatchError),
        (lambda part: part, 0, BatchError),
    ],
    ids=["ids", "targets", "loss", "minibatches", "twice"],
)
def test_an_error_discards_all_parts(
    spoil: Any, place: int, error: type[Exception], tmp_path: Path
) -> None:
    backend = moved(LossConfig())
    first, second, _ = parts_of(random_batch(1), SIZES)
    before = state_of(backend, tmp_path)
    backend.accumulate(first, 0)
    with pytest.raises(error):
        backend.accumulate(spoil(second), place)
    assert state_of(backend, tmp_path) == before
    with pytest.raises(BatchError, match="nothing has been accumulated"):
        backend.commit_accumulated()
    backend.update(random_batch(1))


def test_a_gradient_that_is_not_finite_takes_no_step(tmp_path: Path) -> None:
    backend = moved(LossConfig())
    before = state_of(backend, tmp_path)
    part = parts_of(random_batch(1), SIZES)[0]
    backend.accumulate(replace(part, advantages=np.where(part.loss_mask, 1e37, 0.0)), 0)
    with pytest.raises(UpdateError, match="gradient norm"):
        backend.commit_accumulated()
    assert state_of(backend, tmp_path) == before
    assert in_parts(backend, random_batch(1))["grad_norm"] > 0


def test_nothing_else_may_change_the_student_meanwhile() -> None:
    backend = moved(LossConfig())
    backend.accumulate(parts_of(random_batch(1), SIZES)[0], 0)
    with pytest.raises(UpdateError, match=r"an update in the middle of .* \(1 parts\)"):
        backend.update(random_batch(1))
    with pytest.raises(UpdateError, match="a supervised step in the middle of"):
        backend.sft_update(sft_batch(1), 1e-3)
    backend.logprobs(random_batch(1))
    backend.snapshot()
    backend.commit_accumulated()
    backend.update(random_batch(1))
