"""Eight ranks, split in every way at once."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

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

LOSS = LossConfig(reduction="trajectory_mean", kl_coef=0.1, chunk_size=16)
EVERY_WAY = ParallelConfig(tensor=2, sequence=True, pipeline=2, context=2, expert=2)


def step(
    rank: Rank, model_type: str, parallel: ParallelConfig, checkpoint: Path
) -> tuple[dict[str, float], Arrays, float]:
    """A step, a checkpoint, and the loss of the step behind it."""
    backend = student(rank, model_type, parallel=parallel, loss=LOSS)
    with closing(backend):
        backend.load_weights(tensors(model_type, 1))
        metrics = backend.update(train_batch()).metrics
        backend.save(checkpoint)
        return metrics, backend.gradients[0], backend.update(train_batch(1)).metrics["loss"]


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_5_moe"])
def test_eight_ranks_take_the_step_of_one(tmp_path: Path, model_type: str) -> None:
    for seed in (0, 1):
        folder(model_type, seed)
    wanted = run_ranks(1, step, model_type, ParallelConfig(), tmp_path / "one")[0]
    ranks = run_ranks(8, step, model_type, EVERY_WAY, tmp_path / "eight", timeout_s=240.0)
    for metrics, gradients, next_loss in ranks:
        assert metrics["loss"] == pytest.approx(wanted[0]["loss"], abs=1e-5)
        assert metrics["grad_norm"] == pytest.approx(wanted[0]["grad_norm"], rel=1e-5)
        assert next_loss == pytest.approx(wanted[2], abs=1e-4)
        for name, expected in wanted[1].items():
            np.testing.assert_allclose(
                gradients[name], expected, rtol=1e-5, atol=1e-5, err_msg=name
            )
