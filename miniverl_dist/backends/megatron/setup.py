"""One rank's model and optimizer, and its forward pass up to the vocabulary projection.

Shapes: B sequences, S tokens of them on this rank (all, or this rank's part under context
parallelism), H hidden, V vocabulary rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    MegatronOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.transformer.transformer_config import TransformerConfig

from miniverl_dist.backends.megatron import cpu_compat
from miniverl_dist.backends.megatron.architecture import Architecture
from miniverl_dist.backends.megatron.routing_replay import RoutingReplay
from miniverl_dist.backends.megatron.spec import block_spec, transformer_config
from miniverl_dist.config.recipe import OptimConfig
from miniverl_dist.config.roles import MegatronModelConfig
from miniverl_dist.errors import ConfigError


@dataclass(frozen=True)
class MegatronModel:
    """This rank's stage of the decoder."""

    arch: Architecture
    config: TransformerConfig
    module: Any
    """``GPTModel``."""
    ddp: Any
    """``module`` in megatron's wrapper, which holds the gradients (``main_grad``)."""
    routing: RoutingReplay
    """Of the stage's routers; a decoder without experts has none."""

    def release(self) -> None:
        """Let the model go with its last reference; nothing can be computed afterwards.

        Hooks of the parameters hold the wrapper from C++, where no collector looks. Through it they
        would hold process groups, whose threads poll for the rest of the process.
        """
        vars(self.ddp).clear()

    @property
    def is_first_stage(self) -> bool:
        """This rank embeds token ids."""
        return bool(self.module.pre_process)

    @property
    def is_last_stage(self) -> bool:
        """This rank has the output projection."""
        return bool(self.module.post_process)

    @property
    def padded_vocab_size(self) -> int:
        """Vocabulary rows that all tensor ranks hold together."""
        return int(self.module.vocab_size)


def padded_vocab_size(vocab_size: int, tensor: int) -> int:
    """Rows of the embedding: every tensor rank has as many as the others."""
    return -(-vocab_size // tensor) * tensor


def build_model(arch: Architecture, model: MegatronModelConfig, *, seed: int) -> MegatronModel:
    """Build this rank's stage among ranks that ``device.init_ranks`` has laid out.

    Args:
        arch: The decoder.
        model: Its layout and numerics.
        seed: Of the weights' first values, which loading replaces.

    Raises:
        ConfigError: the layout does not fit the decoder.
    """
    if problem := arch.problem(model.parallel):
        raise ConfigError(f"student.model.parallel: {problem}")
    cpu_compat.install()
    torch.manual_seed(seed)
    with _quiet_megatron():
        return _build(arch, model)


@contextmanager
def _quiet_megatron() -> Iterator[None]:
    """Megatron warns on every build of what is decided here (GPTModel, the gradients' layout)."""
    logger = logging.getLogger("megatron.core")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _build(arch: Architecture, model: MegatronModelConfig) -> MegatronModel:
    config = transformer_config(arch, model)
    module = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(arch, config),
        vocab_size=padded_vocab_size(arch.vocab_size, model.parallel.tensor),
        max_sequence_length=model.max_context_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=arch.tie_embeddings,
        position_embedding_type="rope",
        rotary_percent=arch.rotary_fraction,
        rotary_base=arch.rope_theta,
    )
    ddp = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=model.distributed_optimizer,
        ),
        module,
    )
    config.finalize_model_grads_func = finalize_model_grads
    routing = RoutingReplay(module, config)
    return MegatronModel(arch=arch, config=config, module=module, ddp=ddp, routing=routing)


def build_optimizer(
    model: MegatronModel, optim: OptimConfig, *, distributed: bool
) -> MegatronOptimizer:
    """AdamW with gradient clipping; weight decay on matrices only.

    Under bfloat16 weights it keeps float32 masters. Build it after the weights are loaded, or call
    its ``reload_model_params()`` then: it copies them.

    Args:
        model: The stage.
        optim: Moments, decay and clipping; the learning rate is set anew before each step.
        distributed: Split its state over the data-parallel ranks; as the model was built.
    """
    dtype = model.config.params_dtype
    config = OptimizerConfig(
        optimizer="adam",
        lr=optim.lr,
        weight_decay=optim.weight_decay,
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_eps=optim.eps,
        clip_grad=optim.grad_clip,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=distributed,
    )
    overrides = get_standard_config_overrides(config)
    optimizer = get_megatron_optimizer(config, [model.ddp], overrides)
    for group in optimizer.param_groups:
        # Megatron leaves this product to its own learning-rate scheduler, which is not used here.
        group["weight_decay"] = optim.weight_decay * group["wd_mult"]
    model.config.grad_scale_func = optimizer.scale_loss
    return optimizer


def forward_hidden(
    model: MegatronModel, token_ids: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor:
    """Run this stage; the last one stops before the vocabulary projection.

    Attention is causal over the whole row: padding belongs at the end, where nothing real looks.

    Args:
        model: The stage. Earlier stages' output has been given to it by megatron's schedule.
        token_ids: [B, S]; S is a multiple of the tensor ranks under sequence parallelism. Only
            the first stage reads them.
        position_ids: [B, S].

    Returns:
        On the last stage [S, B, H], behind the final norm and equal on all tensor ranks. Hand back
        as its gradient what this rank's own vocabulary rows contribute: the sum over the tensor
        ranks is taken here. On other stages, what the next one takes.
    """
    hidden: torch.Tensor = model.ddp(
        token_ids, position_ids, None, output_processor=_before_projection
    )
    return hidden


def _before_projection(
    *, hidden_states: torch.Tensor, config: TransformerConfig, **_: object
) -> torch.Tensor:
    if config.sequence_parallel:
        # Backward: sums over the tensor ranks, and gives each its part of the sequence.
        gathered = tensor_parallel.gather_from_sequence_parallel_region(
            hidden_states, tensor_parallel_output_grad=True
        )
    else:
        # Backward: sums over the tensor ranks.
        gathered = tensor_parallel.copy_to_tensor_model_parallel_region(hidden_states)
    hidden: torch.Tensor = gathered
    return hidden


def output_weight(model: MegatronModel) -> torch.Tensor:
    """[V_local, H] this tensor rank's real rows of the projection, padding left out.

    A view of the parameter, so gradients reach it. Only on the last stage; row 0 is vocabulary row
    ``first_vocab_row``.
    """
    if model.module.share_embeddings_and_output_weights:
        weight: torch.Tensor = model.module.shared_embedding_or_output_weight()
    else:
        weight = model.module.output_layer.weight
    num_real = max(0, min(len(weight), model.arch.vocab_size - first_vocab_row(model)))
    # An untouched parameter where nothing is padded: a slice would copy its gradient once more.
    return weight if num_real == len(weight) else weight[:num_real]


def first_vocab_row(model: MegatronModel) -> int:
    """Vocabulary row that this tensor rank's first row stands for."""
    size = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    return int(model.padded_vocab_size // size * rank)


def logits(
    model: MegatronModel, token_ids: torch.Tensor, position_ids: torch.Tensor
) -> torch.Tensor:
    """[B, S, V_local] of the last stage, built in full: for tests and for small models."""
    hidden = forward_hidden(model, token_ids, position_ids)
    return (hidden @ output_weight(model).T).transpose(0, 1)
