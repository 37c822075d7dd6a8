"""The GRPO+OPD step under every layout against one rank: loss, gradient norm, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest

from tests.support.requirements import require_megatron

require_megatron()

from miniverl_dist.config.cluster import ParallelConfig  # noqa: E402
from miniverl_dist.config.recipe import LossConfig  # noqa: E402
from tests.support.megatron_student import (  # noqa: E402
    Arrays,
    folder,
    student,
    tensors,
    train_batch,
)
from tests.support.ranks import Rank, run_ranks  # noqa: E402

MODEL_TYPES = ("qwen3", "qwen3_moe", "qwen3_5_moe")
ONE = ParallelConfig()
TP2 = ParallelConfig(tensor=2)
TP2_SP = ParallelConfig(tensor=2, sequence=True)
PP2 = ParallelConfig(pipeline=2)
CP2 = ParallelConfig(context=2)
EP2 = ParallelConfig(expert=2)
TP2_SP_PP2 = ParallelConfig(tensor=2, sequence=True, pipeline=2)
TP2_SP_CP2 = ParallelConfig(tensor=2, sequence=True, context=2)
TP2_SP_EP2 = ParallelConfig(tensor=2, sequence=True, expert=2)
PP2_EP2 = ParallelConfig(pipeline=2, expert=2)
SEED_OF_POLICY = 1
LOSS = {
    reduction: LossConfig(reduction=reduction, kl_coef=0.1, chunk_size=16)
    for reduction in ("token_mean", "trajectory_mean")
}


class Case(NamedTuple):
    """One student under one layout; data parallelism takes the ranks that are left."""

    model_type: str
    parallel: ParallelConfig
    reduction: str = "token_mean"
    distributed_optimizer: bool = True
    recompute: str = "none"
    lengths: tuple[int, ...] = (7, 19, 12, 3, 26, 1, 15)


class Step(NamedTuple):
    metrics: dict[str, float]
    gradients: Arrays
    logprobs: Any


def step(rank: Rank, case: Case) -> Step:
    """The reference policy holds the folder's weights, the policy others: the KL is not zero."""
    backend = student(
        rank,
        case.model_type,
        parallel=case.parallel,
        loss=LOSS[case.reduction],
        distributed_optimizer=case.distributed_optimizer,
        recompute=case.recompute,
    )
    backend.load_weights(tensors(case.model_type, SEED_OF_POLICY))
    batch = train_batch(lengths=case.lengths)
    logprobs = backend.logprobs(batch)
    metrics = backend.update(batch).metrics
    backend.close()
    del metrics["seconds_update"]
    return Step(metrics, backend.gradients[0], logprobs)


def steps(rank: Rank, cases: Sequence[Case]) -> list[Step]:
    return [step(rank, case) for case in cases]


def check(world: int, cases: Sequence[Case]) -> None:
    """All cases in one world of forked ranks, and each against one rank."""
    for model_type in {case.model_type for case in cases}:
        folder(model_type, 0), folder(model_type, SEED_OF_POLICY)
    alone = [
        case._replace(parallel=ONE, distributed_optimizer=False, recompute="none") for case in cases
    ]
    distinct = list(dict.fromkeys(alone))
    wanted = dict(zip(distinct, run_ranks(1, steps, distinct)[0], strict=True))
    found = run_ranks(world, steps, cases, timeout_s=30.0 + 15 * len(cases))
    for index, case in enumerate(cases):
        ranks = [results[index] for results in found]
        for other in ranks[1:]:
            assert other.metrics == ranks[0].metrics, f"{case}: ranks report different metrics"
            np.testing.assert_array_equal(other.logprobs, ranks[0].logprobs)
        check_step(ranks[0], wanted[alone[index]], str(case))


def check_step(found: Step, wanted: Step, case: str) -> None:
    assert found.gradients.keys() == wanted.gradients.keys()
    for name, expected in wanted.gradients.items():
        # An expert may not have been chosen; everything else is used.
        used = np.abs(expected).max() > 1e-4
        assert used or ".experts." in name, f"{case}: {name} has no gradient to compare"
        np.testing.assert_allclose(
            found.gradients[name], expected, rtol=1e-5, atol=1e-5, err_msg=f"{case}: {name}"
        )
    for name, value in wanted.metrics.items():
        assert found.metrics[name] == pytest.approx(value, rel=1e-5, abs=1e-5), f"{case}: {name}"
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, rtol=0, atol=1e-5, err_msg=case)


def test_two_ranks() -> None:
    check(
        2,
        [
            Case("qwen3", TP2_SP),
            Case("qwen3", TP2, "trajectory_mean", distributed_optimizer=False),
            Case("qwen3", PP2, recompute="full"),
            Case("qwen3", CP2, "trajectory_mean"),
            Case("qwen3", CP2, lengths=(7,)),
            Case("qwen3", ONE, recompute="selective"),
            Case("qwen3", ONE, distributed_optimizer=False, lengths=(7, 19, 12)),
            Case("qwen3_moe", TP2_SP),
            Case("qwen3_moe", PP2),
            Case("qwen3_moe", CP2),
            Case("qwen3_moe", EP2, "trajectory_mean"),
            Case("qwen3_moe", ONE),
            Case("qwen3_5_moe", TP2_SP),
            Case("qwen3_5_moe", PP2),
            Case("qwen3_5_moe", CP2, "trajectory_mean"),
            Case("qwen3_5_moe", EP2),
            Case("qwen3_5_moe", ONE),
        ],
    )


def test_thirteen_sequences_on_four_replicas_do_not_hang() -> None:
    check(4, [Case("qwen3", ONE, lengths=(20,) * 13), Case("qwen3_moe", EP2, lengths=(9,))])


@pytest.mark.slow
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_four_ranks(model_type: str) -> None:
    cases = [
        Case(model_type, TP2_SP_PP2),
        Case(model_type, TP2_SP_CP2, "trajectory_mean"),
        Case(model_type, TP2_SP, "trajectory_mean"),
    ]
    if model_type != "qwen3":
        cases += [
            Case(model_type, TP2_SP_EP2),
            Case(model_type, TP2_SP_EP2, distributed_optimizer=False),
            Case(model_type, PP2_EP2, "trajectory_mean"),
        ]
    check(4, cases)
