"""Slow oracle of routing replay: transformers' own routers, told which experts to take.

Shapes: T tokens of one sequence, L layers, K experts per token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional


class ForcedRouting:
    """Replaces the choice of every router of a model; the weights of the chosen stay its own."""

    rows: torch.Tensor
    """[T, L, K] of the sequence that is computed next; -1: the router's own choice."""

    def __init__(self, model: Any) -> None:
        gates = [each for name, each in model.named_modules() if name.endswith(".mlp.gate")]
        assert gates
        for layer, gate in enumerate(gates):
            gate.forward = partial(self._routed, gate, layer)

    def _routed(
        self, gate: Any, layer: int, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits = functional.linear(hidden, gate.weight)
        probabilities = torch.softmax(logits, -1)
        wanted = self.rows[:, layer]
        own = probabilities.topk(gate.top_k, -1).indices
        indices = torch.where(wanted < 0, own, wanted)
        weights = probabilities.gather(-1, indices)
        if getattr(gate, "norm_topk_prob", True):
            weights = weights / weights.sum(-1, keepdim=True)
        return logits, weights, indices


@torch.no_grad()
def own_routing(model: Any, token_ids: NDArray[np.int64]) -> NDArray[np.int16]:
    """[T, L, K] what the model itself chooses for one sequence."""
    found: list[torch.Tensor] = []
    gates = [each for name, each in model.named_modules() if name.endswith(".mlp.gate")]
    hooks = [gate.register_forward_hook(lambda *call: found.append(call[2][2])) for gate in gates]
    model(input_ids=torch.from_numpy(token_ids)[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    rows: NDArray[np.int16] = torch.stack(found, 1).numpy().astype(np.int16)
    return rows
