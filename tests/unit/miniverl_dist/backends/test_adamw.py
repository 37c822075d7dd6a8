"""AdamW against torch's, the learning-rate schedule, and refusals."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from miniverl_dist.backends.adamw import AdamW, learning_rate
from miniverl_dist.config.recipe import OptimConfig
from miniverl_dist.errors import CheckpointError, UpdateError

SHAPES = {"matrix": (4, 3), "norm": (5,)}


def fresh(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(shape, generator=generator).requires_grad_()
        for name, shape in SHAPES.items()
    }


def gradients(scale: float = 1.0) -> Iterator[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(9)
    while True:
        yield {
            name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()
        }


@pytest.mark.parametrize("scale", [0.01, 30.0], ids=["unclipped", "clipped"])
def test_five_steps_equal_those_of_torch(scale: float) -> None:
    config = OptimConfig(betas=(0.8, 0.9), eps=1e-3, weight_decay=0.1, grad_clip=0.7)
    mine, theirs = fresh(), fresh()
    optimizer = AdamW(mine, config)
    groups = [
        {"params": [theirs["matrix"]], "weight_decay": 0.1},
        {"params": [theirs["norm"]], "weight_decay": 0.0},
    ]
    oracle = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-3)
    for step, grads in zip(range(5), gradients(scale), strict=False):
        lr = 0.1 / (step + 1)
        for group in oracle.param_groups:
            group["lr"] = lr
        for name, grad in grads.items():
            mine[name].grad, theirs[name].grad = grad.clone(), grad.clone()
        expected = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.7)
        oracle.step()
        assert optimizer.step(lr) == pytest.approx(float(expected), rel=1e-6)
        assert all(weight.grad is None for weight in mine.values())
    for name in SHAPES:
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_not_finite_moves_nothing() -> None:
    weights = fresh()
    optimizer = AdamW(weights, OptimConfig())
    weights["matrix"].grad = torch.zeros(4, 3)
    weights["norm"].grad = torch.tensor([1.0, 2.0, torch.inf, 0.0, 0.0])
    with pytest.raises(UpdateError, match="gradient norm is inf"):
        optimizer.step(0.1)
    assert all(torch.equal(weights[name], fresh()[name]) for name in SHAPES)
    assert optimizer.num_steps == 0
    assert not any(moment.any() for moment in optimizer.state().values())


def test_restored_moments_go_on_as_the_original_would() -> None:
    one, other = fresh(), fresh()
    first, second = AdamW(one, OptimConfig()), AdamW(other, OptimConfig())
    source = gradients()
    for grads in (next(source), next(source)):
        for name, grad in grads.items():
            one[name].grad = grad.clone()
        first.step(0.1)
    with torch.no_grad():
        for name in SHAPES:
            other[name].copy_(one[name])
    second.restore(first.state(), first.num_steps)
    for name, grad in next(source).items():
        one[name].grad, other[name].grad = grad.clone(), grad.clone()
    first.step(0.1)
    second.step(0.1)
    assert all(torch.equal(one[name], other[name]) for name in SHAPES)


def test_moments_of_other_weights_are_refused() -> None:
    optimizer = AdamW(fresh(), OptimConfig())
    foreign = optimizer.state() | {"first.norm": np.ones(6, dtype=np.float32)}
    with pytest.raises(CheckpointError, match=r"'first.norm' is \(6,\), expected \(5,\)"):
        optimizer.restore(foreign, 3)
    assert optimizer.num_steps == 0


def test_linear_schedule_rises_then_falls_and_wastes_no_batch() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=2, schedule="linear")
    rates = [learning_rate(config, n, 6) for n in range(8)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0])


def test_constant_schedule_rises_and_stays() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, n, 3) for n in (0, 3, 4, 99)] == [0.25, 1.0, 1.0, 1.0]


def test_a_run_shorter_than_its_warmup_only_rises() -> None:
    config = OptimConfig(lr=1.0, warmup_steps=4, schedule="linear")
    assert [learning_rate(config, n, 2) for n in (0, 1)] == [0.25, 0.5]
