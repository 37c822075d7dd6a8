"""What the teacher says about one trajectory: a score, or a typed refusal.

Shapes: R teacher tokens of one span.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, model_validator

from miniverl_dist.errors import RecordError, StaleScoreError
from miniverl_dist.schemas.messages import FrozenModel


class RefusalReason(StrEnum):
    """Why a trajectory has no teacher score."""

    TOO_LONG = "too_long"
    UNAVAILABLE = "unavailable"
    NOT_FINITE = "not_finite"
    MISMATCH = "mismatch"
    """The reply does not match the request: other ids, other length."""
    REJECTED = "rejected"
    """The server turned the request down (4xx)."""


class SpanScore(FrozenModel):
    """Teacher's view of one sampled span.

    Token r ends ``byte_ends[r]`` bytes after the span's start. A turn end stands for one virtual
    byte behind the text on both sides, so that it is a unit of its own.
    """

    span_index: int
    """Index into ``Trajectory.spans``."""
    token_ids: tuple[int, ...]
    byte_ends: tuple[int, ...]
    logprobs: tuple[float, ...]
    """[R] nats, finite, <= 0."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not len(self.token_ids) == len(self.byte_ends) == len(self.logprobs):
            raise RecordError(
                f"span {self.span_index}: {len(self.token_ids)} teacher ids, {len(self.byte_ends)} "
                f"byte ends, {len(self.logprobs)} logprobs; expected equal lengths"
            )
        logprobs = np.asarray(self.logprobs)
        if not np.isfinite(logprobs).all() or (logprobs > 0).any():
            raise RecordError(
                f"span {self.span_index}: teacher logprobs must be finite and <= 0; such a reply "
                "is a refusal (not_finite), not a score"
            )
        return self


class TeacherScore(FrozenModel):
    """Scores of all sampled spans of one trajectory."""

    kind: Literal["score"] = "score"
    trajectory_id: str
    teacher_id: str
    tokenizer_fingerprint: str
    policy_version: int
    """Oldest version of the trajectory this score was made for."""
    spans: tuple[SpanScore, ...]
    num_prefill_tokens: int
    seconds: float

    def require_version(self, policy_version: int) -> None:
        """Raise ``StaleScoreError`` unless the score was made for ``policy_version``."""
        if self.policy_version != policy_version:
            raise StaleScoreError(
                f"teacher score of {self.trajectory_id} was made for policy version "
                f"{self.policy_version}, the trajectory is of version {policy_version}"
            )


class TeacherRefusal(FrozenModel):
    """A trajectory that the teacher did not score; counted, never guessed."""

    kind: Literal["refusal"] = "refusal"
    trajectory_id: str
    reason: RefusalReason
    detail: str


TeacherResult = Annotated[TeacherScore | TeacherRefusal, Field(discriminator="kind")]
