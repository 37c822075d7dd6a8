"""Published weights as the weight map asks for them."""

from __future__ import annotations

from torch import Tensor

from miniverl_dist.backends.megatron.weights import Read
from miniverl_dist.backends.tensors import as_tensor
from miniverl_dist.errors import CheckpointError
from miniverl_dist.schemas.weights import NamedArrays


def reader(tensors: NamedArrays) -> Read:
    """Named arrays as ``load_hf`` asks for them.

    The function raises ``CheckpointError`` for a name that is not there.
    """

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"weights lack {name!r}, which this decoder has")
        return as_tensor(tensors[name])

    return read
