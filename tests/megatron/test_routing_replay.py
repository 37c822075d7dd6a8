"""Replayed routing against transformers with forced experts, under every kind of layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.support.requirements import require_megatron

require_megatron()

from miniverl_dist.config.cluster import ParallelConfig  # noqa: E402
from miniverl_dist.config.recipe import LossConfig  # noqa: E402
from miniverl_dist.errors import BatchError  # noqa: E402
from miniverl_dist.schemas.batch import TrainBatch  # noqa: E402
from tests.reference.forced_routing import own_routing  # noqa: E402
from tests.reference.megatron_step import OracleStep, transformers_step  # noqa: E402
from tests.support.hf_models import load_hf_model  # noqa: E402
from tests.support.layouts import TWO_RANKS  # noqa: E402
from tests.support.megatron_student import Arrays, folder, student, tensors, train_batch  # noqa: E402
from tests.support.ranks import Rank, run_ranks  # noqa: E402

NUM_LAYERS, NUM_EXPERTS, TOPK = 4, 8, 2
MODEL_TYPES = ("qwen3_moe", "qwen3_5_moe")
POLICY_SEED = 1
LOSS = LossConfig(kl_coef=0.1, chunk_size=16)
ALONE = ParallelConfig()


def own(model_type: str, batch: TrainBatch) -> NDArray[np.int16]:
    """[N, L, K] of the policy, sequence by sequence."""
    model = load_hf_model(folder(model_type, POLICY_SEED))
    parts = [own_routing(model, batch.token_ids[a:b]) for a, b in pairwise(batch.sequence_starts)]
    return np.concatenate(parts)


def drawn(batch: TrainBatch, seed: int = 0) -> NDArray[np.int16]:
    """[N, L, K] distinct experts that no router has chosen."""
    noise = np.random.default_rng(seed).random((len(batch.token_ids), NUM_LAYERS, NUM_EXPERTS))
    return noise.argsort(-1)[..., :TOPK].astype(np.int16)


def with_gaps(rows: NDArray[np.int16]) -> NDArray[np.int16]:
    """Every third token and the last eight have no routing."""
    holes = np.arange(len(rows)) % 3 == 1
    holes[-8:] = True
    return np.where(holes[:, None, None], np.int16(-1), rows)


@cache
def case_batch(routing: str, model_type: str) -> TrainBatch:
    batch = train_batch()
    rows = {
        "none": lambda: None,
        "own": lambda: own(model_type, batch),
        "drawn": lambda: drawn(batch),
        "gaps": lambda: with_gaps(drawn(batch)),
    }[routing]()
    return replace(batch, routed_experts=rows)


@cache
def oracle(routing: str, model_type: str) -> OracleStep:
    paths = folder(model_type, POLICY_SEED), folder(model_type, 0)
    return transformers_step(*paths, case_batch(routing, model_type), LOSS)


class Case(NamedTuple):
    model_type: str
    routing: str
    layout: str | None = None
    recompute: str = "none"


class Found(NamedTuple):
    metrics: dict[str, float]
    gradients: Arrays
    logprobs: NDArray[np.float64]


def step(rank: Rank | None, case: Case) -> Found:
    """The reference holds the folder's weights, the policy others; several microbatches."""
    backend = student(
        rank,
        case.model_type,
        parallel=TWO_RANKS[case.layout] if case.layout else ALONE,
        loss=LOSS,
        recompute=case.recompute,
    )
    try:
        backend.load_weights(tensors(case.model_type, POLICY_SEED))
        batch = case_batch(case.routing, case.model_type)
        logprobs = backend.logprobs(batch)
        metrics = backend.update(batch).metrics
        return Found(metrics, backend.gradients[0], logprobs)
    finally:
        backend.close()


def steps(rank: Rank, cases: Sequence[Case]) -> list[Found]:
    return [step(rank, case) for case in cases]


def check(found: Found, wanted: Any, case: object, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(
        found.logprobs, wanted.logprobs, rtol=0, atol=tolerance, err_msg=str(case)
    )
    assert found.gradients.keys() == wanted.gradients.keys()
    # Forced experts make the hybrid's largest gradients 10, others 1; rounding grows along.
    largest = max(1.0, *(np.abs(expected).max() for expected in wanted.gradients.values()))
    for name, expected in wanted.gradients.items():
        np.testing.assert_allclose(
            found.gradients[name],
            expected,
            rtol=tolerance,
            atol=tolerance * largest,
            err_msg=f"{case}: {name}",
        )


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_replaying_the_models_own_routing_changes_nothing(model_type: str) -> None:
    plain, replayed = (step(None, Case(model_type, routing)) for routing in ("none", "own"))
    check(replayed, plain, model_type, tolerance=1e-6)
    for name in ("loss", "grad_norm", "entropy_mean", "reference_kl_mean"):
        assert replayed.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("model_type", "routing", "recompute"),
    [
        ("qwen3_moe", "drawn", "none"),
        ("qwen3_moe", "gaps", "full"),
        ("qwen3_5_moe", "drawn", "full"),
        ("qwen3_5_moe", "gaps", "none"),
    ],
)
def test_one_rank_equals_transformers_with_forced_experts(
    model_type: str, routing: str, recompute: str
) -> None:
    case = Case(model_type, routing, recompute=recompute)
    wanted, found = oracle(routing, model_type), step(None, case)
    check(found, wanted, case)
    assert found.metrics["loss"] == pytest.approx(wanted.loss, abs=1e-5)
    # Both passes of the trainer were routed so, or the first ratio would not be 1.
    assert found.metrics["ratio_max"] == 1.0
    apart = np.nanmax(np.abs(wanted.logprobs - oracle("none", model_type).logprobs))
    assert apart > 0.1


def test_two_ranks_equal_transformers_with_forced_experts() -> None:
    moe, hybrid = MODEL_TYPES
    cases = [
        Case(moe, "gaps", "DP2", recompute="full"),
        Case(moe, "gaps", "TP2+SP", recompute="full"),
        Case(moe, "gaps", "EP2"),
        Case(moe, "gaps", "PP2"),
        Case(moe, "gaps", "PP2", recompute="full"),
        Case(moe, "gaps", "CP2", recompute="full"),
        Case(hybrid, "gaps", "TP2+SP"),
        Case(hybrid, "drawn", "PP2", recompute="full"),
        Case(hybrid, "gaps", "CP2"),
    ]
    wanted = [oracle(case.routing, case.model_type) for case in cases]
    for results in run_ranks(2, steps, cases, timeout_s=180.0):
        for case, found, expected in zip(cases, results, wanted, strict=True):
            check(found, expected, case)


def test_the_next_batch_without_routing_is_routed_by_the_model() -> None:
    plain = case_batch("none", "qwen3_moe")
    backend = student(None, "qwen3_moe", recompute="full")
    try:
        before = backend.logprobs(plain)
        forced = backend.logprobs(case_batch("drawn", "qwen3_moe"))
        np.testing.assert_array_equal(backend.logprobs(plain), before)
        assert np.nanmax(np.abs(forced - before)) > 0.1
    finally:
        backend.close()


def test_routing_of_another_model_is_refused_before_anything_changes() -> None:
    batch = train_batch()
    rows = drawn(batch)
    beyond, below = rows.copy(), rows.copy()
    beyond[5, 2, 1], below[5, 2, 1] = NUM_EXPERTS, -2
    backend = student(None, "qwen3_moe")
    try:
        for bad, message in (
            (rows[:, :3], r"have \(layers, experts per token\) \(3, 2\), the student \(4, 2\)"),
            (beyond, "are 0 to 8, the student has experts 0 to 7"),
            (below, "are -2 to 7"),
        ):
            broken = replace(batch, routed_experts=bad)
            for call in (backend.update, backend.logprobs):
                with pytest.raises(BatchError, match=message):
                    call(broken)
        assert backend.update(replace(batch, routed_experts=rows)).policy_version == 1
    finally:
        backend.close()
    dense = student(None, "qwen3")
    try:
        with pytest.raises(BatchError, match="the student has no experts"):
            dense.update(replace(batch, routed_experts=rows))
    finally:
        dense.close()
