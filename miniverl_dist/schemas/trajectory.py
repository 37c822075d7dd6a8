"""The trajectory: the frozen token record of one episode.

Shapes: T tokens of the whole episode, context and sampled.
"""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from miniverl_dist.errors import MaskMismatchError, RecordError
from miniverl_dist.schemas.messages import CallError, FrozenModel, Message, ParsedCall
from miniverl_dist.schemas.routing import RoutedExperts


class SpanKind(StrEnum):
    """Origin of a run of tokens."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT_TEXT = "assistant_text"
    ASSISTANT_TOOL_CALL = "assistant_tool_call"
    ASSISTANT_FINAL = "assistant_final"
    TOOL_RESULT = "tool_result"


ASSISTANT_KINDS = frozenset(
    {SpanKind.ASSISTANT_TEXT, SpanKind.ASSISTANT_TOOL_CALL, SpanKind.ASSISTANT_FINAL}
)


class Termination(StrEnum):
    """Why an episode ended; exactly one per trajectory."""

    FINAL_ANSWER = "final_answer"
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    PARSE_ERROR_LIMIT = "parse_error_limit"
    TOOL_ERROR_LIMIT = "tool_error_limit"
    REPEATED_CALL_LIMIT = "repeated_call_limit"
    EOS_WITHOUT_FINAL = "eos_without_final"
    DEADLINE = "deadline"
    ENVIRONMENT_ERROR = "environment_error"
    ENGINE_ERROR = "engine_error"


HARNESS_TERMINATIONS = frozenset(
    {Termination.DEADLINE, Termination.ENVIRONMENT_ERROR, Termination.ENGINE_ERROR}
)
"""Ends that are not the model's doing: excluded from training and counted."""


class Span(FrozenModel):
    """Tokens ``[start, end)`` of one origin.

    A span holds one message's tokens with the template's markers around them; an assistant span
    holds only what the model (or the oracle, for prefix calls) wrote, its turn end included.
    """

    kind: SpanKind
    start: Annotated[int, Field(ge=0)]
    end: int
    segment_key: str
    """Names the segment across renderings of the same episode, for instance ``assistant:3``."""
    sampled: bool = False
    """True where the policy wrote the tokens in this episode (prefix calls are False)."""
    message_index: int | None = None
    """Index into ``Trajectory.messages``; None for a span that renders no message."""
    weight_versions: tuple[int, ...] = ()
    """Policy versions that sampled the span, oldest first; empty unless ``sampled``."""


class SamplingRecord(FrozenModel):
    """Sampling parameters an episode was made with."""

    temperature: float
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int


def _to_logprob_array(value: object) -> NDArray[np.float64]:
    if isinstance(value, np.ndarray):
        array = value.astype(np.float64)
    elif isinstance(value, list | tuple):
        array = np.array([math.nan if v is None else v for v in value], dtype=np.float64)
    else:
        raise RecordError(
            f"rollout_logprobs must be a list of numbers and nulls, got {type(value).__name__}"
        )
    array.setflags(write=False)
    return array


def _from_logprob_array(array: NDArray[np.float64]) -> list[float | None]:
    return [None if math.isnan(v) else v for v in array.tolist()]


LogprobArray = Annotated[
    NDArray[np.float64], PlainValidator(_to_logprob_array), PlainSerializer(_from_logprob_array)
]
"""[T] nats; NaN in memory and null on disk where no logprob exists, never 0.0."""


def mask_from_spans(spans: tuple[Span, ...], num_tokens: int) -> list[bool]:
    """[T] True on sampled tokens; position 0 never (nothing predicts it)."""
    mask = [False] * num_tokens
    for span in spans:
        if span.sampled:
            mask[span.start : span.end] = [True] * (span.end - span.start)
    if mask:
        mask[0] = False
    return mask


class Trajectory(FrozenModel):
    """One finished episode. Sampled ids are stored verbatim; nothing is ever re-tokenised."""

    model_config = FrozenModel.model_config | {"arbitrary_types_allowed": True}

    trajectory_id: str
    group_id: str
    task_id: str
    environment: str
    prefix_calls: Annotated[int, Field(ge=0)]
    tail_calls: Annotated[int, Field(ge=0)]
    tokenizer_fingerprint: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    loss_mask: tuple[bool, ...]
    rollout_logprobs: LogprobArray
    messages: tuple[Message, ...]
    tool_calls: tuple[ParsedCall, ...]
    """Calls that the policy attempted in this episode, in order."""
    exec_successes: tuple[bool, ...]
    """One per attempted call."""
    call_errors: tuple[CallError | None, ...] = ()
    """One per attempted call, None where it worked or could not be read; empty in records of
    earlier versions."""
    reward: float
    reward_parts: dict[str, float]
    passed: bool
    verdict: dict[str, bool | float | str | None]
    termination: Termination
    sampling: SamplingRecord
    seed: int
    routed_experts: RoutedExperts | None = None
    """[R, layers, experts per token], R <= T: the engine's routing of the first R tokens; None
    where it was not asked for."""
    notes: dict[str, Any] = Field(default_factory=dict)
    """Free diagnostics (seconds, error text); no result may depend on them."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        num_tokens = len(self.token_ids)
        for name in ("loss_mask", "rollout_logprobs"):
            found = len(getattr(self, name))
            if found != num_tokens:
                raise RecordError(
                    f"trajectory {self.trajectory_id}: {name} has {found} entries "
                    f"for {num_tokens} tokens"
                )
        self._check_spans_tile(num_tokens)
        if list(self.loss_mask) != mask_from_spans(self.spans, num_tokens):
            raise MaskMismatchError(
                f"trajectory {self.trajectory_id}: stored loss_mask differs from the mask "
                "its spans define"
            )
        self._check_logprobs()
        if self.routed_experts is not None and len(self.routed_experts) > num_tokens:
            raise RecordError(
                f"trajectory {self.trajectory_id}: routed_experts has {len(self.routed_experts)} "
                f"rows for {num_tokens} tokens"
            )
        if len(self.exec_successes) != len(self.tool_calls):
            raise RecordError(
                f"trajectory {self.trajectory_id}: {len(self.exec_successes)} exec_successes "
                f"for {len(self.tool_calls)} tool_calls"
            )
        if self.call_errors and len(self.call_errors) != len(self.tool_calls):
            raise RecordError(
                f"trajectory {self.trajectory_id}: {len(self.call_errors)} call_errors "
                f"for {len(self.tool_calls)} tool_calls"
            )
        return self

    def _check_logprobs(self) -> None:
        """Finite on every sampled token; nothing at all (not even an infinity) on the others."""
        sampled = np.array(self.loss_mask, dtype=bool)
        is_wrong = np.where(
            sampled, ~np.isfinite(self.rollout_logprobs), ~np.isnan(self.rollout_logprobs)
        )
        if is_wrong.any():
            where = int(np.flatnonzero(is_wrong)[0])
            raise RecordError(
                f"trajectory {self.trajectory_id}: {'sampled' if sampled[where] else 'context'} "
                f"token {where} has rollout logprob {self.rollout_logprobs[where]}, expected "
                f"{'a finite number' if sampled[where] else 'none (NaN, null on disk)'}"
            )

    def _check_spans_tile(self, num_tokens: int) -> None:
        position = 0
        for index, span in enumerate(self.spans):
            if span.start != position or span.end < span.start:
                raise RecordError(
                    f"trajectory {self.trajectory_id}: span {index} covers [{span.start}, "
                    f"{span.end}), expected it to start at {position}: spans tile the tokens "
                    "with no gap or overlap"
                )
            if span.sampled and (span.kind not in ASSISTANT_KINDS or not span.weight_versions):
                raise RecordError(
                    f"trajectory {self.trajectory_id}: span {index} is sampled but has kind "
                    f"{span.kind} and weight versions {span.weight_versions}"
                )
            position = span.end
        if position != num_tokens:
            raise RecordError(
                f"trajectory {self.trajectory_id}: spans end at {position}, tokens at {num_tokens}"
            )

    @property
    def sampled_spans(self) -> tuple[Span, ...]:
        """Spans that the policy wrote in this episode."""
        return tuple(span for span in self.spans if span.sampled)

    @property
    def is_trainable(self) -> bool:
        """False for harness faults and episodes without one trainable token."""
        return self.termination not in HARNESS_TERMINATIONS and any(self.loss_mask)

    @property
    def oldest_version(self) -> int:
        """Oldest policy version that sampled a token of this trajectory (0 when none did)."""
        return min((v for span in self.sampled_spans for v in span.weight_versions), default=0)
