"""The frozen reference policy: this rank's weights of another time, in CPU memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor


class FrozenWeights:
    """A copy of a module's parameters that can take their place for a while.

    Args:
        module: The model on this rank; copied at once.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self._parameters = dict(module.named_parameters())
        self.tensors: dict[str, Tensor] = {}
        """Parameter name -> CPU tensor."""
        self.freeze()

    def freeze(self) -> None:
        """Take the current weights."""
        self.tensors = cpu_copies(self._parameters)

    def take(self, tensors: Mapping[str, Tensor]) -> None:
        """Become these weights, names and shapes as in ``tensors``."""
        self.tensors = dict(tensors)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The module computes with these weights within the block, with its own after it.

        Parameters are views into the buffers of the distributed optimizer, so values change places,
        never tensors.
        """
        own = cpu_copies(self._parameters)
        try:
            copy_into(self._parameters, self.tensors)
            yield
        finally:
            copy_into(self._parameters, own)


def cpu_copies(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Name -> copy in CPU memory."""
    return {
        name: torch.empty_like(tensor, device="cpu").copy_(tensor.detach())
        for name, tensor in parameters.items()
    }


@torch.no_grad()
def copy_into(parameters: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrite every parameter with the value of its name."""
    for name, parameter in parameters.items():
        parameter.copy_(values[name])
