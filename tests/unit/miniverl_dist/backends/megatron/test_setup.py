# ruff: noqa: E402 - without megatron nothing below can be imported
"""Ranks come and go in one process; a model says what it cannot be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support.requirements import require_megatron

require_megatron()

from megatron.core import parallel_state

from miniverl_dist.backends.megatron.architecture import hf_parameters
from miniverl_dist.backends.megatron.device import init_ranks, shutdown_ranks, single_rank
from miniverl_dist.backends.megatron.setup import (
    MegatronModel,
    build_model,
    build_optimizer,
    first_vocab_row,
    forward_hidden,
    logits,
    output_weight,
    padded_vocab_size,
)
from miniverl_dist.backends.megatron.weights import layout_of, load_hf
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.recipe import OptimConfig
from miniverl_dist.config.roles import MegatronModelConfig
from miniverl_dist.errors import ConfigError
from tests.support.hf_models import MODEL_TYPES, tiny_architecture
from tests.support.layouts import FOUR_RANKS
from tests.support.ranks import Rank, run_ranks

TOKENS = torch.arange(16).view(2, 8)


def built(model_type: str, parallel: ParallelConfig, **fields: Any) -> MegatronModel:
    config = MegatronModelConfig(
        kind="megatron", config=Path("unused.json"), parallel=parallel, **fields
    )
    return build_model(tiny_architecture(model_type), config, seed=1)


def twice_in_a_process(_: Rank) -> list[float]:
    """Without the world that ``layout`` would make."""
    sums = []
    for _ in range(2):
        with single_rank(ParallelConfig()):
            sums.append(float(logits(built("qwen3", ParallelConfig()), TOKENS, TOKENS).sum()))
        assert not dist.is_initialized()
    return sums


def test_one_process_can_be_a_student_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    [(first, second)] = run_ranks(1, twice_in_a_process)
    assert first == second != 0


def refused(_: Rank) -> tuple[str, str]:
    with pytest.raises(ConfigError) as layout:
        init_ranks(RankAddress(), ParallelConfig(tensor=2), 5.0)
    assert not dist.is_initialized()
    with single_rank(ParallelConfig()), pytest.raises(ConfigError) as decoder:
        built("qwen3", ParallelConfig(expert_tensor=2))
    shutdown_ranks()
    return str(layout.value), str(decoder.value)


def test_layouts_that_do_not_fit_are_refused() -> None:
    [(layout, decoder)] = run_ranks(1, refused)
    assert layout.startswith("student.model.parallel: 1 ranks do not divide by tensor")
    assert decoder.startswith("student.model.parallel: a qwen3 model has no experts")


@pytest.mark.parametrize(("rows", "tensor", "padded"), [(96, 2, 96), (97, 2, 98), (1, 4, 4)])
def test_vocabulary_rows_are_padded_to_equal_parts(rows: int, tensor: int, padded: int) -> None:
    assert padded_vocab_size(rows, tensor) == padded


def projections(rank: Rank) -> list[tuple[str, int, int, bool, bool]]:
    found = []
    for model_type in MODEL_TYPES:
        with rank.layout(FOUR_RANKS["TP2+SP+PP2"]):
            model = built(model_type, FOUR_RANKS["TP2+SP+PP2"])
            assert layout_of(model) == FOUR_RANKS["TP2+SP+PP2"]
            rows = len(output_weight(model)) if model.is_last_stage else 0
            first = first_vocab_row(model)
            found.append((model_type, rows, first, model.is_first_stage, model.is_last_stage))
    return found


def test_stages_hold_the_real_rows_of_the_projection() -> None:
    """97 rows over two tensor ranks: 49, and 48 with one of padding left out."""
    by_rank = run_ranks(4, projections)
    for index, model_type in enumerate(MODEL_TYPES):
        assert [cases[index] for cases in by_rank] == [
            (model_type, 0, 0, True, False),
            (model_type, 0, 49, True, False),
            (model_type, 49, 0, False, True),
            (model_type, 48, 49, False, True),
        ]


def random_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = hf_parameters(tiny_architecture("qwen3"))
    return {n: 0.1 * torch.randn(shape, generator=generator) for n, shape in shapes.items()}


def hidden_gradients(rank: Rank, parallel: ParallelConfig) -> list[np.ndarray]:
    """Each tensor rank hands back what its own rows contribute to one loss."""
    with rank.layout(parallel):
        model = built("qwen3", parallel)
        load_hf(model, random_tensors().__getitem__)
        hidden = forward_hidden(model, TOKENS, TOKENS)
        assert hidden.shape == (8, 2, 64)
        # The loss is linear in the logits, so that its parts add up over the ranks.
        first, rows = first_vocab_row(model), output_weight(model)
        scale = torch.arange(1.0, 98.0).sin()[first : first + len(rows)]
        ((hidden @ rows.T) * scale).sum().backward()
        named = dict(model.module.named_parameters())
        names = ["decoder.final_layernorm.weight", "decoder.layers.0.self_attention.linear_qkv"]
        norm = named[names[0]].main_grad
        if parallel.sequence:
            # Megatron sums these over the tensor ranks at the end of a step.
            dist.all_reduce(norm)
        return [norm.numpy(), named[f"{names[1]}.weight"].main_grad.numpy()]


@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_are_summed_over_the_tensor_ranks(sequence: bool) -> None:
    [(norm, whole)] = run_ranks(1, hidden_gradients, ParallelConfig())
    assert np.abs(norm).max() > 0.1
    split = run_ranks(2, hidden_gradients, ParallelConfig(tensor=2, sequence=sequence))
    for found, _ in split:
        np.testing.assert_allclose(found, norm, atol=1e-5, rtol=1e-5)
    np.testing.assert_allclose(
        np.concatenate([part for _, part in split]), whole, atol=1e-5, rtol=1e-5
    )


def one_step(rank: Rank, distributed: bool, dtype: Any) -> tuple[float, str, float]:
    """A step from decay alone: every matrix shrinks by lr * weight_decay, no vector moves."""
    with rank.layout(ParallelConfig()):
        model = built("qwen3", ParallelConfig(), distributed_optimizer=distributed, dtype=dtype)
        optim = OptimConfig(lr=0.1, weight_decay=0.5)
        optimizer = build_optimizer(model, optim, distributed=distributed)
        before = {n: p.detach().clone().float() for n, p in model.module.named_parameters()}
        model.ddp.zero_grad_buffer()
        optimizer.step()
        worst = 0.0
        for name, parameter in model.module.named_parameters():
            kept = 0.95 if parameter.dim() > 1 else 1.0
            error = (parameter.detach().float() - kept * before[name]).abs().max()
            worst = max(worst, float(error))
        [main] = {group["params"][0].dtype for group in optimizer.param_groups[:1]}
        return worst, str(main), float(before["embedding.word_embeddings.weight"].std())


@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-7), ("bfloat16", 1e-3)])
def test_weight_decay_is_for_matrices(distributed: bool, dtype: str, tolerance: float) -> None:
    for worst, main, spread in run_ranks(2, one_step, distributed, dtype):
        assert worst <= tolerance
        assert main == "torch.float32"
        assert spread > 0.01


def test_no_group_outlives_its_ranks() -> None:
    with single_rank(ParallelConfig()):
        assert held_groups()
    assert held_groups() == set()


def held_groups() -> set[str]:
    names = vars(parallel_state).items()
    return {name for name, value in names if isinstance(value, dist.ProcessGroup)}
