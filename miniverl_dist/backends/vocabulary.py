"""Which row of a model's embedding stands for which token id; torch-free."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from miniverl_dist.errors import TokenizerMismatchError
from miniverl_dist.schemas.batch import IntArray


class Vocabulary:
    """A declared set of real token ids and the rows of the embedding that stand for them.

    Raises:
        TokenizerMismatchError: no ids, repeated or negative ones.
    """

    def __init__(self, ids: Sequence[int] | IntArray) -> None:
        given = np.asarray(ids, dtype=np.int64)
        self.ids: IntArray = np.unique(given)
        """[V] sorted real ids; row v is ``ids[v]``."""
        self.ids.setflags(write=False)
        if len(self.ids) != len(given) or len(given) == 0 or self.ids[0] < 0:
            raise TokenizerMismatchError(
                f"a vocabulary needs distinct ids >= 0, found {len(given)} ids of which "
                f"{len(self.ids)} are distinct and {int((given < 0).sum())} negative"
            )

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, ids: Sequence[int] | IntArray) -> IntArray:
        """Rows of real ids, in their order.

        Raises:
            TokenizerMismatchError: an id that the vocabulary does not have.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        rows = np.searchsorted(self.ids, wanted).astype(np.int64, copy=False)
        foreign = self.ids[np.minimum(rows, len(self.ids) - 1)] != wanted
        if foreign.any():
            where = int(np.flatnonzero(foreign)[0])
            raise TokenizerMismatchError(
                f"token id {int(wanted[where])} at position {where} is not among the "
                f"{len(self.ids)} ids of this model's vocabulary ({int(foreign.sum())} such "
                "ids in all): build the vocabulary from the texts it will meet, bytes included"
            )
        return rows


class FullVocabulary:
    """Row v stands for token id v: a model with its tokenizer's whole vocabulary.

    Args:
        vocab_size: Rows of the embedding; models pad it, so it may exceed the tokenizer's.
    """

    def __init__(self, vocab_size: int) -> None:
        self.ids: IntArray = np.arange(vocab_size, dtype=np.int64)
        self.ids.setflags(write=False)

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, ids: Sequence[int] | IntArray) -> IntArray:
        """The ids themselves.

        Raises:
            TokenizerMismatchError: an id without a row.
        """
        wanted = np.asarray(ids, dtype=np.int64)
        foreign = (wanted < 0) | (wanted >= len(self.ids))
        if foreign.any():
            where = int(np.flatnonzero(foreign)[0])
            raise TokenizerMismatchError(
                f"token id {int(wanted[where])} at position {where} has no row in an embedding of "
                f"{len(self.ids)}: the ids of another tokenizer?"
            )
        return wanted


AnyVocabulary = Vocabulary | FullVocabulary
