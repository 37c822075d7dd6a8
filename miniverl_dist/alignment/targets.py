"""A teacher's tokens as tokens of the student: those that stand for the same bytes."""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.schemas.targets import NO_TOKEN
from miniverl_dist.tokens.identity import base_of, declared_ids
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike

IntArray = NDArray[np.int64]


def shared_ids(
    student: TokenizerLike, teacher: TokenizerLike, turn_ends: tuple[int, int] | None
) -> IntArray:
    """For each id of the teacher, the student's id for the same bytes.

    Special tokens carry no bytes and have no counterpart, but for the two turn ends. Of several
    ids with the same bytes one stands for them all: the one that its tokenizer writes for these
    bytes, else the smallest. Two tokenizers with the same ids share all that both have declared.

    Takes a fraction of a second for real vocabularies: do it once per pair.

    Args:
        student: Whose ids the rows hold; of a sub-vocabulary, declared ids only.
        teacher: Whose distributions they are; likewise.
        turn_ends: Ids of student and teacher that end a turn; None where they do not correspond.

    Returns:
        [ids of the teacher] student ids, each at most once; ``NO_TOKEN`` where there is none.
    """
    shared = np.full(teacher.vocab_size, NO_TOKEN, dtype=np.int64)
    if base_of(student).fingerprint == base_of(teacher).fingerprint:
        common = np.array(sorted(declared_ids(student) & declared_ids(teacher)), dtype=np.int64)
        shared[common] = common
    else:
        ours, theirs = _by_bytes(student), _by_bytes(teacher)
        for piece in ours.keys() & theirs.keys():
            shared[theirs[piece]] = ours[piece]
    if turn_ends is not None:
        student_end, teacher_end = turn_ends
        shared[shared == student_end] = NO_TOKEN
        shared[teacher_end] = student_end
    return shared


def _by_bytes(tokenizer: TokenizerLike) -> dict[bytes, int]:
    """The id that stands for each piece of text."""
    ids = _carrying_text(tokenizer)
    pieces = [tokenizer.byte_table.pieces[token_id] for token_id in ids]
    found = dict(zip(reversed(pieces), reversed(ids), strict=True))  # the smallest id comes last
    if len(found) == len(ids):
        return found
    for piece, times in Counter(pieces).items():
        written = tokenizer.encode_bytes(piece) if times > 1 else []
        if len(written) == 1:
            found[piece] = written[0]
    return found


def _carrying_text(tokenizer: TokenizerLike) -> list[int]:
    """Declared ids with bytes, rising."""
    lengths = tokenizer.byte_table.lengths
    if isinstance(tokenizer, SubVocabulary):
        return [token_id for token_id in tokenizer.ids if lengths[token_id]]
    carrying: list[int] = np.flatnonzero(lengths).tolist()
    return carrying
