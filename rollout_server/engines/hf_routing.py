"""Which experts a transformers model sends its tokens to, noted while it computes.

Shapes: B rows of a pass, S tokens of each, L layers, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from miniverl_dist.schemas.routing import ExpertRows

_FAMILIES = ("qwen3_moe", "qwen3_5_moe_text")


class RoutingTap:
    """Listens to a model's routers; used by the one thread that runs the model.

    Args:
        model: Of the Qwen3 family, whose routers are called ``gate`` and return
            (logits, weights, indices). One without experts is fine; others are not listened to.
    """

    def __init__(self, model: Any) -> None:  # noqa: ANN401 - untyped library
        self._dtype = np.min_scalar_type((getattr(model.config, "num_experts", None) or 1) - 1)
        self._noted: list[torch.Tensor] | None = None
        """By layer, while a pass is listened to."""
        is_known = model.config.model_type in _FAMILIES
        for name, module in model.named_modules():
            if is_known and name.endswith(".mlp.gate"):
                module.register_forward_hook(self._note)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Note the one pass of the block; passes of others than the tap's owner go unheard."""
        self._noted = []
        try:
            yield
        finally:
            self._noted = None

    def heard(self, num_rows: int) -> ExpertRows | None:
        """[B, S, L, K] of the pass, within the block; None for a model without experts."""
        if not self._noted:
            return None
        # One copy from the device for all layers.
        indices = torch.stack(self._noted, dim=1).cpu().numpy()
        return indices.reshape(num_rows, -1, *indices.shape[1:]).astype(self._dtype)

    def _note(self, _module: object, _inputs: object, output: tuple[torch.Tensor, ...]) -> None:
        if self._noted is not None:
            self._noted.append(output[2])
