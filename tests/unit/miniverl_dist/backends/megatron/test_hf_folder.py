"""Hugging Face folders: what is found in them, what is drawn into them, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from miniverl_dist.backends.megatron.architecture import hf_parameters, read_architecture
from miniverl_dist.backends.megatron.hf_folder import (
    CONFIG_FILE,
    INDEX_FILE,
    SINGLE_FILE,
    HFFolder,
    initial_weights,
    write_config,
)
from miniverl_dist.errors import CheckpointError
from tests.support.hf_models import (
    MODEL_TYPES,
    hf_tensors,
    load_hf_model,
    tiny_architecture,
    write_hf_model,
)

ROWS = (slice(1, 3), slice(None))


@pytest.mark.parametrize("shard_size", ["5GB", "100KB"])
def test_reads_slices_of_one_file_and_of_shards(tmp_path: Path, shard_size: str) -> None:
    write_hf_model(tiny_architecture("qwen3"), tmp_path, shard_size=shard_size)
    assert (tmp_path / INDEX_FILE).exists() == (shard_size == "100KB")
    folder = HFFolder(tmp_path)
    for name, stored in hf_tensors(tmp_path).items():
        found = folder.read(name)
        assert tuple(found.shape) == tuple(stored.shape)
        assert torch.equal(found[(slice(1, 3),)], stored[1:3])


def test_reads_the_names_of_a_multimodal_model(tmp_path: Path) -> None:
    weight = torch.randn(4, 6)
    save_file({"model.language_model.embed_tokens.weight": weight}, tmp_path / SINGLE_FILE)
    found = HFFolder(tmp_path).read("model.embed_tokens.weight")
    assert torch.equal(found[ROWS], weight[ROWS])


@pytest.mark.parametrize("prefix", ["model.", "model.language_model."])
def test_reads_one_expert_out_of_a_fused_tensor(tmp_path: Path, prefix: str) -> None:
    """Three experts of ffn size 5 over a hidden size of 4; gate rows before up rows."""
    both, down = torch.randn(3, 10, 4), torch.randn(3, 4, 5)
    experts = f"{prefix}layers.0.mlp.experts."
    stored = {f"{experts}gate_up_proj": both, f"{experts}down_proj": down}
    save_file(stored, tmp_path / SINGLE_FILE)
    folder = HFFolder(tmp_path)
    wanted = {"gate_proj": both[2, :5], "up_proj": both[2, 5:], "down_proj": down[2]}
    for name, expected in wanted.items():
        found = folder.read(f"model.layers.0.mlp.experts.2.{name}.weight")
        assert tuple(found.shape) == tuple(expected.shape)
        assert torch.equal(found[ROWS], expected[ROWS])
        assert torch.equal(found[(slice(None), slice(2, 4))], expected[:, 2:4])
    with pytest.raises(CheckpointError, match="no expert 3"):
        folder.read("model.layers.0.mlp.experts.3.down_proj.weight")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(3)}, tmp_path / SINGLE_FILE)
    with pytest.raises(CheckpointError, match=r"no tensor 'lm_head\.weight' among its 1"):
        HFFolder(tmp_path).read("lm_head.weight")


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        HFFolder(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_hf_model(tiny_architecture("qwen3"), tmp_path, shard_size="100KB")
    file = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]["model.norm.weight"]
    (tmp_path / file).unlink()
    folder = HFFolder(tmp_path)
    with pytest.raises(CheckpointError, match=file):
        folder.read("model.norm.weight")


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    write_hf_model(tiny_architecture("qwen3"), tmp_path)
    content = (tmp_path / SINGLE_FILE).read_bytes()
    (tmp_path / SINGLE_FILE).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: cannot be read"):
        HFFolder(tmp_path)


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": 3}', "{"])
def test_a_malformed_index_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=r"index\.json"):
        HFFolder(tmp_path)


def test_an_index_that_points_into_the_wrong_file_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "one.safetensors")
    (tmp_path / INDEX_FILE).write_text('{"weight_map": {"b": "one.safetensors"}}')
    with pytest.raises(CheckpointError, match="'b'"):
        HFFolder(tmp_path).read("b")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_drawn_weights_are_a_model_that_transformers_runs(tmp_path: Path, model_type: str) -> None:
    arch = tiny_architecture(model_type)
    initial_weights(arch, 7, tmp_path / "drawn")
    stored = hf_tensors(tmp_path / "drawn")
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == hf_parameters(arch)
    assert read_architecture(tmp_path / "drawn" / CONFIG_FILE) == arch
    logits = load_hf_model(tmp_path / "drawn")(torch.arange(12)[None]).logits
    assert torch.isfinite(logits).all()
    assert 0.001 < logits.std() < 1


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_drawn_weights_have_the_distributions_of_transformers(
    tmp_path: Path, model_type: str
) -> None:
    """Means and spreads of every kind of tensor, against a model that transformers draws."""
    from transformers import AutoConfig, AutoModelForCausalLM

    arch = tiny_architecture(model_type)
    initial_weights(arch, 7, tmp_path / "drawn")
    config = AutoConfig.from_pretrained(tmp_path / "drawn")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "theirs")
    theirs = hf_tensors(tmp_path / "theirs")
    for name, tensor in hf_tensors(tmp_path / "drawn").items():
        if tensor.numel() >= 512:
            assert tensor.std().item() == pytest.approx(theirs[name].std().item(), rel=0.2), name
        elif "A_log" not in name and len(tensor.shape) == 1:
            assert torch.equal(tensor, theirs[name]), name


def test_draws_follow_the_seed_and_not_the_order(tmp_path: Path) -> None:
    arch = tiny_architecture("qwen3")
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        initial_weights(arch, seed, tmp_path / name)
    a, b, c = ((tmp_path / name / SINGLE_FILE).read_bytes() for name in "abc")
    assert a == b != c
    initial_weights(arch.with_vocab_size(200), 1, tmp_path / "wider")
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(hf_tensors(tmp_path / "wider")[name], hf_tensors(tmp_path / "a")[name])


def test_large_models_are_drawn_in_shards(tmp_path: Path) -> None:
    arch = tiny_architecture("qwen3")
    initial_weights(arch, 1, tmp_path / "whole")
    initial_weights(arch, 1, tmp_path / "shards", shard_bytes=100_000)
    files = sorted(path.name for path in (tmp_path / "shards").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    whole, shards = hf_tensors(tmp_path / "whole"), hf_tensors(tmp_path / "shards")
    assert all(torch.equal(whole[name], tensor) for name, tensor in shards.items())
    reader = HFFolder(tmp_path / "shards")
    assert all(
        tuple(reader.read(name).shape) == shape for name, shape in hf_parameters(arch).items()
    )


def test_a_finished_folder_is_kept_and_a_broken_draw_is_not(tmp_path: Path) -> None:
    arch = tiny_architecture("qwen3")
    (tmp_path / "drawn.partial").mkdir()
    (tmp_path / "drawn.partial" / "junk").write_text("of an earlier attempt")
    initial_weights(arch, 1, tmp_path / "drawn")
    assert sorted(p.name for p in (tmp_path / "drawn").iterdir()) == [CONFIG_FILE, SINGLE_FILE]
    before = (tmp_path / "drawn" / SINGLE_FILE).read_bytes()
    initial_weights(arch, 2, tmp_path / "drawn")
    assert (tmp_path / "drawn" / SINGLE_FILE).read_bytes() == before


def test_something_else_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "drawn").mkdir()
    (tmp_path / "drawn" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="something else"):
        initial_weights(tiny_architecture("qwen3"), 1, tmp_path / "drawn")
    assert (tmp_path / "drawn" / "notes.txt").read_text() == "mine"


def test_a_config_can_be_written_alone(tmp_path: Path) -> None:
    arch = tiny_architecture("qwen3_moe")
    write_config(arch, tmp_path / "new")
    assert read_architecture(tmp_path / "new" / CONFIG_FILE) == arch
