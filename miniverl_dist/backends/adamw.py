"""AdamW over named tensors, its learning rate, and gradient clipping.

Not ``torch.optim``: constructing one of its optimizers imports ``torch._dynamo``, which costs the
local path seconds and memory, and its state cannot be stored without pickle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from miniverl_dist.config.recipe import OptimConfig
from miniverl_dist.errors import CheckpointError, UpdateError

Weights = Mapping[str, torch.Tensor]


def learning_rate(config: OptimConfig, num_updates: int, num_steps: int) -> float:
    """Learning rate of the batch that follows ``num_updates`` committed ones.

    It rises over the first ``warmup_steps`` batches and reaches ``lr`` with the last of them.
    ``linear`` then falls so that it would be 0 for the batch behind the last: no batch is wasted.
    """
    if num_updates < config.warmup_steps:
        return config.lr * (num_updates + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    falling = max(num_steps - config.warmup_steps, 1)
    return config.lr * max(num_steps - num_updates, 0) / falling


class AdamW:
    """Adam with decoupled weight decay on matrices (norm weights are left alone).

    Source:
        Loshchilov and Hutter, arXiv:1711.05101.
    """

    def __init__(self, weights: Weights, config: OptimConfig) -> None:
        self._config = config
        self._weights = weights
        self.reset()

    def reset(self) -> None:
        """Forget all moments."""
        self.num_steps = 0
        self._first = {name: torch.zeros_like(w) for name, w in self._weights.items()}
        self._second = {name: torch.zeros_like(w) for name, w in self._weights.items()}

    def take_gradients(self) -> dict[str, torch.Tensor]:
        """The gradients that the weights have; they have none afterwards."""
        grads = {name: w.grad for name, w in self._weights.items() if w.grad is not None}
        for weight in self._weights.values():
            weight.grad = None
        return grads

    @torch.no_grad()
    def give_gradients(self, parts: Sequence[Weights], divisor: float) -> None:
        """Give the weights the sum of some gradients, added in this order, over ``divisor``."""
        for name, weight in self._weights.items():
            found = [part[name] for part in parts if name in part]
            weight.grad = sum(found[1:], found[0]) / divisor if found else None

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Clip the gradients, take one step, clear the gradients.

        Returns:
            The gradient norm before clipping.

        Raises:
            UpdateError: the norm is not finite; no weight has been touched.
        """
        grads = {name: w.grad for name, w in self._weights.items() if w.grad is not None}
        norm = sqrt(sum(float(grad.double().square().sum()) for grad in grads.values()))
        if not isfinite(norm):
            raise UpdateError(f"gradient norm is {norm}: the optimizer step was not taken")
        scale = min(1.0, self._config.grad_clip / norm) if norm else 1.0
        self.num_steps += 1
        for name, grad in grads.items():
            self._move(name, grad.mul_(scale), lr)
            self._weights[name].grad = None
        return norm

    def _move(self, name: str, grad: torch.Tensor, lr: float) -> None:
        config, weight = self._config, self._weights[name]
        beta1, beta2 = config.betas
        first = self._first[name].lerp_(grad, 1 - beta1)
        second = self._second[name].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        if weight.dim() > 1:
            weight.mul_(1 - lr * config.weight_decay)
        unbiased = (second / (1 - beta2**self.num_steps)).sqrt_().add_(config.eps)
        weight.addcdiv_(first, unbiased, value=-lr / (1 - beta1**self.num_steps))

    def state(self) -> dict[str, NDArray[np.float32]]:
        """Copies of the moments, ``first.<name>`` and ``second.<name>``."""
        return {
            f"{kind}.{name}": moment.cpu().numpy().copy()
            for kind, moments in (("first", self._first), ("second", self._second))
            for name, moment in moments.items()
        }

    def restore(self, state: Mapping[str, NDArray[Any]], num_steps: int) -> None:
        """Take up what ``state`` returned; all of it, or nothing when something does not fit.

        Raises:
            CheckpointError: names or shapes are not those of these weights.
        """
        wanted = {name: array.shape for name, array in self.state().items()}
        found = {name: array.shape for name, array in state.items()}
        if found != wanted:
            differing = sorted(k for k in wanted | found if wanted.get(k) != found.get(k))
            raise CheckpointError(
                f"optimizer state does not fit the weights: {differing[0]!r} is "
                f"{found.get(differing[0])}, expected {wanted.get(differing[0])}"
            )
        self.num_steps = num_steps
        for kind, moments in (("first", self._first), ("second", self._second)):
            for name, moment in moments.items():
                moment.copy_(torch.from_numpy(np.array(state[f"{kind}.{name}"])))
