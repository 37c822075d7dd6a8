# ruff: noqa: E402 - without megatron nothing below can be imported
"""Megatron without CUDA: it works, and nobody else notices."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.requirements import require_megatron

require_megatron()

from megatron.core import tensor_parallel, utils
from megatron.core.optimizer import optimizer as megatron_optimizer

from miniverl_dist.backends.megatron import cpu_compat
from miniverl_dist.config.cluster import ParallelConfig
from tests.support.hf_models import hf_logits, hf_tensors, tiny_architecture, write_hf_model
from tests.support.ranks import Rank, run_ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here: nothing to do")

FACTORIES = {name: getattr(torch, name) for name in cpu_compat.FACTORIES}
COLLECTIVES = {name: getattr(torch.distributed, name) for name in ("all_gather", "reduce_scatter")}
CUDA = {name: value for name, value in vars(torch.cuda).items() if callable(value)}


@pytest.fixture(autouse=True)
def _installed() -> None:
    cpu_compat.install()


def test_megatron_makes_its_cuda_tensors_on_the_cpu() -> None:
    seen = megatron_optimizer.torch
    assert seen.zeros(2, device="cuda").device.type == "cpu"
    assert seen.tensor([1.0], device=torch.device("cuda")).device.type == "cpu"
    assert seen.arange(3, device="cpu", pin_memory=True).is_pinned() is False
    assert seen.cuda.current_device() == torch.device("cpu")
    assert seen.nn is torch.nn


def test_torch_itself_keeps_its_functions() -> None:
    assert {name: getattr(torch, name) for name in FACTORIES} == FACTORIES
    assert {name: getattr(torch.distributed, name) for name in COLLECTIVES} == COLLECTIVES
    assert {name: getattr(torch.cuda, name) for name in CUDA} == CUDA
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(2, device="cuda")


def test_only_megatron_reads_another_tensor_type() -> None:
    tensor = torch.zeros(2)
    assert tensor.type() == "torch.FloatTensor"
    assert tensor.type(torch.float64).dtype is torch.float64
    namespace = {"__name__": "megatron.core.anything", "tensor": tensor}
    assert eval("tensor.type()", namespace) == "torch.cuda.FloatTensor"


def test_installing_again_changes_nothing() -> None:
    before = {name: getattr(module, "torch", None) for name, module in sys.modules.items()}
    tensor_type = torch.Tensor.type
    cpu_compat.install()
    after = {name: getattr(module, "torch", None) for name, module in sys.modules.items()}
    assert torch.Tensor.type is tensor_type
    assert all(after[name] is found for name, found in before.items() if name in after)
    assert utils.torch is not torch
    assert sys.modules[__name__].torch is torch


def test_random_states_are_those_of_the_cpu() -> None:
    tracker = tensor_parallel.random.CudaRNGStatesTracker()
    tracker.add("there", 5)
    torch.manual_seed(1)
    plain = torch.rand(3)
    torch.manual_seed(1)
    with tracker.fork("there"):
        forked = torch.rand(3)
    assert torch.equal(torch.rand(3), plain)
    assert torch.equal(forked, torch.rand(3, generator=torch.Generator().manual_seed(5)))


def test_transformers_loads_models_as_before(tmp_path: Path) -> None:
    """Replaced factories would leave weights of a loaded model unset or elsewhere."""
    from transformers import AutoModelForCausalLM

    folder = write_hf_model(tiny_architecture("qwen3_5_moe"), tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder)
    stored = hf_tensors(folder)
    state = model.state_dict()
    shared = state.keys() & stored.keys()
    assert len(shared) > 40
    assert all(torch.equal(state[name], stored[name]) for name in shared)
    assert np.isfinite(hf_logits(folder, np.arange(8)[None])).all()


def unequal_parts(rank: Rank) -> tuple[list[float], list[float]]:
    """Rank 0 holds 3 rows, rank 1 holds 1."""
    with rank.layout(ParallelConfig(tensor=2)):
        own = torch.arange(3.0)[:, None] if rank.rank == 0 else torch.full((1, 1), 7.0)
        own.requires_grad_()
        gathered = tensor_parallel.gather_from_sequence_parallel_region(
            own, tensor_parallel_output_grad=True, output_split_sizes=[3, 1]
        )
        weight = torch.tensor([[1.0], [2.0], [3.0], [4.0]]) * (1 + rank.rank)
        (gathered * weight).sum().backward()
        assert own.grad is not None
        return gathered.flatten().tolist(), own.grad.flatten().tolist()


def test_gloo_gathers_unequal_parts_and_sums_their_gradients() -> None:
    found = run_ranks(2, unequal_parts)
    assert [values for values, _ in found] == [[0, 1, 2, 7]] * 2
    # Each rank's use of a row counts: once by rank 0, twice by rank 1.
    assert [gradient for _, gradient in found] == [[3, 6, 9], [12]]
