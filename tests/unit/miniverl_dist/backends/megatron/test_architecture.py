"""Reading config.json files, the tensors they mean, and the layouts they allow."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.backends.megatron.architecture import (
    Architecture,
    ExpertShape,
    LinearAttentionShape,
    hf_parameters,
    read_architecture,
)
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.errors import ConfigError
from tests.support.hf_models import (
    CONFIGS,
    MODEL_TYPES,
    hf_tensors,
    load_hf_model,
    tiny_architecture,
    write_hf_model,
)


def fields_of(model_type: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / f"tiny_{model_type}.json").read_text())
    return found


def written(tmp_path: Path, fields: object) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    return path


def test_reads_a_dense_model() -> None:
    assert read_architecture(CONFIGS / "tiny_qwen3.json") == Architecture(
        model_type="qwen3",
        vocab_size=1024,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_size=128,
        layer_kinds=("full_attention",) * 4,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        rotary_fraction=1.0,
        max_positions=16_384,
        tie_embeddings=True,
    )


def test_reads_a_hybrid() -> None:
    found = read_architecture(CONFIGS / "tiny_qwen3_5_moe.json")
    assert found.layer_kinds == ("linear_attention",) * 3 + ("full_attention",)
    assert found.experts == ExpertShape(8, 2, 32, 48, normalize_weights=True)
    assert found.linear == LinearAttentionShape(4, 8, 8, 8, 4)
    assert (found.rotary_fraction, found.tie_embeddings, found.ffn_size) == (0.25, False, 0)


def test_a_multimodal_config_counts_as_its_text_part(tmp_path: Path) -> None:
    text = fields_of("qwen3_5_moe")
    outer = {"model_type": "qwen3_5_moe", "text_config": text, "vision_config": {"depth": 2}}
    assert read_architecture(written(tmp_path, outer)) == read_architecture(
        CONFIGS / "tiny_qwen3_5_moe.json"
    )


@pytest.mark.parametrize("theta", [{"rope_theta": 5e6}, {"rope_parameters": {"rope_theta": 5e6}}])
def test_the_rotary_base_may_stand_in_two_places(tmp_path: Path, theta: dict[str, Any]) -> None:
    fields = fields_of("qwen3")
    del fields["rope_theta"]
    assert read_architecture(written(tmp_path, fields | theta)).rope_theta == 5e6


def test_layer_kinds_follow_from_an_interval(tmp_path: Path) -> None:
    fields = fields_of("qwen3_5_moe") | {"full_attention_interval": 2}
    del fields["layer_types"]
    kinds = read_architecture(written(tmp_path, fields)).layer_kinds
    assert kinds == ("linear_attention", "full_attention") * 2


@pytest.mark.parametrize(
    ("model_type", "change", "told"),
    [
        ("qwen3", {"model_type": "llama"}, "model_type is 'llama', expected one of qwen3,"),
        ("qwen3", {"hidden_size": None}, "hidden_size is None, expected a positive integer"),
        ("qwen3", {"hidden_size": "64"}, "hidden_size is '64', expected a positive integer"),
        ("qwen3", {"head_dim": True}, "head_dim is True, expected a positive integer"),
        ("qwen3", {"head_dim": 15}, "head_dim is 15, expected a size of which an even number"),
        ("qwen3", {"rms_norm_eps": 0}, "rms_norm_eps is 0, expected a positive number"),
        ("qwen3", {"tie_word_embeddings": 1}, "tie_word_embeddings is 1, expected true or false"),
        ("qwen3", {"rope_theta": None}, "rope_theta is None, expected a positive number"),
        ("qwen3", {"attention_bias": True}, "attention_bias is True, expected False"),
        ("qwen3", {"use_sliding_window": True}, "use_sliding_window is True, expected False"),
        ("qwen3", {"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling.rope_type is 'yarn'"),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, "layer_types is ['linear_attention'"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2, expected 1"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0], expected []"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "is 9, expected at most num_experts = 8"),
        ("qwen3_5_moe", {"layer_types": ["full_attention"]}, "num_hidden_layers = 4 entries"),
        ("qwen3_5_moe", {"linear_num_value_heads": 6}, "expected a multiple of linear_num_key"),
        ("qwen3_5_moe", {"rope_parameters": 7}, "rope_parameters. is 7, expected a JSON object"),
    ],
)
def test_an_unusable_field_is_named(
    tmp_path: Path, model_type: str, change: dict[str, Any], told: str
) -> None:
    path = written(tmp_path, fields_of(model_type) | change)
    with pytest.raises(ConfigError) as error:
        read_architecture(path)
    assert str(path) in str(error.value)
    assert told in str(error.value)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_a_file_without_an_object_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_architecture(tmp_path / "config.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_architecture(tmp_path / "config.json")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_the_config_it_writes_reads_back(tmp_path: Path, model_type: str) -> None:
    arch = tiny_architecture(model_type)
    assert read_architecture(written(tmp_path, arch.hf_config())) == arch


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_tensors_are_those_that_transformers_writes(tmp_path: Path, model_type: str) -> None:
    arch = tiny_architecture(model_type)
    folder = write_hf_model(arch, tmp_path)
    stored = {name: tuple(tensor.shape) for name, tensor in hf_tensors(folder).items()}
    assert hf_parameters(arch) == stored
    parameters = load_hf_model(folder).parameters()
    assert arch.num_parameters == sum(p.numel() for p in parameters)


def test_active_parameters_leave_idle_experts_out() -> None:
    arch = tiny_architecture("qwen3_moe")
    # 6 of 8 experts in each of 4 layers: three matrices of 48 by 64.
    assert arch.num_parameters - arch.num_active_parameters == 6 * 4 * 3 * 48 * 64
    dense = tiny_architecture("qwen3")
    assert dense.num_active_parameters == dense.num_parameters


def test_the_reference_student_is_a_35b_a3b(tmp_path: Path) -> None:
    from transformers import Qwen3_5MoeTextConfig

    fields = Qwen3_5MoeTextConfig(rope_parameters={"rope_theta": 1e7, "rope_type": "default"})
    arch = read_architecture(written(tmp_path, fields.to_dict()))
    assert 34e9 < arch.num_parameters < 36e9
    assert 2.5e9 < arch.num_active_parameters < 4e9
    layout = ParallelConfig(tensor=2, pipeline=2, context=2, expert=4, sequence=True)
    assert arch.problem(layout) is None


@pytest.mark.parametrize(
    ("model_type", "layout", "told"),
    [
        ("qwen3", {"tensor": 4, "sequence": True}, "2 key/value heads do not divide by tensor = 4"),
        ("qwen3", {"tensor": 3}, "4 attention heads do not divide by tensor = 3"),
        ("qwen3", {"pipeline": 3}, "4 layers do not divide by pipeline = 3"),
        ("qwen3", {"expert": 2}, "a qwen3 model has no experts"),
        ("qwen3", {"expert_tensor": 2}, "a qwen3 model has no experts"),
        ("qwen3_moe", {"expert": 3}, "8 experts do not divide by expert = 3"),
        ("qwen3_moe", {"expert_tensor": 5}, "48 expert ffn size do not divide"),
        ("qwen3_moe", {"tensor": 2}, "need sequence: true"),
        ("qwen3_5_moe", {"context": 8}, "4 linear key heads do not divide by tensor * context = 8"),
    ],
)
def test_a_layout_that_does_not_fit_is_told(
    model_type: str, layout: dict[str, Any], told: str
) -> None:
    found = tiny_architecture(model_type).problem(ParallelConfig(**layout))
    assert found is not None
    assert told in found


@pytest.mark.parametrize(
    ("model_type", "layout"),
    [
        ("qwen3", {"tensor": 2, "pipeline": 2, "context": 2}),
        ("qwen3_moe", {"tensor": 2, "sequence": True, "expert": 4, "expert_tensor": 2}),
        ("qwen3_5_moe", {"tensor": 2, "sequence": True, "context": 2, "expert": 8, "pipeline": 4}),
    ],
)
def test_layouts_that_fit(model_type: str, layout: dict[str, Any]) -> None:
    assert tiny_architecture(model_type).problem(ParallelConfig(**layout)) is None
