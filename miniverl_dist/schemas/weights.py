"""What weights are called between processes: named numpy arrays and one checksum.

bfloat16 arrays have the dtype of ``ml_dtypes``. The checksum finds what went wrong on the way, not
an adversary: XXH3 keeps up with memory, where SHA-256 would cost more than the transport itself.
What lies on a disk has SHA-256 in its manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

NamedArrays = Mapping[str, NDArray[Any]]


def dtype_of(name: str) -> np.dtype[Any]:
    """A dtype by its name, those of ``ml_dtypes`` included."""
    try:
        return np.dtype(name)
    except TypeError:
        # Names such as bfloat16 are known to numpy once this is imported.
        import ml_dtypes

        found: np.dtype[Any] = np.dtype(getattr(ml_dtypes, name))
        return found


def tensor_digest(name: str, array: NDArray[Any]) -> str:
    """XXH3-128 (hex) of an array's bytes, with its name, dtype and shape."""
    contiguous = np.ascontiguousarray(array)
    digest = xxhash.xxh3_128(f"{name}\0{array.dtype.name}\0{array.shape}\0".encode())
    digest.update(contiguous.view(np.uint8).data if array.ndim else contiguous.tobytes())
    return digest.hexdigest()


def combined_digest(digests: Mapping[str, str]) -> str:
    """Checksum of named tensors from their own digests, in whatever order those were made."""
    lines = (f"{name}\0{digests[name]}\n" for name in sorted(digests))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def weights_checksum(tensors: NamedArrays) -> str:
    """Checksum (hex) over names, dtypes, shapes and bytes."""
    return combined_digest({name: tensor_digest(name, tensors[name]) for name in tensors})
