"""Torch tensors as the numpy arrays that travel between processes, and back."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miniverl_dist.backends.megatron.weights import Read
from miniverl_dist.errors import CheckpointError
from miniverl_dist.schemas.weights import NamedArrays


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """A tensor's values; on a CPU they share its memory. bfloat16 gets the dtype of ml_dtypes."""
    values = tensor.detach().cpu()
    if values.dtype == torch.bfloat16:
        return values.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    array: NDArray[Any] = values.numpy()
    return array


def reader(tensors: NamedArrays) -> Read:
    """Named arrays as ``load_hf`` asks for them.

    The function raises ``CheckpointError`` for a name that is not there.
    """

    def read(name: str) -> Tensor:
        if name not in tensors:
            raise CheckpointError(f"weights lack {name!r}, which this decoder has")
        array = tensors[name]
        # torch warns of memory that it must not write to, such as an object store's.
        array = array if array.flags.writeable else array.copy()
        if array.dtype == ml_dtypes.bfloat16:
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    return read
