"""Replays an engine's choice of experts in megatron's forward and backward passes.

Each router of this stage gets an object in the place where megatron-core looks for its own
``RouterReplay``. That class is not used: it keeps all routers of the process in one list, has to be
told whether a call belongs to a forward pass or to a recomputation (which one-forward-one-backward
schedules interleave), and knows no token without a routing.

What is replayed are indices only. The gate weights are those that the *current* router logits give
the chosen experts, normalised as the model normalises its own; gradients reach the router through
them.

Recomputation: a checkpointed layer runs twice, without gradients and later, in its backward pass,
with them. Schedules run the backward passes of a stage in the order of its forward passes, so
each router keeps the indices of its first runs in a queue and takes them from there again.

Shapes: N packed tokens, L layers, K experts per token, b sequences of a microbatch, C columns of
this rank, n = b * C / sequence ranks tokens that this rank's routers see.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from miniverl_dist.backends.megatron.architecture import ExpertShape
from miniverl_dist.backends.megatron.data import RankMicrobatch
from miniverl_dist.backends.megatron.device import current_device
from miniverl_dist.errors import BatchError, UpdateError
from miniverl_dist.schemas.routing import NO_EXPERT, PackedRows

TopK = Callable[[Tensor, int, int | None, int | None], tuple[Tensor, Tensor]]


class RoutingReplay:
    """The routers of this rank's stage, and what they are to choose.

    Args:
        module: The stage; its routers are prepared at once and route by themselves until told.
        config: Its config.
    """

    def __init__(self, module: torch.nn.Module, config: TransformerConfig) -> None:
        self._routers = [each for each in module.modules() if isinstance(each, TopKRouter)]
        self._layers = [_LayerReplay() for _ in self._routers]
        for router, layer in zip(self._routers, self._layers, strict=True):
            router.router_replay = layer
        self._is_recomputed = config.recompute_granularity == "full"
        self._is_split = bool(config.sequence_parallel)
        self._rows: PackedRows | None = None

    @contextmanager
    def of_batch(self, rows: PackedRows | None) -> Iterator[None]:
        """Within the block, microbatches of this batch are routed so; None: by the model itself.

        Raises:
            UpdateError: a recomputation did not take up what its first run had put down.
        """
        self._rows = rows
        try:
            yield
            left = sum(len(layer.waiting) for layer in self._layers)
            if left:
                raise UpdateError(
                    f"{left} routings of the forward pass were not taken up by the backward pass: "
                    "the schedule does not recompute what it has computed"
                )
        finally:
            self._rows = None
            for layer in self._layers:
                layer.reset()

    def use(self, part: RankMicrobatch) -> None:
        """The next forward pass is of this microbatch."""
        keeps = self._is_recomputed and torch.is_grad_enabled()
        if self._rows is None or not self._layers:
            return
        chosen = self._of_microbatch(self._rows, part)
        for index, layer in enumerate(self._layers):
            layer.chosen, layer.keeps = chosen[:, index], keeps

    def _of_microbatch(self, rows: PackedRows, part: RankMicrobatch) -> Tensor:
        """[n, layers of this stage, K] in the order in which routers see their tokens."""
        first = self._routers[0].layer_number - 1
        places = part.inputs.T
        if self._is_split:
            size = parallel_state.get_tensor_model_parallel_world_size()
            rank = parallel_state.get_tensor_model_parallel_rank()
            places = places.reshape(size, -1, places.shape[1])[rank]
        flat = places.reshape(-1)
        chosen = rows[flat, first : first + len(self._routers)]
        chosen[flat < 0] = NO_EXPERT
        return torch.from_numpy(chosen).to(current_device())


class _LayerReplay:
    """What one router is to choose; speaks as megatron's ``RouterReplay`` does."""

    def __init__(self) -> None:
        self.layer_number: int | None = None
        self.reset()

    def reset(self) -> None:
        """Route as the model does."""
        self.chosen: Tensor | None = None
        """[n, K]."""
        self.keeps = False
        """Whether a pass without gradients will be run again with them."""
        self.waiting: deque[Tensor] = deque()

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """[n, K] scores and indices of the chosen experts, or of the model's own where none are."""
        assert default_compute_topk is not None, "megatron always gives its own choice along"
        own, own_indices = default_compute_topk(scores, topk, num_groups, group_topk)
        chosen = self._next()
        if chosen is None:
            return own, own_indices
        wanted = chosen.long()
        indices = torch.where(wanted[:, :1] == NO_EXPERT, own_indices, wanted)
        return scores.gather(1, indices), indices

    def _next(self) -> Tensor | None:
        if self.chosen is None or not self.keeps:
            return self.chosen
        if torch.is_grad_enabled():
            return self.waiting.popleft()
        self.waiting.append(self.chosen)
        return self.chosen


def check_rows(rows: PackedRows | None, experts: ExpertShape | None, num_layers: int) -> None:
    """Refuse routing that is not this decoder's, before any rank waits for another.

    Raises:
        BatchError: says what differs.
    """
    if rows is None:
        return
    if experts is None:
        raise BatchError("the batch holds routed experts, but the student has no experts")
    found, wanted = rows.shape[1:], (num_layers, experts.experts_per_token)
    if found != wanted:
        raise BatchError(
            f"routed experts have (layers, experts per token) {found}, the student {wanted}: they "
            "were chosen by another model"
        )
    if rows.size and not NO_EXPERT <= rows.min() <= rows.max() < experts.num_experts:
        raise BatchError(
            f"routed experts are {rows.min()} to {rows.max()}, the student has experts 0 to "
            f"{experts.num_experts - 1}, and {NO_EXPERT} stands for none"
        )
