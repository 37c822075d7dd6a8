"""Plain-torch modules under Transformer Engine's parameter names, where that is not installed.

Megatron's own builders ask a ``BackendSpecProvider`` for the classes of a layer. The provider here
answers with modules that run on any device and whose parameters are called as Transformer Engine's
are, so that weight map and checkpoints do not know the difference.

Shapes: S local sequence, B batch, H hidden, N heads, D head dimension.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch
from megatron.core.dist_checkpointing.utils import replace_prefix_for_sharding
from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch.nn import functional

from miniverl_dist.backends.megatron.device import current_device


def _norm_weight(size: int, config: TransformerConfig) -> torch.nn.Parameter:
    initial = torch.zeros if config.layernorm_zero_centered_gamma else torch.ones
    weight = torch.nn.Parameter(initial(size, dtype=config.params_dtype, device=current_device()))
    # Its gradient covers only this rank's part of the sequence: megatron sums it over TP.
    weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
    return weight


def rms_norm(
    hidden: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
) -> torch.Tensor:
    """RMSNorm over the last dimension, computed in float32, in the dtype of ``hidden``."""
    wide = hidden.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    scale = weight.float() + 1.0 if zero_centered else weight.float()
    return (normed * scale).to(hidden.dtype)


class TorchRMSNorm(torch.nn.Module):
    """RMSNorm with an optionally zero-centred weight."""

    def __init__(
        self,
        config: TransformerConfig,
        hidden_size: int,
        eps: float = 1e-5,
        **_: object,  # what only other norms need
    ) -> None:
        super().__init__()
        self.eps = eps
        self.zero_centered: bool = config.layernorm_zero_centered_gamma
        self.weight = _norm_weight(hidden_size, config)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return rms_norm(hidden, self.weight, self.eps, self.zero_centered)


class TorchLayerNormColumnParallelLinear(ColumnParallelLinear):  # type: ignore[misc]
    """RMSNorm, then a linear layer whose output is split over TP; ``layer_norm_weight`` [H]."""

    def __init__(
        self, input_size: int, output_size: int, *, config: TransformerConfig, **kwargs: object
    ) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        self.layer_norm_weight = _norm_weight(input_size, config)

    def forward(self, hidden: torch.Tensor, *args: object, **kwargs: object) -> Any:  # noqa: ANN401
        """Megatron's ``(output, bias)``."""
        config = self.config
        normed = rms_norm(
            hidden,
            self.layer_norm_weight,
            config.layernorm_epsilon,
            config.layernorm_zero_centered_gamma,
        )
        return super().forward(normed, *args, **kwargs)


class _GroupedLinear(torch.nn.Module):
    """The same linear layer of several experts; expert i has ``weight<i>`` [out, in]."""

    split_axis: ClassVar[int]

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[torch.Tensor], None],
        pg_collection: Any,  # noqa: ANN401 - megatron's type
        **_: object,
    ) -> None:
        super().__init__()
        self.num_gemms, self.groups = num_gemms, pg_collection
        self.use_bias = False
        shape = [output_size, input_size]
        shape[self.split_axis] //= self.groups.expt_tp.size()
        for index in range(num_gemms):
            weight = torch.nn.Parameter(
                torch.empty(shape, dtype=config.params_dtype, device=current_device())
            )
            if config.perform_initialization:
                init_method(weight)
            self._mark(weight, config)
            self.register_parameter(f"weight{index}", weight)

    def _mark(self, weight: Any, config: TransformerConfig) -> None:  # noqa: ANN401
        # False: the gradient is reduced over the expert data-parallel group, not the dense one.
        weight.allreduce = not (
            config.expert_model_parallel_size > 1
            or config.expert_tensor_parallel_size != config.tensor_model_parallel_size
        )
        weight.tensor_model_parallel = self.groups.expt_tp.size() > 1
        weight.partition_dim, weight.partition_stride = self.split_axis, 1

    def forward(
        self,
        tokens: torch.Tensor,
        tokens_per_expert: Any,  # noqa: ANN401 - a list or a tensor
        **_: object,
    ) -> tuple[torch.Tensor, None]:
        """Tokens sorted by expert [T, in] -> [T, out]."""
        if isinstance(tokens_per_expert, torch.Tensor):
            tokens_per_expert = tokens_per_expert.tolist()
        parts = torch.split(tokens, list(tokens_per_expert))
        outputs = [functional.linear(p, getattr(self, f"weight{i}")) for i, p in enumerate(parts)]
        return torch.cat(outputs), None

    def backward_dw(self) -> None:
        """Weight gradients are not delayed here."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: Any = None,  # noqa: ANN401
    ) -> dict[str, Any]:
        """Each expert under its global number, so that EP can change between save and load."""
        sharded: dict[str, Any] = {}
        expert_group = self.groups.ep
        first, total = expert_group.rank() * self.num_gemms, expert_group.size() * self.num_gemms
        for index in range(self.num_gemms):
            name = f"{index}.weight"
            offsets = (*sharded_offsets, (len(sharded_offsets), first + index, total))
            tensors = make_sharded_tensors_for_checkpoint(
                {name: getattr(self, f"weight{index}")},
                "",
                {name: self.split_axis},
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=metadata["dp_cp_group"],
            )
            replace_prefix_for_sharding(tensors, f"{index}.", prefix)
            sharded[f"{prefix}weight{index}"] = tensors[name]
        for tensor in sharded.values():
            tensor.replica_id = (*tensor.replica_id[:2], self.groups.expt_dp.rank())
        return sharded


class TorchColumnParallelGroupedLinear(_GroupedLinear):
    """Outputs split over the expert TP ranks."""

    split_axis = 0


class TorchRowParallelGroupedLinear(_GroupedLinear):
    """Inputs split over the expert TP ranks."""

    split_axis = 1


class TorchAttention(torch.nn.Module):
    """Causal attention of padded batches; under CP, keys and values are gathered.

    A rank of C holds chunks r and 2C - 1 - r of the 2C chunks of the sequence (Transformer Engine's
    order, which levels the work), so its queries see keys before and behind them.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        pg_collection: Any,  # noqa: ANN401 - megatron's type
        softmax_scale: float | None = None,
        **_: object,
    ) -> None:
        super().__init__()
        self.config = config
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: object,
        **__: object,
    ) -> torch.Tensor:
        """[S, B, N, D] queries, keys and values of fewer heads -> [S, B, N * D]."""
        mask = None
        if self.cp_group.size() > 1:
            mask = self._causal_mask(query.shape[0] // 2, query.device)
            key, value = (self._gather(t) for t in (key, value))
        query_heads, key_heads, value_heads = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        context = functional.scaled_dot_product_attention(
            query_heads,
            key_heads,
            value_heads,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return context.permute(2, 0, 1, 3).reshape(*query.shape[:2], -1)

    def _gather(self, tensor: torch.Tensor) -> torch.Tensor:
        gathered: torch.Tensor = gather_from_sequence_parallel_region(
            tensor.contiguous(), tensor_parallel_output_grad=True, group=self.cp_group
        )
        return gathered

    def _causal_mask(self, chunk: int, device: torch.device) -> torch.Tensor:
        """[S, C * S] True where a local query may look, keys in the order of the gather."""
        size = self.cp_group.size()

        def positions(rank: int) -> torch.Tensor:
            chunks = (rank, 2 * size - 1 - rank)
            return torch.cat(
                [torch.arange(c * chunk, (c + 1) * chunk, device=device) for c in chunks]
            )

        keys = torch.cat([positions(rank) for rank in range(size)])
        return keys[None, :] <= positions(self.cp_group.rank())[:, None]


class TorchSpecProvider(BackendSpecProvider):  # type: ignore[misc]
    """Hands megatron's builders the modules above."""

    def column_parallel_linear(self) -> type:
        """Linear layer with split outputs."""
        return ColumnParallelLinear  # type: ignore[no-any-return]

    def row_parallel_linear(self) -> type:
        """Linear layer with split inputs."""
        return RowParallelLinear  # type: ignore[no-any-return]

    def fuse_layernorm_and_linear(self) -> bool:
        """Norm and linear layer are one module."""
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        """Norm and linear layer with split outputs."""
        return TorchLayerNormColumnParallelLinear

    def layer_norm(
        self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False
    ) -> type:
        """Norm of its own."""
        return TorchRMSNorm

    def core_attention(self) -> type:
        """Attention itself."""
        return TorchAttention

    def activation_func(self) -> None:
        """None: megatron takes the config's function."""
        return

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:  # noqa: ANN401
        """Experts."""
        return partial(
            TEGroupedMLP,
            submodules=GroupedMLPSubmodules(
                linear_fc1=TorchColumnParallelGroupedLinear,
                linear_fc2=TorchRowParallelGroupedLinear,
            ),
        )


def _l2norm(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def have_linear_attention_kernels() -> bool:
    """Whether flash-linear-attention's kernels are installed and can run here."""
    common: Any = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    return torch.cuda.is_available() and common.chunk_gated_delta_rule is not None


def allow_linear_attention_without_kernels() -> None:
    """Let megatron build gated delta nets without flash-linear-attention. Idempotent.

    They then compute with megatron's torch code (``deterministic_mode``); only the normalisation
    of queries and keys is missing there.
    """
    common: Any = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    if not have_linear_attention_kernels():
        common.HAVE_FLA = True
        common.l2norm = _l2norm
