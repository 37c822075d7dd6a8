"""Trajectories, renderings and scorers for tests of the teacher's client and server."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import RequestRejectedError
from miniverl_dist.schemas.trajectory import Span, SpanKind, Trajectory
from teacher_server.client import TeacherIdentity
from teacher_server.rendering import RenderedSpan, TeacherRendering
from tests.support.bare_trajectory import bare_trajectory

IDENTITY = TeacherIdentity(teacher_id="teacher", tokenizer_fingerprint="f" * 64)


def trajectory(
    name: str = "t0", *, num_tokens: int = 6, versions: tuple[int, ...] = (4, 3)
) -> Trajectory:
    """One user span and one sampled span."""
    sampled = SpanKind.ASSISTANT_FINAL
    spans = (
        Span(kind=SpanKind.USER, start=0, end=2, segment_key="user:0"),
        Span(
            kind=sampled,
            start=2,
            end=num_tokens,
            segment_key="assistant:0",
            sampled=True,
            weight_versions=versions,
        ),
    )
    return bare_trajectory(
        name,
        range(num_tokens),
        spans,
        environment="calculator",
        tokenizer_fingerprint="s" * 64,
    )


def rendering(token_ids: Sequence[int], *ranges: tuple[int, int]) -> TeacherRendering:
    """A rendering whose scored spans are ``ranges``; every token is one byte."""
    spans = tuple(
        RenderedSpan(
            span_index=index + 1,
            start=start,
            end=end,
            byte_ends=tuple(range(1, end - start + 1)),
            student_byte_ends=(),
        )
        for index, (start, end) in enumerate(ranges)
    )
    return TeacherRendering(tuple(token_ids), spans)


class SumScorer:
    """A token's logprob is minus the sum of all ids up to it, in thousandths."""

    name = "sum"
    vocab_size = 512
    max_context_tokens = 64
    tokenizer_fingerprint: str | None = IDENTITY.tokenizer_fingerprint

    def __init__(self) -> None:
        self.asked: list[tuple[tuple[int, ...], int]] = []
        self.spoil: dict[int, float] = {}

    def check(self, token_ids: Sequence[int]) -> None:
        """13 is unknown."""
        if 13 in token_ids:
            raise RequestRejectedError("token id 13 is not among the ids of this model")

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float64]:
        """[L - start]."""
        self.asked.append((tuple(token_ids), start))
        scores = -np.cumsum(np.asarray(token_ids, dtype=np.float64)) / 1000
        for position, value in self.spoil.items():
            scores[position] = value
        return scores[start:]
