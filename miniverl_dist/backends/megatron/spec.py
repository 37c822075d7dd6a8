"""An ``Architecture`` as megatron's ``TransformerConfig`` and layer specs."""

from __future__ import annotations

import copy
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
    get_gated_delta_net_module_spec,
)
from megatron.core.models.gpt.gpt_layer_specs import get_mlp_module_spec_for_backend
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import (
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import (
    TransformerLayer,
    TransformerLayerSubmodules,
    get_transformer_layer_offset,
)
from torch.nn import functional

from miniverl_dist.backends.megatron import torch_modules
from miniverl_dist.backends.megatron.architecture import Architecture, LayerKind
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.roles import MegatronModelConfig

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def transformer_config(arch: Architecture, model: MegatronModelConfig) -> TransformerConfig:
    """Sizes, layout, dtype and recomputation in megatron's terms; no dropout, no fused kernels."""
    dtype = DTYPES[model.dtype]
    return TransformerConfig(
        num_layers=arch.num_layers,
        # Microbatches differ in shape, so stages tell each other what they send (see data.py).
        variable_seq_lengths=model.parallel.pipeline > 1,
        moe_token_dispatcher_type="alltoall",  # the other one refuses that, in dense models too
        hidden_size=arch.hidden_size,
        num_attention_heads=arch.num_heads,
        num_query_groups=arch.num_kv_heads,
        kv_channels=arch.head_dim,
        # Megatron wants a dense size even where every layer has experts.
        ffn_hidden_size=arch.ffn_size or arch.hidden_size,
        normalization="RMSNorm",
        layernorm_epsilon=arch.rms_norm_eps,
        layernorm_zero_centered_gamma=arch.gated_attention,
        attention_output_gate=arch.gated_attention,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=not torch.cuda.is_available(),
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        transformer_impl="transformer_engine",
        **_layout(model.parallel),
        **_recompute(model),
        **_experts(arch),
        **_linear_attention(arch),
    )


def _layout(parallel: ParallelConfig) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": parallel.tensor,
        "pipeline_model_parallel_size": parallel.pipeline,
        "context_parallel_size": parallel.context,
        "expert_model_parallel_size": parallel.expert,
        "expert_tensor_parallel_size": parallel.expert_tensor,
        "sequence_parallel": parallel.sequence,
    }


def _recompute(model: MegatronModelConfig) -> dict[str, Any]:
    if model.recompute == "none":
        return {}
    if model.recompute == "selective":
        return {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
    return {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }


def _experts(arch: Architecture) -> dict[str, Any]:
    experts = arch.experts
    if experts is None:
        return {}
    found: dict[str, Any] = {
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.experts_per_token,
        "moe_ffn_hidden_size": experts.ffn_size,
        # Softmax over the chosen experts alone is softmax over all, normalised afterwards.
        "moe_router_pre_softmax": not experts.normalize_weights,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "moe_aux_loss_coeff": 0.0,
        "moe_grouped_gemm": True,
    }
    if experts.shared_ffn_size:
        found["moe_shared_expert_intermediate_size"] = experts.shared_ffn_size
        found["moe_shared_expert_gate"] = True
    return found


def _linear_attention(arch: Architecture) -> dict[str, Any]:
    linear = arch.linear
    if linear is None:
        return {}
    return {
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": [int(kind == "linear_attention") for kind in arch.layer_kinds],
        "linear_num_key_heads": linear.num_key_heads,
        "linear_num_value_heads": linear.num_value_heads,
        "linear_key_head_dim": linear.key_head_dim,
        "linear_value_head_dim": linear.value_head_dim,
        "linear_conv_kernel_dim": linear.conv_kernel,
        # Chooses megatron's torch code for the delta rule instead of kernels.
        "deterministic_mode": not torch_modules.have_linear_attention_kernels(),
    }


def block_spec(arch: Architecture, config: TransformerConfig) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage, from Transformer Engine or from ``torch_modules``."""
    provider = _provider()
    first = get_transformer_layer_offset(config)
    kinds = arch.layer_kinds[first : first + get_num_layers_to_build(config)]
    if "linear_attention" in kinds:
        torch_modules.allow_linear_attention_without_kernels()
    return TransformerBlockSubmodules(
        layer_specs=[_layer_spec(kind, config, provider) for kind in kinds],
        layer_norm=provider.layer_norm(rms_norm=True),
    )


def _provider() -> BackendSpecProvider:
    if not HAVE_TE:
        return torch_modules.TorchSpecProvider()
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

    return TESpecProvider()


def _layer_spec(
    kind: LayerKind, config: TransformerConfig, provider: BackendSpecProvider
) -> ModuleSpec:
    """Norms before attention and before a dense MLP are fused into the linear layer behind."""
    linear = kind == "linear_attention"
    attention = _delta_net(config, provider) if linear else _self_attention(provider)
    mlp = get_mlp_module_spec_for_backend(
        provider,
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
    )
    dense = config.num_moe_experts is None
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention,
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=IdentityOp if dense else provider.layer_norm(rms_norm=True),
            mlp=mlp,
            mlp_bda=get_bias_dropout_add,
        ),
    )


def _self_attention(provider: BackendSpecProvider) -> ModuleSpec:
    norm = provider.layer_norm(rms_norm=True, for_qk=True)
    return ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=provider.column_parallel_layer_norm_linear(),
            core_attention=provider.core_attention(),
            linear_proj=provider.row_parallel_linear(),
            q_layernorm=norm,
            k_layernorm=norm,
        ),
    )


def _delta_net(config: TransformerConfig, provider: BackendSpecProvider) -> ModuleSpec:
    """Gated delta net whose output norm is stored as it is, while the model's others are minus 1.

    The checkpoints hold them so too. Taking 1 off and putting it back would lose bits.
    """
    spec = get_gated_delta_net_module_spec(config, provider)
    norm = spec.submodules.out_norm

    class _PlainNorm:
        def __new__(cls, *, config: TransformerConfig, **kwargs: object) -> Any:  # noqa: ANN401
            plain = copy.copy(config)
            plain.layernorm_zero_centered_gamma = False
            return norm(config=plain, **kwargs)

    spec.submodules.out_norm = _PlainNorm
    return spec
