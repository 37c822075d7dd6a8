"""Byte ends of the tokens of one model-written span, by one rule for student and teacher.

A turn end carries no bytes of text. Where the model wrote one at the end of its span, it counts as
one virtual byte behind the text on both sides, so that it is a unit of its own: left unscored,
stopping would get a bonus. Other special tokens carry no bytes and belong to no unit.

Shapes: S tokens of a span, turn end included; L tokens of text.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.tokens.tokenizer import TokenizerLike


def split_turn_end(
    span_token_ids: Sequence[int], turn_end_id: int | None
) -> tuple[tuple[int, ...], bool]:
    """The span's tokens without its final turn end, and whether it had one.

    Args:
        span_token_ids: [S].
        turn_end_id: None where turn ends are not scored (``raw`` rendering).
    """
    ids = tuple(span_token_ids)
    has_turn_end = turn_end_id is not None and ids[-1:] == (turn_end_id,)
    return (ids[:-1] if has_turn_end else ids), has_turn_end


def byte_ends(
    text_ids: Sequence[int], tokenizer: TokenizerLike, *, has_turn_end: bool
) -> NDArray[np.int64]:
    """[L (+ 1)] Offset from the span's start at which each token ends, and then the turn end."""
    ends = tokenizer.byte_table.ends(text_ids)
    if not has_turn_end:
        return ends
    text_bytes = ends[-1] if ends.size else 0
    return np.append(ends, text_bytes + 1)


def student_byte_ends(
    span_token_ids: Sequence[int], tokenizer: TokenizerLike, turn_end_id: int | None
) -> NDArray[np.int64]:
    """[S] Byte ends of a sampled span's tokens, non-decreasing.

    Args:
        span_token_ids: [S] ids as sampled, verbatim.
        tokenizer: The student's.
        turn_end_id: The student's turn end; None where turn ends are not scored (``raw``
            rendering), so that a final one carries no byte either.
    """
    text_ids, has_turn_end = split_turn_end(span_token_ids, turn_end_id)
    return byte_ends(text_ids, tokenizer, has_turn_end=has_turn_end)
