"""Whether two tokenizers mean the same by their ids, whole or restricted to a part of them."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike


def base_of(tokenizer: TokenizerLike) -> TokenizerLike:
    """The whole tokenizer that the ids belong to."""
    return tokenizer.base if isinstance(tokenizer, SubVocabulary) else tokenizer


def declared_ids(tokenizer: TokenizerLike) -> AbstractSet[int]:
    """All ids that a text of this tokenizer may hold."""
    if isinstance(tokenizer, SubVocabulary):
        return tokenizer.rows.keys()
    return frozenset(range(tokenizer.vocab_size))


def knows_every_id(reader: TokenizerLike, writer: TokenizerLike) -> bool:
    """Whether ``reader`` may be given the very ids of ``writer``, and reads the same bytes in them.

    True for one tokenizer twice, for a part of it read by the whole, and for a part read by a part
    that holds all of its ids.
    """
    if reader.fingerprint == writer.fingerprint:
        return True
    if base_of(reader).fingerprint != base_of(writer).fingerprint:
        return False
    return not isinstance(reader, SubVocabulary) or declared_ids(writer) <= declared_ids(reader)
