"""One pass of a rank over its microbatches, through megatron's pipeline schedule.

Every rank of the student calls these functions at the same time with its own microbatches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import MegatronOptimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from miniverl_dist.backends.megatron.data import RankLayout, RankMicrobatch
from miniverl_dist.backends.megatron.device import current_device
from miniverl_dist.backends.megatron.logprobs import vocab_parallel_logprobs
from miniverl_dist.backends.megatron.setup import (
    MegatronModel,
    first_vocab_row,
    forward_hidden,
    output_weight,
)
from miniverl_dist.errors import UpdateError
from miniverl_dist.objective.policy_loss import Metrics, merge_metrics
from miniverl_dist.schemas.batch import FloatArray

Loss = tuple[Tensor, Metrics]
LossFunction = Callable[[RankMicrobatch, Tensor], Loss]
"""Microbatch and its hidden states [C, b, H] -> this rank's share of the step's loss, metrics."""


class Scored(NamedTuple):
    """Predictions of one microbatch on this rank, in the order of ``RankMicrobatch.targets``."""

    logprobs: Tensor
    """[M] nats."""
    entropy: Tensor
    """[M] nats, detached."""


def rank_layout(model: MegatronModel) -> RankLayout:
    """Where this rank stands, from megatron's groups."""
    tensor_size = parallel_state.get_tensor_model_parallel_world_size()
    return RankLayout(
        data_size=parallel_state.get_data_parallel_world_size(),
        data_rank=parallel_state.get_data_parallel_rank(),
        context_size=parallel_state.get_context_parallel_world_size(),
        context_rank=parallel_state.get_context_parallel_rank(),
        sequence_size=tensor_size if model.config.sequence_parallel else 1,
    )


def speaks_for_its_group() -> bool:
    """Whether this rank's losses and logprobs count: tensor ranks of a last stage agree on them."""
    is_last: bool = parallel_state.is_pipeline_last_stage()
    return is_last and parallel_state.get_tensor_model_parallel_rank() == 0


def score(
    model: MegatronModel,
    part: RankMicrobatch,
    hidden: Tensor,
    *,
    chunk_size: int,
    temperature: float,
) -> Scored:
    """Log-probabilities of a microbatch's predictions; on the last stage only.

    Args:
        model: Whose output weight projects.
        part: The microbatch.
        hidden: [C, b, H] from ``forward_hidden``, equal on all tensor ranks.
        chunk_size: rows whose logits exist at a time.
        temperature: that of the sampling engine.
    """
    device = hidden.device
    states = hidden.transpose(0, 1).flatten(0, 1)
    weight = output_weight(model)
    group = parallel_state.get_tensor_model_parallel_group()
    return Scored(
        *vocab_parallel_logprobs(
            states.index_select(0, torch.from_numpy(part.places).to(device)),
            weight,
            torch.from_numpy(part.targets).to(device),
            chunk_size,
            first_row=first_vocab_row(model),
            group=group,
            temperature=temperature,
        )
    )


def train_microbatches(
    model: MegatronModel, parts: Sequence[RankMicrobatch], loss_function: LossFunction
) -> Metrics:
    """Forward and backward over the microbatches; gradients end up summed over all ranks.

    The gradient is the plain sum of the losses' over microbatches, data- and context-parallel
    ranks: the losses carry global denominators. megatron would have made it a mean. Its schedule
    multiplies each loss by CP / microbatches, and its gradient buffers divide by DP * CP; so each
    loss is handed over as DP * microbatches times itself.

    Returns:
        This rank's metrics; empty unless it is on the last stage.
    """
    scale = float(len(parts) * parallel_state.get_data_parallel_world_size())

    def scaled(part: RankMicrobatch, hidden: Tensor) -> Loss:
        loss, metrics = loss_function(part, hidden)
        return loss * scale, metrics | {"loss": loss.detach()}

    return merge_metrics(*_run_schedule(model, parts, scaled, forward_only=False))


@torch.no_grad()
def packed_logprobs(
    model: MegatronModel,
    parts: Sequence[RankMicrobatch],
    num_tokens: int,
    *,
    chunk_size: int,
    temperature: float,
) -> FloatArray:
    """[N] nats of all ranks' predictions, on every rank; 0 where nothing is predicted."""

    def scored(part: RankMicrobatch, hidden: Tensor, *, non_loss_data: bool) -> Any:  # noqa: ANN401 -- megatron passes it through
        logprobs = score(model, part, hidden, chunk_size=chunk_size, temperature=temperature)[0]
        return part.packed, logprobs.double().cpu().numpy()

    values = np.zeros(num_tokens)
    found = _run_schedule(model, parts, scored, forward_only=True)
    if speaks_for_its_group():
        for packed, logprobs in found:
            values[packed] = logprobs
    # Each token has one speaker and a 0 from everybody else: the sum is exact.
    total = torch.from_numpy(values).to(current_device())
    dist.all_reduce(total)
    return total.cpu().numpy()


def _run_schedule(
    model: MegatronModel,
    parts: Sequence[RankMicrobatch],
    on_last_stage: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    """What ``on_last_stage`` returned for each microbatch; empty on the other stages."""

    def forward_step(
        iterator: Iterator[RankMicrobatch], _module: object
    ) -> tuple[Tensor, Callable[..., Any]]:
        part = next(iterator)
        model.routing.use(part)
        device = current_device()
        output = forward_hidden(
            model,
            torch.from_numpy(part.token_rows).to(device),
            torch.from_numpy(part.position_ids).to(device),
        )
        return output, partial(on_last_stage, part)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(parts),
        model=[model.ddp],
        num_microbatches=len(parts),
        # Not read: stages exchange the shapes of their activations (see data.py).
        seq_length=parts[0].padded_length,
        micro_batch_size=len(parts[0].token_rows),
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
    )
    return results


def agreed_step(
    optimizer: MegatronOptimizer,
    metrics: Metrics,
    lr: float,
    *,
    before_step: Callable[[], None],
) -> Metrics:
    """One optimizer step, if loss and gradient norm are finite on every rank.

    Args:
        optimizer: whose gradients are ready.
        metrics: this rank's, from ``train_microbatches``.
        lr: learning rate of this step.
        before_step: called when all ranks have agreed, right before the first weight changes.

    Returns:
        Metrics of all microbatches and ranks together, and ``grad_norm`` (before clipping): the
        same on every rank.

    Raises:
        UpdateError: something is not finite somewhere; on all ranks, and no weight has changed.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    own = {name: float(value) for name, value in metrics.items()} if speaks_for_its_group() else {}
    found: list[tuple[float, dict[str, float]]] = [(0.0, {})] * dist.get_world_size()
    dist.all_gather_object(found, (norm, own))
    for rank, (rank_norm, rank_metrics) in enumerate(found):
        loss = rank_metrics.get("loss", 0.0)
        if not (isfinite(rank_norm) and isfinite(loss)):
            raise UpdateError(
                f"rank {rank} has loss {loss} and gradient norm {rank_norm}, expected finite "
                "numbers: no rank has taken the optimizer step"
            )
    before_step()
    for group in optimizer.param_groups:
        group["lr"] = lr
    succeeded, _, _ = optimizer.step()
    if not succeeded:
        raise UpdateError("megatron skipped an optimizer step whose gradients are finite")
    return merge_metrics(*(rank_metrics for _, rank_metrics in found)) | {"grad_norm": norm}
