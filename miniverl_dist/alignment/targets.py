"""A teacher's most likely tokens as tokens of the student: those that stand for the same bytes.

Shapes: V_teacher ids of the teacher, m rows, k' tokens that the teacher gives, k that are kept.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import BatchError
from miniverl_dist.schemas.targets import NO_TOKEN, TopKTargets
from miniverl_dist.tokens.identity import base_of, declared_ids
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float64]


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
        [V_teacher] student ids, each at most once; ``NO_TOKEN`` where there is none.
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


def map_top_k(
    ids: IntArray, logprobs: FloatArray, entropies: FloatArray, shared: IntArray, k: int
) -> TopKTargets:
    """Keep of each row the k most likely tokens that the student has too; the rest is the tail.

    The tail is what the kept tokens leave of 1: tokens without a counterpart, tokens beyond k, and
    what the teacher has not named. It is -inf where they leave nothing, up to rounding.

    Args:
        ids: [m, k'] teacher ids, distinct within a row; ``NO_TOKEN`` where a row has fewer.
        logprobs: [m, k'] nats, falling within a row; -inf where there is no token.
        entropies: [m] nats of the teacher's whole distribution.
        shared: [V_teacher] from `shared_ids`.
        k: At least 1.

    Raises:
        BatchError: arrays of other shapes or order, an id beyond the teacher's vocabulary, one
            that stands twice in a row, or a row with more mass than 1.
    """
    _check_rows(ids, logprobs, shared)
    named = (ids >= 0) & np.isfinite(logprobs)
    found = np.where(named, shared[ids], NO_TOKEN)
    is_kept = found >= 0
    rank = np.cumsum(is_kept, axis=1) - 1
    is_kept &= rank < k
    rows = np.nonzero(is_kept)[0]
    token_ids = np.full((len(ids), k), NO_TOKEN, dtype=np.int64)
    kept_logprobs = np.full((len(ids), k), -np.inf)
    token_ids[rows, rank[is_kept]] = found[is_kept]
    kept_logprobs[rows, rank[is_kept]] = logprobs[is_kept]
    masses = np.where(named, np.exp(logprobs), 0.0)
    dropped = np.where(is_kept, 0.0, masses).sum(axis=1)
    # Adding what is dropped to what is not named, instead of subtracting what is kept from 1:
    # a small tail keeps its digits.
    tail = dropped + _unnamed(masses)
    with np.errstate(divide="ignore"):
        return TopKTargets(token_ids, kept_logprobs, np.log(tail), entropies)


def _unnamed(masses: FloatArray) -> FloatArray:
    """[m] what the named tokens leave of 1; 0 where that is no more than the sum's rounding."""
    left = 1.0 - masses.sum(axis=1)
    rounding = np.finfo(np.float64).eps * (masses.shape[1] + 1)
    return np.where(left > rounding, left, 0.0)


def _check_rows(ids: IntArray, logprobs: FloatArray, shared: IntArray) -> None:
    if ids.ndim != 2 or ids.shape != logprobs.shape:
        raise BatchError(
            f"teacher's top-k holds ids {list(ids.shape)} and logprobs {list(logprobs.shape)}, "
            "expected [rows, k] twice"
        )
    if ids.size and not NO_TOKEN <= ids.min() <= ids.max() < len(shared):
        raise BatchError(
            f"teacher's top-k holds ids {ids.min()} .. {ids.max()}, its vocabulary has "
            f"{len(shared)}"
        )
    if not (logprobs[:, 1:] <= logprobs[:, :-1]).all():  # NaN fails too
        raise BatchError("teacher's top-k: logprobs must fall within a row, most likely first")
    ranked = np.sort(ids, axis=1)
    if ((ranked[:, 1:] == ranked[:, :-1]) & (ranked[:, 1:] >= 0)).any():
        raise BatchError("teacher's top-k: an id stands twice in a row")


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
