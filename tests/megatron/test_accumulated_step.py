"""A step in parts against the same step at once, under every kind of layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.support.requirements import require_megatron

require_megatron()

from miniverl_dist.config.cluster import ParallelConfig  # noqa: E402
from miniverl_dist.config.recipe import LossConfig  # noqa: E402
from miniverl_dist.errors import BatchError, UpdateError  # noqa: E402
from tests.support.megatron_student import folder, sft_batch, student, tensors  # noqa: E402
from tests.support.megatron_student import train_batch as whole_batch  # noqa: E402
from tests.support.parts import parts_of  # noqa: E402
from tests.support.ranks import Rank, run_ranks  # noqa: E402

LENGTHS = (7, 19, 12, 9, 26, 11, 15)
CUTS = (2, 3, 2)
ORDER = (2, 0, 1)
LAYOUTS = {
    "one": (1, ParallelConfig(), "qwen3", False),
    "dp2": (2, ParallelConfig(), "qwen3", False),
    "dp2 distributed optimizer": (2, ParallelConfig(), "qwen3", True),
    "tp2 sp": (2, ParallelConfig(tensor=2, sequence=True), "qwen3", True),
    "pp2": (2, ParallelConfig(pipeline=2), "qwen3", False),
    "cp2": (2, ParallelConfig(context=2), "qwen3", True),
    "ep2": (2, ParallelConfig(expert=2), "qwen3_moe", True),
}


def made(rank: Rank, layout: str, reduction: Any = "token_mean", **options: Any) -> Any:
    _, parallel, model_type, distributed = LAYOUTS[layout]
    loss = LossConfig(reduction=reduction, kl_coef=0.1, chunk_size=16)
    backend = student(
        rank,
        model_type,
        parallel=parallel,
        loss=loss,
        distributed_optimizer=distributed,
        **options,
    )
    backend.load_weights(tensors(model_type, 1))
    return backend


def outcome(backend: Any, metrics: dict[str, float]) -> tuple[dict[str, float], Any, int]:
    del metrics["seconds_update"]
    return metrics, backend.gradients[-1], backend.policy_version


def both_ways(rank: Rank, layout: str, reduction: str) -> list[Any]:
    batch = whole_batch(lengths=LENGTHS)
    backend = made(rank, layout, reduction)
    found = [outcome(backend, backend.update(batch).metrics)]
    backend.close()
    backend = made(rank, layout, reduction)
    parts = parts_of(batch, CUTS)
    # An abandoned step leaves nothing behind.
    backend.accumulate(parts[1], 1)
    backend.discard_accumulated()
    for place in ORDER:
        backend.accumulate(parts[place], place)
    found.append(outcome(backend, backend.commit_accumulated().metrics))
    backend.close()
    return found


def check(layout: str, reduction: str) -> None:
    world, _, model_type, _ = LAYOUTS[layout]
    folder(model_type, 0), folder(model_type, 1)
    results = run_ranks(world, both_ways, layout, reduction, timeout_s=90.0)
    for whole, parts in results:
        assert whole[2] == parts[2] == 1
        assert whole[0].keys() == parts[0].keys()
        for name, expected in whole[0].items():
            assert parts[0][name] == pytest.approx(expected, rel=1e-5, abs=1e-6), name
        for name, expected in whole[1].items():
            np.testing.assert_allclose(parts[1][name], expected, rtol=1e-5, atol=1e-6, err_msg=name)
    assert results[0][1][0] == results[-1][1][0], "ranks report different metrics"


@pytest.mark.parametrize("reduction", ["token_mean", "trajectory_mean"])
@pytest.mark.parametrize("layout", ["one", "dp2 distributed optimizer"])
def test_the_step_is_that_of_the_whole_batch(layout: str, reduction: str) -> None:
    check(layout, reduction)


@pytest.mark.slow
@pytest.mark.parametrize("layout", sorted(set(LAYOUTS) - {"one", "dp2 distributed optimizer"}))
def test_under_every_kind_of_layout(layout: str) -> None:
    check(layout, "trajectory_mean")


def refusals(rank: Rank) -> list[str]:
    backend = made(rank, "one")
    before = backend.snapshot().checksum
    batch = whole_batch(lengths=LENGTHS)
    parts = parts_of(batch, CUTS)
    found = []

    def refused(error: type[Exception], call: Any, *arguments: Any) -> None:
        with pytest.raises(error) as caught:
            call(*arguments)
        found.append(str(caught.value))

    refused(BatchError, backend.commit_accumulated)
    backend.accumulate(parts[0], 0)
    refused(UpdateError, backend.update, batch)
    refused(UpdateError, backend.sft_update, sft_batch(), 1e-3)
    refused(BatchError, backend.accumulate, parts[0], 0)
    refused(BatchError, backend.commit_accumulated)  # the error before has discarded the part
    infinite = replace(parts[0], advantages=np.where(parts[0].loss_mask, 1e308, 0.0))
    backend.accumulate(infinite, 0)
    refused(UpdateError, backend.commit_accumulated)
    assert backend.snapshot().checksum == before
    backend.accumulate(parts[0], 0)
    backend.commit_accumulated()
    assert backend.snapshot().checksum != before
    backend.close()
    return found


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    folder("qwen3", 0), folder("qwen3", 1)
    (found,) = run_ranks(1, refusals, timeout_s=60.0)
    assert [message.split(" ")[0] for message in found] == [
        "nothing",
        "an",
        "a",
        "place",
        "nothing",
        "rank",
    ]
