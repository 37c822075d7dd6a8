"""Which experts a mixture-of-experts engine sent each token to, and the forms that travel.

Trained under another routing than it was sampled with, a token has another probability although
the weights are the same. So the engine's choice is stored with the tokens and replayed.

Row t belongs to the token at position t *as an input*: it is the routing of the pass that predicts
token t + 1. The last token of an episode was never an input, so rows may end before the tokens do.

Shapes: R rows, L layers, K experts per token, N packed tokens of a batch.

Source:
    Rollout routing replay (R3), arXiv:2510.11370; the reply's form is SGLang 0.5.23's.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import PlainSerializer, PlainValidator

from miniverl_dist.errors import BatchError, RecordError, ReplyMismatchError

ExpertRows = NDArray[np.unsignedinteger[Any]]
"""[R, L, K] indices of experts, of the smallest unsigned type that holds them."""
PackedRows = NDArray[np.int16]
"""[N, L, K] indices of experts; ``NO_EXPERT`` in all of a row whose token has no routing."""

NO_EXPERT = -1
_DTYPES = ("uint8", "uint16")
_FIELDS = {"dtype", "shape", "data"}
_WIRE_DTYPE = np.dtype("<i4")


@dataclass(frozen=True)
class RoutingShape:
    """What a model's routing looks like; the replies of engines do not say it."""

    num_layers: int
    experts_per_token: int
    num_experts: int

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger[Any]]:
        """Smallest unsigned type that holds every index."""
        return np.min_scalar_type(self.num_experts - 1)


def decode_engine_rows(text: str, shape: RoutingShape, num_rows: int) -> ExpertRows:
    """Rows out of ``meta_info.routed_experts``: base64 of int32, without a word on its shape.

    Args:
        text: Of the reply.
        shape: Of the model that the engine serves.
        num_rows: Tokens of prompt and output, less the last one.

    Raises:
        ReplyMismatchError: not base64, of another size, or an index that is no expert's.
    """
    wanted = (num_rows, shape.num_layers, shape.experts_per_token)
    try:
        data = base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ReplyMismatchError(f"meta_info.routed_experts is not base64: {error}") from error
    if len(data) != prod(wanted) * _WIRE_DTYPE.itemsize:
        raise ReplyMismatchError(
            f"meta_info.routed_experts has {len(data)} bytes, expected {num_rows} rows of "
            f"{shape.num_layers} layers and {shape.experts_per_token} experts in int32: does the "
            "engine serve the student's model?"
        )
    rows = np.frombuffer(data, dtype=_WIRE_DTYPE).reshape(wanted)
    if rows.size and not 0 <= rows.min() <= rows.max() < shape.num_experts:
        raise ReplyMismatchError(
            f"meta_info.routed_experts names experts {rows.min()} to {rows.max()}, the model has "
            f"0 to {shape.num_experts - 1}"
        )
    return rows.astype(shape.dtype)


def encode_engine_rows(rows: ExpertRows) -> str:
    """What ``decode_engine_rows`` reads."""
    return base64.b64encode(rows.astype(_WIRE_DTYPE).tobytes()).decode("ascii")


def check_distinct(rows: ExpertRows) -> None:
    """Refuse rows that name an expert twice: dispatchers would quietly count it once.

    Raises:
        RecordError: names the first such row.
    """
    ordered = np.sort(rows, axis=-1)
    is_repeated = (ordered[..., 1:] == ordered[..., :-1]).any(axis=-1)
    if is_repeated.any():
        row, layer = np.argwhere(is_repeated)[0].tolist()
        raise RecordError(
            f"routed experts of row {row} in layer {layer} are {rows[row, layer].tolist()}, "
            "expected distinct ones"
        )


def pack_rows(rows: Sequence[ExpertRows | None], lengths: Sequence[int]) -> PackedRows:
    """Rows of several sequences laid end to end.

    Args:
        rows: Of each sequence; None where it has none, which must not be the case for all.
        lengths: Tokens of each sequence in the batch; rows behind them are left out.

    Raises:
        BatchError: sequences of models with other layers or other numbers of chosen experts.
    """
    shapes = sorted({array.shape[1:] for array in rows if array is not None})
    if len(shapes) != 1:
        raise BatchError(
            f"routed experts of one batch have (layers, experts per token) {shapes}, expected one "
            "shape: trajectories of one model"
        )
    packed = np.full((sum(lengths), *shapes[0]), NO_EXPERT, dtype=np.int16)
    start = 0
    for array, length in zip(rows, lengths, strict=True):
        if array is not None:
            known = array[:length]
            packed[start : start + len(known)] = known
        start += length
    return packed


def _to_rows(value: object) -> ExpertRows:
    """From memory as it is, from disk out of the compact form."""
    rows = value if isinstance(value, np.ndarray) else _unpacked(value)
    if rows.ndim != 3 or rows.dtype.name not in _DTYPES:
        raise RecordError(
            f"routed_experts have shape {list(rows.shape)} and type {rows.dtype}, expected "
            f"[rows, layers, experts per token] of {' or '.join(_DTYPES)}"
        )
    rows = rows.view()
    rows.setflags(write=False)
    return rows


def _unpacked(value: object) -> NDArray[Any]:
    if not isinstance(value, dict) or value.keys() != _FIELDS:
        found = sorted(value) if isinstance(value, dict) else type(value).__name__
        raise RecordError(f"routed_experts: found {found}, expected {', '.join(sorted(_FIELDS))}")
    shape, dtype = value["shape"], value["dtype"]
    if dtype not in _DTYPES:
        raise RecordError(f"routed_experts.dtype is {dtype!r}, expected {' or '.join(_DTYPES)}")
    is_shape = isinstance(shape, list | tuple) and len(shape) == 3
    if not is_shape or not all(isinstance(size, int) and size >= 0 for size in shape):
        raise RecordError(
            f"routed_experts.shape is {shape!r}, expected [rows, layers, experts per token]"
        )
    # In the order that everybody's zlib and numpy agree on, whatever this machine's own is.
    stored = np.dtype(dtype).newbyteorder("<")
    data = _inflated(value["data"], prod(shape) * stored.itemsize)
    return np.frombuffer(data, dtype=stored).astype(dtype).reshape(shape)


def _inflated(text: object, num_bytes: int) -> bytes:
    """The bytes of ``data``; its own checksum (Adler-32) tells damage."""
    try:
        inflater = zlib.decompressobj()
        packed = base64.b64decode(cast("str", text), validate=True)
        # Bounded: a damaged stream must not fill the memory.
        data = inflater.decompress(packed, num_bytes + 1)
    except (zlib.error, binascii.Error, ValueError, TypeError) as error:
        raise RecordError(
            f"routed_experts.data is damaged ({error}), expected base64 of a zlib stream"
        ) from error
    if len(data) != num_bytes or not inflater.eof or inflater.unused_data:
        found = f"{len(data)} bytes" if inflater.eof else f"a stream cut or over at {len(data)}"
        raise RecordError(
            f"routed_experts.data is damaged: {found}, its shape and type ask for {num_bytes} bytes"
        )
    return data


def _from_rows(rows: ExpertRows) -> dict[str, Any]:
    data = rows.astype(rows.dtype.newbyteorder("<")).tobytes()
    return {
        "dtype": rows.dtype.name,
        "shape": list(rows.shape),
        "data": base64.b64encode(zlib.compress(data)).decode("ascii"),
    }


RoutedExperts = Annotated[ExpertRows, PlainValidator(_to_rows), PlainSerializer(_from_rows)]
"""[R, L, K] in memory; on disk ``{"dtype", "shape", "data"}``, the data compressed in base64."""
