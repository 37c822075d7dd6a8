"""The bytes that each token id stands for, as arrays.

Shapes: V ids of a vocabulary, S ids of a text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import TokenizerError, UnspellableBytesError

_SURROGATES = re.compile("[\ud800-\udfff]")


def without_surrogates(text: str) -> str:
    """``text`` with U+FFFD for lone surrogates, which Python strings can hold and UTF-8 cannot."""
    return _SURROGATES.sub("\ufffd", text)


@dataclass(frozen=True)
class ByteTable:
    """Bytes of every id; built once per tokenizer and cached on disk by its fingerprint."""

    pieces: tuple[bytes, ...]
    """[V]; empty for special tokens, the text for added tokens that are not special."""
    lengths: NDArray[np.int32]
    """[V] ``len(pieces[i])``."""
    special: NDArray[np.bool_]
    """[V] True for control tokens, which carry no bytes."""

    @classmethod
    def from_pieces(cls, pieces: Sequence[bytes], special: Sequence[bool]) -> Self:
        """Table of the pieces; special ids get no bytes, whatever their piece is."""
        kept = tuple(
            b"" if is_special else piece for piece, is_special in zip(pieces, special, strict=True)
        )
        lengths = np.fromiter((len(piece) for piece in kept), dtype=np.int32, count=len(kept))
        return cls(kept, lengths, np.asarray(special, dtype=np.bool_))

    @cached_property
    def byte_ids(self) -> NDArray[np.int64]:
        """[256] Lowest id that stands for exactly this byte; -1 where there is none."""
        found = np.full(256, -1, dtype=np.int64)
        for token_id in np.flatnonzero(self.lengths == 1)[::-1]:
            found[self.pieces[token_id][0]] = token_id
        return found

    def ends(self, token_ids: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """[S] Offset in bytes at which each token ends, from the start of the sequence.

        Raises:
            TokenizerError: an id outside of the vocabulary.
        """
        ids = np.asarray(token_ids, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() >= len(self.pieces)):
            raise self._unknown(ids.tolist())
        return np.cumsum(self.lengths[ids], dtype=np.int64)

    def join(self, token_ids: Sequence[int]) -> bytes:
        """The bytes that the ids spell.

        Raises:
            TokenizerError: an id outside of the vocabulary.
        """
        if len(token_ids) and (min(token_ids) < 0 or max(token_ids) >= len(self.pieces)):
            raise self._unknown(token_ids)
        return b"".join(self.pieces[i] for i in token_ids)

    def spell(self, data: bytes) -> list[int]:
        """One byte token per byte of ``data``.

        Raises:
            TokenizerError: the vocabulary has no token for one of the bytes.
        """
        ids = self.byte_ids[np.frombuffer(data, dtype=np.uint8)]
        if ids.size and ids.min() < 0:
            missing = data[int(np.flatnonzero(ids < 0)[0])]
            raise UnspellableBytesError(
                f"the vocabulary has no token for byte 0x{missing:02x}, so {data[:40]!r} cannot "
                "be spelled exactly; use a tokenizer with all 256 byte tokens for such data"
            )
        return [int(token_id) for token_id in ids]

    def _unknown(self, token_ids: Sequence[int]) -> TokenizerError:
        size = len(self.pieces)
        found = next(i for i in token_ids if not 0 <= i < size)
        return TokenizerError(
            f"token id {found} is outside of the vocabulary of {size} ids; it was made with "
            "another tokenizer, or by a model whose embedding is padded beyond it"
        )
