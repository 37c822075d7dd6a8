"""What a safetensors file says it holds, compared with how long it is; torch-free."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from miniverl_dist.errors import ConfigError

SAFETENSORS: Final = "*.safetensors"
_MAX_HEADER_BYTES: Final = 100_000_000
_SIZES: Final = {
    "F64": 8, "I64": 8, "U64": 8,
    "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""Bytes of an element; types with a part of a byte are not checked one by one."""
Shapes = dict[str, tuple[int, ...]]


def stored_shapes(files: Iterable[Path], where: str) -> Shapes:
    """Shape of every tensor in these files.

    Args:
        files: Weights.
        where: What errors begin with.

    Raises:
        ConfigError: a file that is no safetensors file, or not a whole one.
    """
    found: Shapes = {}
    for file in files:
        try:
            found |= _shapes(file)
        except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else "its header cannot be read"
            raise ConfigError(f"{where}: {file.name} is no safetensors file ({why})") from error
        except _DamagedError as error:
            raise ConfigError(
                f"{where}: {file.name} is damaged: {error}; copy or download it again"
            ) from error
    return found


class _DamagedError(Exception):
    """The file has the form, but not the bytes that it says it has."""


def _shapes(file: Path) -> Shapes:
    with file.open("rb") as stream:
        (size,) = struct.unpack("<Q", stream.read(8))
        if size > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of {size:,} bytes")
        header: dict[str, Any] = json.loads(stream.read(size))
    header.pop("__metadata__", None)
    end = 0
    shapes: Shapes = {}
    for name, entry in header.items():
        shapes[name] = tuple(int(length) for length in entry["shape"])
        first, last = entry["data_offsets"]
        expected = _SIZES.get(entry["dtype"], 0) * math.prod(shapes[name])
        if entry["dtype"] in _SIZES and last - first != expected:
            raise _DamagedError(
                f"its header gives {name!r} {last - first:,} bytes, its shape takes {expected:,}"
            )
        end = max(end, last)
    length, expected = file.stat().st_size, 8 + size + end
    if length != expected:
        raise _DamagedError(f"it has {length:,} bytes, its header describes {expected:,}")
    return shapes
