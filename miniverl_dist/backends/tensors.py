"""Torch tensors as the numpy arrays that travel between processes, and back.

What numpy has no dtype for, such as bfloat16, has that of ``ml_dtypes``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from miniverl_dist.schemas.weights import dtype_of


def as_numpy(tensor: Tensor) -> NDArray[Any]:
    """A tensor's values, C-contiguous; they share its memory unless it lies elsewhere or apart."""
    held = tensor.detach().cpu().contiguous()
    raw = held.reshape(-1).view(torch.uint8).numpy()
    dtype = dtype_of(str(held.dtype).removeprefix("torch."))
    array: NDArray[Any] = raw.view(dtype).reshape(tuple(held.shape))
    return array


def as_tensor(array: NDArray[Any]) -> Tensor:
    """An array as a tensor over the same memory, or over a copy where that is read-only."""
    # torch cannot express memory that it must not write to, such as an object store's.
    own = array if array.flags.writeable else array.copy()
    if own.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(own.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(own)


def first_difference(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """The first name, in order, whose dtype or shape is not the wanted one; empty without any."""
    there, here = (
        {n: (t.dtype, tuple(t.shape)) for n, t in each.items()} for each in (found, wanted)
    )
    names = sorted(n for n in there.keys() | here.keys() if there.get(n) != here.get(n))
    return f"{names[0]!r} is {there.get(names[0])}, expected {here.get(names[0])}" if names else ""
