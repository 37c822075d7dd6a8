# ruff: noqa: E402 - without megatron nothing below can be imported
"""Logits of every architecture in every layout against transformers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from tests.support.requirements import require_megatron

require_megatron()

from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from miniverl_dist.backends.megatron.hf_folder import HFFolder
from miniverl_dist.backends.megatron.setup import (
    MegatronModel,
    build_model,
    first_vocab_row,
    forward_hidden,
    logits,
    output_weight,
)
from miniverl_dist.backends.megatron.weights import load_hf
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.roles import MegatronModelConfig
from tests.support.hf_models import MODEL_TYPES, hf_logits, tiny_architecture, write_hf_model
from tests.support.layouts import FOUR_RANKS, TWO_RANKS, WORLDS
from tests.support.ranks import Rank, run_ranks

TOLERANCE = 1e-5
TOKENS = np.random.default_rng(0).integers(0, 97, (2, 16))
RECOMPUTE = ("none", "selective", "full")

Cases = dict[tuple[str, str], float]
FITTING = [
    (model_type, name)
    for model_type in MODEL_TYPES
    for name, parallel in (TWO_RANKS | FOUR_RANKS).items()
    if tiny_architecture(model_type).problem(parallel) is None
]


def config(parallel: ParallelConfig, **fields: Any) -> MegatronModelConfig:
    return MegatronModelConfig(
        kind="megatron", config=Path("unused.json"), parallel=parallel, **fields
    )


def loaded(model_type: str, folder: Path, parallel: ParallelConfig, **fields: Any) -> MegatronModel:
    model = build_model(tiny_architecture(model_type), config(parallel, **fields), seed=1)
    load_hf(model, HFFolder(folder).read)
    return model


def zig_zag(array: NDArray[Any]) -> NDArray[Any]:
    """This context rank's chunks r and 2C - 1 - r of axis 1."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    chunks = np.split(array, 2 * size, axis=1)
    return np.concatenate([chunks[rank], chunks[2 * size - 1 - rank]], axis=1)


def own_logits(model: MegatronModel) -> NDArray[np.float32] | None:
    """[B, S_local, V_local] through megatron's schedule; None but on the last stage."""
    token_ids = torch.from_numpy(zig_zag(TOKENS))

    def step(_: object, __: object) -> tuple[torch.Tensor, Any]:
        hidden = forward_hidden(model, token_ids, token_ids)

        def project(output: torch.Tensor, non_loss_data: bool = False) -> torch.Tensor:
            return (output @ output_weight(model).T).transpose(0, 1)

        return hidden, project

    found = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=None,
        model=[model.ddp],
        num_microbatches=1,
        seq_length=TOKENS.shape[1],
        micro_batch_size=TOKENS.shape[0],
        forward_only=True,
        collect_non_loss_data=True,
    )
    return found[0].detach().float().numpy() if model.is_last_stage else None


def difference(model: MegatronModel, expected: NDArray[np.float32]) -> NDArray[np.float32]:
    """To the expected logits of this rank; empty where it has none."""
    found = own_logits(model)
    if found is None:
        return np.zeros(0, dtype=np.float32)
    first = first_vocab_row(model)
    wanted = zig_zag(expected)[:, :, first : first + found.shape[-1]]
    assert found.shape == wanted.shape
    return found - wanted


def measure(
    rank: Rank,
    layouts: Mapping[str, ParallelConfig],
    folders: Mapping[str, Path],
    expected: Mapping[str, NDArray[np.float32]],
) -> Cases:
    errors: Cases = {}
    for model_type, name in FITTING:
        if name in layouts:
            with rank.layout(layouts[name]):
                model = loaded(model_type, folders[model_type], layouts[name])
                error = np.abs(difference(model, expected[model_type]))
                errors[model_type, name] = float(error.max(initial=0.0))
    return errors


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hf")
    return {kind: write_hf_model(tiny_architecture(kind), root / kind) for kind in MODEL_TYPES}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, NDArray[np.float32]]:
    return {kind: hf_logits(folder, TOKENS) for kind, folder in folders.items()}


@pytest.fixture(scope="module")
def errors(folders: dict[str, Path], expected: dict[str, NDArray[np.float32]]) -> list[Cases]:
    found: list[Cases] = []
    for world, layouts in WORLDS:
        found += run_ranks(world, measure, layouts, folders, expected)
    return found


@pytest.mark.parametrize(("model_type", "layout"), FITTING)
def test_logits_are_those_of_transformers(
    errors: list[Cases], model_type: str, layout: str
) -> None:
    found = [case[model_type, layout] for case in errors if (model_type, layout) in case]
    assert len(found) in (2, 4)
    assert max(found) <= TOLERANCE


def gradients_under(
    rank: Rank, model_type: str, folder: Path, recompute: Any
) -> dict[str, NDArray[np.float32]]:
    with rank.layout(ParallelConfig()):
        model = loaded(model_type, folder, ParallelConfig(), recompute=recompute)
        token_ids = torch.from_numpy(TOKENS)
        logits(model, token_ids, token_ids).logsumexp(-1).square().sum().backward()
        return {n: p.main_grad.numpy() for n, p in model.module.named_parameters()}


def all_gradients(
    rank: Rank, model_type: str, folder: Path
) -> list[dict[str, NDArray[np.float32]]]:
    return [gradients_under(rank, model_type, folder, recompute) for recompute in RECOMPUTE]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_recomputation_changes_no_gradient(folders: dict[str, Path], model_type: str) -> None:
    [(kept, *recomputed)] = run_ranks(1, all_gradients, model_type, folders[model_type])
    # Some expert may get no token.
    assert all(np.abs(g).max() > 0 for name, g in kept.items() if ".experts." not in name)
    for found in recomputed:
        for name, gradient in kept.items():
            np.testing.assert_array_equal(found[name], gradient, err_msg=name)


def hf_gradients(folder: Path) -> float:
    from tests.support.hf_models import load_hf_model

    model = load_hf_model(folder)
    model(torch.from_numpy(TOKENS)).logits.logsumexp(-1).square().sum().backward()
    squares = [float(p.grad.double().square().sum()) for p in model.parameters()]
    return float(np.sqrt(sum(squares)))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_gradient_norm_is_that_of_transformers(folders: dict[str, Path], model_type: str) -> None:
    [gradients] = run_ranks(1, gradients_under, model_type, folders[model_type], "none")
    squares = [float((g.astype(np.float64) ** 2).sum()) for g in gradients.values()]
    assert np.sqrt(sum(squares)) == pytest.approx(hf_gradients(folders[model_type]), rel=1e-5)


def bf16_error(
    rank: Rank, model_type: str, folder: Path, expected: NDArray[np.float32]
) -> tuple[str, float]:
    with rank.layout(TWO_RANKS["TP2+SP"]):
        model = loaded(model_type, folder, TWO_RANKS["TP2+SP"], dtype="bfloat16")
        error = difference(model, expected)
        return str(output_weight(model).dtype), float(np.square(error).mean())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_bfloat16_comes_as_near_as_its_precision(
    folders: dict[str, Path], expected: dict[str, NDArray[np.float32]], model_type: str
) -> None:
    wanted = expected[model_type]
    found = run_ranks(2, bf16_error, model_type, folders[model_type], wanted)
    assert {dtype for dtype, _ in found} == {"torch.bfloat16"}
    # The largest error may be large: a token that changes experts.
    relative = np.sqrt(np.mean([square for _, square in found]) / np.square(wanted).mean())
    assert 1e-4 < relative < 0.1
