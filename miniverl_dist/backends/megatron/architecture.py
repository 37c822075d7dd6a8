"""What a ``config.json`` of the Qwen3 family describes: sizes, tensor names, layouts that fit.

Torch-free, so that planning and validation need nothing but the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, cast

from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.errors import ConfigError

ModelType = Literal["qwen3", "qwen3_moe", "qwen3_5_moe"]
LayerKind = Literal["full_attention", "linear_attention"]

HF_NAMES: dict[ModelType, tuple[str, str]] = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_5_moe": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
}
"""``model_type`` and class of the text model that transformers loads."""

MODEL_TYPES: dict[str, ModelType] = {
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3_moe",
    "qwen3_5_moe": "qwen3_5_moe",
    "qwen3_5_moe_text": "qwen3_5_moe",
}

REQUIRED: dict[str, object] = {
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "mlp_only_layers": [],
    "use_sliding_window": False,
}
"""Fields that, where they are given, must say this: other values mean modules we do not build."""


@dataclass(frozen=True)
class ExpertShape:
    """Mixture of experts in every layer."""

    num_experts: int
    experts_per_token: int
    ffn_size: int
    """Of one expert."""
    shared_ffn_size: int
    """Of the expert that sees every token behind a gate; 0: there is none."""
    normalize_weights: bool
    """The chosen experts' weights sum to one."""


@dataclass(frozen=True)
class LinearAttentionShape:
    """Gated delta net."""

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    @property
    def key_dim(self) -> int:
        """Of all key heads; queries have the same."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_dim(self) -> int:
        """Of all value heads."""
        return self.num_value_heads * self.value_head_dim


@dataclass(frozen=True)
class Architecture:
    """A decoder of the Qwen3 family."""

    model_type: ModelType
    vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    """Of the dense layers; 0 where every layer has experts."""
    layer_kinds: tuple[LayerKind, ...]
    rms_norm_eps: float
    rope_theta: float
    rotary_fraction: float
    """Share of a head's dimensions that rotary embeddings turn."""
    max_positions: int
    tie_embeddings: bool
    experts: ExpertShape | None = None
    linear: LinearAttentionShape | None = None

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_kinds)

    @property
    def gated_attention(self) -> bool:
        """Queries bring a gate for the attention's output (and norm weights are stored minus 1)."""
        return self.model_type == "qwen3_5_moe"

    @property
    def num_parameters(self) -> int:
        """All weights, tied ones once."""
        return sum(prod(shape) for shape in hf_parameters(self).values())

    @property
    def num_active_parameters(self) -> int:
        """Weights that one token meets: of the routed experts only the chosen ones."""
        if self.experts is None:
            return self.num_parameters
        per_expert = 3 * self.hidden_size * self.experts.ffn_size
        idle = self.experts.num_experts - self.experts.experts_per_token
        return self.num_parameters - self.num_layers * idle * per_expert

    def with_vocab_size(self, vocab_size: int) -> Architecture:
        """The same decoder over another vocabulary."""
        return replace(self, vocab_size=vocab_size)

    def problem(self, parallel: ParallelConfig) -> str | None:
        """Why the weights cannot be laid out so; None when they can."""
        return next((text for fits, text in self._requirements(parallel) if not fits), None)

    def _requirements(self, parallel: ParallelConfig) -> list[tuple[bool, str]]:
        tensor, context = parallel.tensor, parallel.context
        found = [
            _divides("tensor", tensor, "attention heads", self.num_heads),
            _divides("tensor", tensor, "key/value heads", self.num_kv_heads),
            _divides("pipeline", parallel.pipeline, "layers", self.num_layers),
        ]
        if self.ffn_size:
            found.append(_divides("tensor", tensor, "ffn size", self.ffn_size))
        if self.linear is not None:
            name = "tensor * context"
            found += [
                _divides(name, tensor * context, "linear key heads", self.linear.num_key_heads),
                _divides(name, tensor * context, "linear value heads", self.linear.num_value_heads),
            ]
        return found + self._expert_requirements(parallel)

    def _expert_requirements(self, parallel: ParallelConfig) -> list[tuple[bool, str]]:
        experts = self.experts
        if experts is None:
            text = f"a {self.model_type} model has no experts: expert and expert_tensor must be 1"
            return [(parallel.expert == parallel.expert_tensor == 1, text)]
        return [
            _divides("expert", parallel.expert, "experts", experts.num_experts),
            _divides("expert_tensor", parallel.expert_tensor, "expert ffn size", experts.ffn_size),
            _divides("tensor", parallel.tensor, "shared expert ffn size", experts.shared_ffn_size),
            (
                parallel.tensor == 1 or parallel.sequence,
                "experts with tensor > 1 need sequence: true, or every tensor rank would route "
                "the same tokens",
            ),
        ]

    def hf_config(self) -> dict[str, Any]:
        """The ``config.json`` of this decoder, as transformers reads it."""
        model_type, class_name = HF_NAMES[self.model_type]
        config: dict[str, Any] = {
            "architectures": [class_name],
            "attention_bias": False,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "max_position_embeddings": self.max_positions,
            "model_type": model_type,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_parameters": {"rope_theta": self.rope_theta, "rope_type": "default"},
            "tie_word_embeddings": self.tie_embeddings,
            "vocab_size": self.vocab_size,
        }
        if self.ffn_size:
            config["intermediate_size"] = self.ffn_size
        if self.rotary_fraction != 1:
            config["rope_parameters"]["partial_rotary_factor"] = self.rotary_fraction
        return config | self._hf_experts() | self._hf_linear()

    def _hf_experts(self) -> dict[str, Any]:
        if self.experts is None:
            return {}
        found: dict[str, Any] = {
            "moe_intermediate_size": self.experts.ffn_size,
            "num_experts": self.experts.num_experts,
            "num_experts_per_tok": self.experts.experts_per_token,
        }
        if self.model_type == "qwen3_moe":
            extra = {"decoder_sparse_step": 1, "norm_topk_prob": self.experts.normalize_weights}
            return found | extra | {"mlp_only_layers": []}
        return found | {"shared_expert_intermediate_size": self.experts.shared_ffn_size}

    def _hf_linear(self) -> dict[str, Any]:
        if self.linear is None:
            return {}
        return {
            "layer_types": list(self.layer_kinds),
            "linear_conv_kernel_dim": self.linear.conv_kernel,
            "linear_key_head_dim": self.linear.key_head_dim,
            "linear_num_key_heads": self.linear.num_key_heads,
            "linear_num_value_heads": self.linear.num_value_heads,
            "linear_value_head_dim": self.linear.value_head_dim,
        }


def _divides(name: str, ranks: int, what: str, count: int) -> tuple[bool, str]:
    """Whether ``count`` splits evenly over ``ranks``, and what to say if not."""
    return count % ranks == 0, f"{count} {what} do not divide by {name} = {ranks}"


def hf_parameters(arch: Architecture) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor of the Hugging Face folder, experts one by one."""
    hidden = arch.hidden_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (arch.vocab_size, hidden)}
    for index, kind in enumerate(arch.layer_kinds):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
        }
        layer |= _attention(arch) if kind == "full_attention" else _linear_attention(arch)
        layer |= _feed_forward(arch)
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (hidden,)
    if not arch.tie_embeddings:
        shapes["lm_head.weight"] = (arch.vocab_size, hidden)
    return shapes


def _attention(arch: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, dim = arch.hidden_size, arch.head_dim
    queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim
    return {
        "self_attn.q_proj.weight": (queries * (2 if arch.gated_attention else 1), hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (dim,),
        "self_attn.k_norm.weight": (dim,),
    }


def _linear_attention(arch: Architecture) -> dict[str, tuple[int, ...]]:
    linear, hidden = arch.linear, arch.hidden_size
    if linear is None:
        raise ConfigError(f"a {arch.model_type} model with linear layers needs their sizes")
    channels = 2 * linear.key_dim + linear.value_dim
    return {
        "linear_attn.in_proj_qkv.weight": (channels, hidden),
        "linear_attn.in_proj_z.weight": (linear.value_dim, hidden),
        "linear_attn.in_proj_b.weight": (linear.num_value_heads, hidden),
        "linear_attn.in_proj_a.weight": (linear.num_value_heads, hidden),
        "linear_attn.conv1d.weight": (channels, 1, linear.conv_kernel),
        "linear_attn.A_log": (linear.num_value_heads,),
        "linear_attn.dt_bias": (linear.num_value_heads,),
        "linear_attn.norm.weight": (linear.value_head_dim,),
        "linear_attn.out_proj.weight": (hidden, linear.value_dim),
    }


def _feed_forward(arch: Architecture) -> dict[str, tuple[int, ...]]:
    hidden, experts = arch.hidden_size, arch.experts
    if experts is None:
        return _gated_mlp("mlp", hidden, arch.ffn_size)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (experts.num_experts, hidden)}
    for index in range(experts.num_experts):
        shapes |= _gated_mlp(f"mlp.experts.{index}", hidden, experts.ffn_size)
    if experts.shared_ffn_size:
        shapes |= _gated_mlp("mlp.shared_expert", hidden, experts.shared_ffn_size)
        shapes["mlp.shared_expert_gate.weight"] = (1, hidden)
    return shapes


def _gated_mlp(prefix: str, hidden: int, ffn: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (ffn, hidden),
        f"{prefix}.up_proj.weight": (ffn, hidden),
        f"{prefix}.down_proj.weight": (hidden, ffn),
    }


class _Fields:
    """Typed access to the fields of a JSON object, with errors that name file and field."""

    def __init__(self, path: Path, fields: object, where: str = "") -> None:
        self.path, self.where = path, where
        if not isinstance(fields, dict):
            raise self.error("", fields, "a JSON object")
        self.fields: dict[str, Any] = fields

    def error(self, name: str, found: object, expected: str) -> ConfigError:
        field = f"{self.where}{name}" or "the file"
        return ConfigError(f"{self.path}: {field} is {found!r}, expected {expected}")

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive integer."""
        found = self.fields.get(name, default)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise self.error(name, found, "a positive integer")
        return found

    def number(self, name: str, default: float | None = None) -> float:
        """A positive number."""
        found = self.fields.get(name, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not found > 0:
            raise self.error(name, found, "a positive number")
        return float(found)

    def flag(self, name: str, default: bool) -> bool:
        found = self.fields.get(name, default)
        if not isinstance(found, bool):
            raise self.error(name, found, "true or false")
        return found

    def sub(self, name: str) -> _Fields:
        """The object under ``name``; an empty one where it is missing or null."""
        return _Fields(self.path, self.fields.get(name) or {}, f"{self.where}{name}.")


def read_architecture(config_json: Path) -> Architecture:
    """Read what a ``config.json`` describes.

    A multimodal config counts as its ``text_config``.

    Raises:
        ConfigError: no JSON, another model type, or a field that is missing, malformed or means a
            module that is not built here; the message names file and field.
    """
    try:
        data = json.loads(config_json.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{config_json}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise ConfigError(f"{config_json}: not valid JSON: {error}") from error
    fields = _Fields(config_json, data)
    if "text_config" in fields.fields:
        fields = fields.sub("text_config")
    return _architecture(fields)


def _architecture(fields: _Fields) -> Architecture:
    model_type = MODEL_TYPES.get(str(fields.fields.get("model_type")))
    if model_type is None:
        expected = f"one of {', '.join(MODEL_TYPES)}"
        raise fields.error("model_type", fields.fields.get("model_type"), expected)
    _check_required(fields)
    theta, rotary_fraction = _rotary(fields, 0.25 if model_type == "qwen3_5_moe" else 1.0)
    num_heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim")
    if (rotated := int(head_dim * rotary_fraction)) % 2 or not rotated:
        raise fields.error("head_dim", head_dim, "a size of which an even number is rotated")
    layer_kinds = _layer_kinds(fields, model_type)
    return Architecture(
        model_type=model_type,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=fields.integer("hidden_size"),
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        ffn_size=fields.integer("intermediate_size") if model_type == "qwen3" else 0,
        layer_kinds=layer_kinds,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rotary_fraction=rotary_fraction,
        max_positions=fields.integer("max_position_embeddings", 32_768),
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        experts=_experts(fields, model_type),
        linear=_linear(fields) if "linear_attention" in layer_kinds else None,
    )


def _check_required(fields: _Fields) -> None:
    for name, expected in REQUIRED.items():
        found = fields.fields.get(name, expected)
        if found != expected:
            raise fields.error(name, found, f"{expected!r} (nothing else is built here)")


def _rotary(fields: _Fields, default_fraction: float) -> tuple[float, float]:
    """Base and rotated share of a head; both may stand in ``rope_parameters`` or beside it."""
    for name in ("rope_parameters", "rope_scaling"):
        rope = fields.sub(name)
        kind = rope.fields.get("rope_type", rope.fields.get("type", "default"))
        if kind not in ("default", "mrope"):
            raise rope.error("rope_type", kind, "'default' (no scaled rotary embeddings here)")
    rope = fields.sub("rope_parameters")
    theta = rope if "rope_theta" in rope.fields else fields
    fraction = rope if "partial_rotary_factor" in rope.fields else fields
    return theta.number("rope_theta"), fraction.number("partial_rotary_factor", default_fraction)


def _layer_kinds(fields: _Fields, model_type: ModelType) -> tuple[LayerKind, ...]:
    num_layers = fields.integer("num_hidden_layers")
    found = fields.fields.get("layer_types")
    if found is None:
        # The last layer of every interval has full attention.
        interval = 1
        if model_type == "qwen3_5_moe":
            interval = fields.integer("full_attention_interval", 4)
        return tuple(
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(num_layers)
        )
    allowed = {"full_attention"} | ({"linear_attention"} if model_type == "qwen3_5_moe" else set())
    if not isinstance(found, list) or len(found) != num_layers or set(found) - allowed:
        expected = f"num_hidden_layers = {num_layers} entries, each {' or '.join(sorted(allowed))}"
        raise fields.error("layer_types", found, expected)
    return tuple(cast("list[LayerKind]", found))


def _experts(fields: _Fields, model_type: ModelType) -> ExpertShape | None:
    if model_type == "qwen3":
        return None
    hybrid = model_type == "qwen3_5_moe"
    # transformers has written the number under both names.
    name = "num_experts" if "num_experts" in fields.fields else "num_local_experts"
    num_experts, chosen = fields.integer(name), fields.integer("num_experts_per_tok")
    if chosen > num_experts:
        raise fields.error("num_experts_per_tok", chosen, f"at most {name} = {num_experts}")
    return ExpertShape(
        num_experts=num_experts,
        experts_per_token=chosen,
        ffn_size=fields.integer("moe_intermediate_size"),
        shared_ffn_size=fields.integer("shared_expert_intermediate_size") if hybrid else 0,
        normalize_weights=hybrid or fields.flag("norm_topk_prob", False),
    )


def _linear(fields: _Fields) -> LinearAttentionShape:
    linear = LinearAttentionShape(
        num_key_heads=fields.integer("linear_num_key_heads"),
        num_value_heads=fields.integer("linear_num_value_heads"),
        key_head_dim=fields.integer("linear_key_head_dim"),
        value_head_dim=fields.integer("linear_value_head_dim"),
        conv_kernel=fields.integer("linear_conv_kernel_dim"),
    )
    if linear.num_value_heads % linear.num_key_heads:
        expected = f"a multiple of linear_num_key_heads = {linear.num_key_heads}"
        raise fields.error("linear_num_value_heads", linear.num_value_heads, expected)
    return linear
