"""What weights are called between processes: named numpy arrays and one checksum."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

NamedArrays = Mapping[str, NDArray[Any]]


def weights_checksum(tensors: NamedArrays) -> str:
    """SHA-256 (hex) over names, dtypes, shapes and bytes, in the order of the names."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        array = np.ascontiguousarray(tensors[name])
        digest.update(f"{name}\0{array.dtype.str}\0{tensors[name].shape}\0".encode())
        digest.update(array.view(np.uint8).data if array.ndim else array.tobytes())
    return digest.hexdigest()
