"""What a server says of its parameters: recorded digests of a real SGLang 0.5.23, and changes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miniverl_dist.backends.megatron.architecture import (
    Architecture,
    hf_parameters,
    read_architecture,
)
from miniverl_dist.errors import PublishError
from rollout_server.engines.sglang_layout import (
    HeldWeights,
    check_changes,
    check_exactly,
    check_tensors,
    exact_digests,
    held_name,
    is_known_exactly,
)

ROOT = Path(__file__).parents[4]
REPLIES = ROOT / "tests" / "fixtures" / "sglang_replies"
MODEL_TYPES = ("qwen3", "qwen3_moe")


def architecture(model_type: str) -> Architecture:
    """That of the recording: one layer, 290 rows (30 more make a multiple of 64)."""
    arch = read_architecture(ROOT / "configs" / "models" / f"tiny_{model_type}.json")
    return replace(arch.with_vocab_size(290), layer_kinds=("full_attention",))


def weights(arch: Architecture) -> dict[str, NDArray[Any]]:
    """Those of the recording."""
    found = {}
    for index, (name, shape) in enumerate(hf_parameters(arch).items()):
        values = (np.arange(np.prod(shape), dtype=np.int64) * 7 + index * 13) % 101 - 50
        found[name] = (values / 256).astype(np.float32).reshape(shape)
    return found


def recorded(model_type: str) -> HeldWeights:
    reply = json.loads((REPLIES / f"checker_{model_type}.json").read_text())
    return HeldWeights(tuple(rank["checksums"] for rank in reply["ranks"]))


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_digests_are_those_of_a_real_server(model_type: str) -> None:
    arch = architecture(model_type)
    assert is_known_exactly(arch)
    held = recorded(model_type)
    assert exact_digests(arch, weights(arch)) == held.ranks[0]
    check_exactly(held, exact_digests(arch, weights(arch)), "engine")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_one_wrong_value_of_any_tensor_shows(model_type: str) -> None:
    arch = architecture(model_type)
    held, good = recorded(model_type), weights(arch)
    for name, array in good.items():
        spoilt = array.copy()
        spoilt.reshape(-1)[0] += np.float32(1 / 256)
        expected = exact_digests(arch, good | {name: spoilt})
        with pytest.raises(PublishError, match=f"1 of {len(expected)} .*{held_name(name)}"):
            check_exactly(held, expected, "engine")


def test_swapped_tensors_show() -> None:
    arch = architecture("qwen3")
    good = weights(arch)
    gate, up = "model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.up_proj.weight"
    expected = exact_digests(arch, good | {gate: good[up], up: good[gate]})
    with pytest.raises(PublishError, match="gate_up_proj"):
        check_exactly(recorded("qwen3"), expected, "engine")


def test_a_parameter_that_is_not_there_shows() -> None:
    arch = architecture("qwen3")
    held = dict(recorded("qwen3").ranks[0])
    held.pop("model.norm.weight")
    with pytest.raises(PublishError, match=r"model\.norm\.weight"):
        check_exactly(HeldWeights((held,)), exact_digests(arch, weights(arch)), "engine")


def test_layouts_that_are_not_known_are_not_guessed() -> None:
    assert not is_known_exactly(replace(architecture("qwen3"), ffn_size=100))
    hybrid = read_architecture(ROOT / "configs" / "models" / "tiny_qwen3_5_moe.json")
    assert not is_known_exactly(hybrid)


def test_tensors_that_do_not_fit_are_named() -> None:
    arch = architecture("qwen3")
    good, name = weights(arch), "model.layers.0.self_attn.q_proj.weight"
    check_tensors(arch, good, "float32")
    cases: list[tuple[dict[str, NDArray[Any]], str]] = [
        ({**good, "model.nope": good[name]}, r"model\.nope"),
        ({key: value for key, value in good.items() if key != name}, "lack 1 .*q_proj"),
        (good | {name: good[name].T.copy()[:, :3]}, "q_proj.*float32"),
        (good | {name: good[name].astype(np.float16)}, "float16"),
    ]
    for tensors, message in cases:
        with pytest.raises(PublishError, match=message):
            check_tensors(arch, tensors, "float32")
    with pytest.raises(PublishError, match="bfloat16"):
        check_tensors(arch, good, "bfloat16")


def ranks(*values: dict[str, str]) -> HeldWeights:
    return HeldWeights(values)


FORMER = ranks({"a.qkv_proj.w": "1", "b": "1"}, {"a.qkv_proj.w": "2", "b": "2"})


@pytest.mark.parametrize(
    ("now", "changed", "is_right"),
    [
        (ranks({"b": "9", "n": "1"}, {"b": "2", "n": "1"}), {"b": True, "n": False}, True),
        (ranks({"b": "1", "n": "1"}, {"b": "1", "n": "1"}), {"b": True, "n": False}, False),
        (ranks({"b": "9", "n": "9"}, {"b": "9", "n": "1"}), {"b": True, "n": False}, False),
        # A parameter of another name must change where everything does.
        (ranks({"b": "9", "n": "9", "x": "9"}, {"b": "1", "n": "1", "x": "1"}), {}, True),
        (ranks({"b": "9", "n": "9", "x": "1"}, {"b": "1", "n": "1", "x": "1"}), {}, False),
    ],
    ids=["as sent", "left out", "another one too", "all changed", "an unknown one did not"],
)
def test_changes(now: HeldWeights, changed: dict[str, bool], is_right: bool) -> None:
    names = now.ranks[0].keys()
    former = ranks(
        dict.fromkeys(names, "1"),
        {"b": "2", "n": "1"} if changed and is_right else dict.fromkeys(names, "1"),
    )
    asked = changed or {"b": True, "n": True}
    if is_right:
        check_changes(now, former, asked, "engine")
    else:
        with pytest.raises(PublishError, match="1 are unexpected"):
            check_changes(now, former, asked, "engine")


def test_a_fused_parameter_changes_with_any_of_its_tensors() -> None:
    names = [f"model.layers.3.self_attn.{part}_proj.weight" for part in "qkv"]
    held = "model.layers.3.self_attn.qkv_proj.weight"
    assert {held_name(name) for name in names} == {held}
    former, now = ranks({held: "1"}), ranks({held: "2"})
    check_changes(now, former, {names[0]: False, names[1]: True, names[2]: False}, "engine")
    with pytest.raises(PublishError):
        check_changes(now, former, dict.fromkeys(names, False), "engine")
