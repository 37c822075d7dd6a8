"""One Megatron rank on a CUDA device: nccl, bfloat16, Transformer Engine where it is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.requirements import require_megatron

require_megatron()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="torch finds no CUDA device: nothing was tested"
    ),
]

MODEL_TYPES = ("qwen3", "qwen3_moe")
BFLOAT16_TOLERANCE = 0.06
"""Nats. 8 bits of precision through four layers; other weights are ten times further off."""


@contextmanager
def on_gpu(model_type: str, **changes: Any) -> Iterator[Any]:
    # Imported here: without a CUDA device this module is only collected.
    from miniverl_dist.config.recipe import LossConfig
    from tests.support.megatron_student import student

    loss = LossConfig(kl_coef=0.1, chunk_size=16)
    with closing(student(None, model_type, loss=loss, dtype="bfloat16", **changes)) as backend:
        yield backend


def test_the_student_computes_on_the_gpu_over_nccl() -> None:
    with on_gpu("qwen3") as backend:
        assert torch.distributed.get_backend() == "nccl"
        parameters = dict(backend.model.module.named_parameters())
        assert {tensor.device.type for tensor in parameters.values()} == {"cuda"}
        assert parameters["decoder.layers.0.mlp.linear_fc1.weight"].dtype == torch.bfloat16


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_logprobs_equal_transformers_within_bfloat16(model_type: str) -> None:
    from miniverl_dist.config.recipe import LossConfig
    from tests.reference.megatron_step import transformers_step
    from tests.support.megatron_student import folder, train_batch

    batch = train_batch()
    with on_gpu(model_type) as backend:
        found = backend.logprobs(batch)
    path = folder(model_type, 0)
    oracle = transformers_step(path, path, batch, LossConfig())
    # Experts are chosen by comparison: a near tie falls differently in bfloat16, and one token is
    # then far off. The median and the nine tenths say whether the model is the same.
    apart = np.abs(found - oracle.logprobs)[np.isfinite(oracle.logprobs)]
    assert np.median(apart) < BFLOAT16_TOLERANCE / 2
    assert np.quantile(apart, 0.9) < BFLOAT16_TOLERANCE


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_an_update_lowers_the_loss_and_resumes(model_type: str, tmp_path: Path) -> None:
    from tests.support.megatron_student import sft_batch, train_batch

    with on_gpu(model_type) as backend:
        losses = [backend.sft_update(sft_batch(), 3e-3)["loss"] for _ in range(5)]
        assert losses[-1] < 0.9 * losses[0]
        backend.finish_warmup()
        metrics = backend.update(train_batch()).metrics
        assert all(np.isfinite(value) for value in metrics.values())
        assert metrics["grad_norm"] > 0
        backend.save(tmp_path / "ck")
        weights = dict(backend.snapshot().tensors)
        expected = backend.update(train_batch(1)).metrics["loss"]
    with on_gpu(model_type) as backend:
        backend.load(tmp_path / "ck", 1)
        for name, value in backend.snapshot().tensors.items():
            np.testing.assert_array_equal(value, weights[name], err_msg=name)
        assert backend.update(train_batch(1)).metrics["loss"] == pytest.approx(expected, abs=5e-3)


def test_transformer_engine_is_used_where_it_is_installed() -> None:
    pytest.importorskip(
        "transformer_engine", reason="Transformer Engine is not installed: plain torch was tested"
    )
    with on_gpu("qwen3") as backend:
        kinds = {type(module).__module__ for module in backend.model.module.modules()}
        assert any("transformer_engine" in kind for kind in kinds)
