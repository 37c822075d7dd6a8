"""AdamW over float32 masters of a student's trained weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from miniverl_dist.backends.adamw import AdamW, Weights
from miniverl_dist.backends.tensors import as_numpy
from miniverl_dist.config.recipe import OptimConfig
from miniverl_dist.errors import CheckpointError

MASTER = "master."
FloatArrays = Mapping[str, NDArray[Any]]


class MasterAdamW:
    """Steps float32 copies of what has less precision; float32 weights are their own masters.

    Gradients of several microbatches are summed in float32 too: call ``collect`` behind each
    backward pass.

    Args:
        weights: Trained parameters by name.
        config: AdamW's.
    """

    def __init__(self, weights: Mapping[str, nn.Parameter], config: OptimConfig) -> None:
        self._weights = weights
        self.masters: dict[str, Tensor] = {
            name: weight if weight.dtype == torch.float32 else weight.detach().float()
            for name, weight in weights.items()
        }
        self._low = [name for name, weight in weights.items() if weight.dtype != torch.float32]
        self._adamw = AdamW(self.masters, config)

    @property
    def num_steps(self) -> int:
        """Steps since the moments were last reset; rises before a step's first weight changes."""
        return self._adamw.num_steps

    def reset(self) -> None:
        """Forget all moments."""
        self._adamw.reset()

    def collect(self) -> None:
        """Add the gradients that a backward pass has left to those of the masters."""
        for name in self._low:
            weight, master = self._weights[name], self.masters[name]
            if weight.grad is None:
                continue
            found, weight.grad = weight.grad.float(), None
            master.grad = found if master.grad is None else master.grad.add_(found)

    def take_gradients(self) -> dict[str, Tensor]:
        """The gradients that the masters have; they have none afterwards, nor the weights."""
        for weight in (self._weights[name] for name in self._low):
            weight.grad = None
        return self._adamw.take_gradients()

    def give_gradients(self, parts: Sequence[Weights], divisor: float) -> None:
        """See ``AdamW.give_gradients``."""
        self._adamw.give_gradients(parts, divisor)

    def step(self, lr: float) -> float:
        """See ``AdamW.step``."""
        norm = self._adamw.step(lr)
        self.round_masters()
        return norm

    @torch.no_grad()
    def round_masters(self) -> None:
        """Give the weights what the masters hold."""
        for name in self._low:
            self._weights[name].copy_(self.masters[name])

    @torch.no_grad()
    def take_weights(self) -> None:
        """Let the masters start from the weights, which something else has set."""
        for name in self._low:
            self.masters[name].copy_(self._weights[name])

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Copies of moments and of those masters that are no weights."""
        low = {f"{MASTER}{name}": as_numpy(self.masters[name]).copy() for name in self._low}
        return self._adamw.state() | low

    def restore(self, state: FloatArrays, num_steps: int) -> None:
        """Take up what ``state`` returned, weights of less precision included; all or nothing.

        Raises:
            CheckpointError: names or shapes are not those of these weights.
        """
        masters = {n.removeprefix(MASTER): a for n, a in state.items() if n.startswith(MASTER)}
        if set(masters) != set(self._low) or any(
            masters[name].shape != tuple(self.masters[name].shape) for name in self._low
        ):
            raise CheckpointError(
                f"optimizer state holds {len(masters)} float32 masters, this student needs "
                f"{len(self._low)}, of the weights' own shapes: another dtype or architecture"
            )
        self._adamw.restore({n: a for n, a in state.items() if not n.startswith(MASTER)}, num_steps)
        with torch.no_grad():
            for name in self._low:
                self.masters[name].copy_(torch.from_numpy(np.array(masters[name])))
        self.round_masters()

    def undo(self) -> Callable[[], None]:
        """Keep everything; the returned function puts it back. Costs three float32 copies."""
        masters = {name: master.detach().clone() for name, master in self.masters.items()}
        moments, num_steps = self._adamw.state(), self._adamw.num_steps

        def put_back() -> None:
            with torch.no_grad():
                for name, master in self.masters.items():
                    master.copy_(masters[name])
            self.round_masters()
            self._adamw.restore(moments, num_steps)

        return put_back
