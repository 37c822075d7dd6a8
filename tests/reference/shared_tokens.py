"""Top-k targets across tokenizers, token by token and with exact sums."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from miniverl_dist.tokens.tokenizer import TokenizerLike


def student_id_of(
    teacher_id: int,
    student: TokenizerLike,
    teacher: TokenizerLike,
    turn_ends: tuple[int, int] | None,
) -> int | None:
    """Search the whole vocabulary for the same bytes; tokenizers without rivals only."""
    if turn_ends is not None and teacher_id == turn_ends[1]:
        return turn_ends[0]
    piece = teacher.byte_table.pieces[teacher_id]
    found = [i for i, other in enumerate(student.byte_table.pieces) if piece and other == piece]
    return found[0] if found else None


def map_row(
    ids: Sequence[int], logprobs: Sequence[float], counterpart: Mapping[int, int | None], k: int
) -> tuple[dict[int, float], float]:
    """Kept student ids with their logprobs, most likely first, and the mass of all else."""
    kept: dict[int, float] = {}
    for token_id, logprob in zip(ids, logprobs, strict=True):
        ours = counterpart[token_id]
        if ours is not None and len(kept) < k:
            kept[ours] = logprob
    return kept, 1.0 - math.fsum(math.exp(logprob) for logprob in kept.values())
