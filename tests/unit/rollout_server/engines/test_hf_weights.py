"""Names on disk and tensors in memory: matched completely or not at all."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
import torch

from miniverl_dist.errors import CheckpointError
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.hf_decoder import empty_model
from rollout_server.engines.hf_weights import fill, held_checksum, matched_views
from tests.support.tiny_hf import ARCHITECTURES, model_folder, plain_model, snapshot

GATE = "model.layers.1.mlp.experts.2.gate_proj.weight"


def model(architecture: str = "qwen3_moe") -> Any:
    return empty_model(model_folder(architecture), dtype="float32", device="cpu")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_model_becomes_the_one_that_transformers_loads(architecture: str) -> None:
    made, sent = model(architecture), snapshot(architecture)
    fill(matched_views(made, sent.tensors), sent.tensors)
    expected = dict(plain_model(architecture).named_parameters())
    found = dict(made.named_parameters())
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def test_the_checksum_is_read_from_the_model() -> None:
    made, sent = model(), snapshot("qwen3_moe")
    views = matched_views(made, sent.tensors)
    fill(views, sent.tensors)
    assert held_checksum(views) == sent.checksum
    made.model.layers[1].mlp.experts.gate_up_proj[2, 0, 0] += 1
    changed = {name: array.copy() for name, array in sent.tensors.items()}
    changed[GATE][0, 0] += 1
    assert held_checksum(views) == weights_checksum(changed)


def test_experts_may_come_fused() -> None:
    made = model()
    fused = {name: p.detach().numpy() for name, p in plain_model("qwen3_moe").named_parameters()}
    views = matched_views(made, fused)
    fill(views, fused)
    assert held_checksum(views) == weights_checksum(fused)


def test_arrays_in_shared_memory_are_taken_without_a_warning() -> None:
    made, tensors = model(), dict(snapshot("qwen3_moe").tensors)
    for name, array in tensors.items():
        tensors[name] = array.copy()
        tensors[name].flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fill(matched_views(made, tensors), tensors)


def without(tensors: dict[str, Any]) -> None:
    del tensors[GATE]


def both_ways(tensors: dict[str, Any]) -> None:
    """Fused and one by one."""
    tensors["model.layers.1.mlp.experts.down_proj"] = np.zeros((4, 32, 16), np.float32)


def one_expert_more(tensors: dict[str, Any]) -> None:
    tensors[GATE.replace(".2.", ".4.")] = tensors[GATE]


def one_layer_more(tensors: dict[str, Any]) -> None:
    tensors[GATE.replace("layers.1", "layers.2")] = tensors[GATE]


def other_shape(tensors: dict[str, Any]) -> None:
    tensors[GATE] = np.ascontiguousarray(tensors[GATE].T)


def other_dtype(tensors: dict[str, Any]) -> None:
    tensors[GATE] = tensors[GATE].astype(np.float64)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (without, r"fill 3584 of the 4096 values of 'model.layers.1.mlp.experts.gate_up_proj'"),
        (both_ways, r"fill 4096 of the 2048 values of 'model.layers.1.mlp.experts.down_proj'"),
        (one_expert_more, r"hold 'model.layers.1.mlp.experts.4.gate_proj.weight', which"),
        (one_layer_more, r"hold 'model.layers.2.mlp.experts.2.gate_proj.weight', which"),
        (other_shape, r"gate_proj.weight' is float32 \(32, 16\), the model has float32 \(16, 32\)"),
        (other_dtype, r"gate_proj.weight' is float64 \(16, 32\), the model has float32"),
    ],
)
def test_a_set_that_does_not_fit_is_refused(spoil: Any, message: str) -> None:
    tensors = dict(snapshot("qwen3_moe").tensors)
    spoil(tensors)
    with pytest.raises(CheckpointError, match=message):
        matched_views(model(), tensors)


def test_a_tied_output_layer_is_one_tensor() -> None:
    tensors = dict(snapshot("qwen3").tensors)
    assert "lm_head.weight" not in tensors
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    with pytest.raises(CheckpointError, match="an output layer that is tied here"):
        matched_views(model("qwen3"), tensors)
