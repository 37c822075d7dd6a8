"""Wire models of SGLang's native ``/generate``: requests, replies, errors, and what they claim.

Source: recorded replies of SGLang 0.5.23; facts that the field names cannot say:

* an input logprob list starts at ``logprob_start_len`` and its first entry has no logprob: to
  score from token n on, ask n - 1 and drop one;
* input logprobs ignore the temperature, output logprobs are taken after it;
* a server may hold preferred sampling parameters, which fill in whatever a request leaves out: a
  request therefore spells out every parameter;
* an engine's -inf travels as null, as ``-Infinity`` or as the lowest float of its type.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, TypeVar, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import (
    MalformedReplyError,
    NotFiniteError,
    ReplyMismatchError,
    RequestRejectedError,
)

FinishType = Literal["stop", "length", "abort"]
T = TypeVar("T")

LOWEST_LOGPROB = -65504.0
"""Nats; the lowest float16. Nothing at or below is a logprob: engines clamp -inf to the lowest
float of their type, and this is the highest of those."""
ROUNDING_ABOVE_ZERO = 1e-3
"""Nats; a certain token may come out this far above 0 in reduced precision and counts as 0."""
_MAX_MESSAGE_CHARS = 500


class SamplingParams(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to sample; the defaults sample from the plain softmax."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_new_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()
    sampling_seed: int | None = None
    skip_special_tokens: bool = True
    no_stop_trim: bool = False


class GenerateRequest(msgspec.Struct, frozen=True):
    """One prompt. Unknown top-level fields are ignored, as SGLang does."""

    input_ids: tuple[int, ...]
    sampling_params: SamplingParams = msgspec.field(default_factory=SamplingParams)
    return_logprob: bool = False
    logprob_start_len: int = -1
    top_logprobs_num: int = 0
    return_text_in_logprobs: bool = False
    rid: str | None = None
    extra_key: str | None = None
    return_routed_experts: bool = False


class FinishReason(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why generation ended; ``matched`` is the stop id of a ``stop``."""

    type: FinishType
    length: int | None = None
    matched: int | str | None = None
    message: str | None = None


class WeightVersion(msgspec.Struct, frozen=True):
    """Generated tokens ``[start, end)`` were sampled under ``version``."""

    version: str
    start: int
    end: int


LogprobEntry = tuple[float | None, int, str | None]
"""(logprob in nats or null, token id, text or null)."""


class MetaInfo(msgspec.Struct, frozen=True):
    """What the engine reports beside the ids."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    weight_version: str = "default"
    weight_versions: tuple[WeightVersion, ...] = ()
    input_token_logprobs: tuple[LogprobEntry, ...] | None = None
    output_token_logprobs: tuple[LogprobEntry, ...] | None = None
    input_top_logprobs: tuple[Any, ...] | None = None
    output_top_logprobs: tuple[Any, ...] | None = None
    routed_experts: str | None = None
    """base64 of int32 [prompt and output - 1, layers, experts per token]; see `schemas.routing`."""
    e2e_latency: float | None = None


class GenerateReply(msgspec.Struct, frozen=True):
    """Reply to one prompt; ``output_ids`` includes a sampled stop id."""

    meta_info: MetaInfo
    output_ids: tuple[int, ...] = ()
    text: str = ""


class ScoredToken(msgspec.Struct, array_like=True, gc=False):
    """An entry of ``input_token_logprobs`` as a scorer needs it; a text behind it is skipped.

    Without ``gc=False`` a long reply sets off the garbage collector, several times; ``frozen``
    would cost another 5 %.
    """

    logprob: float | None
    token_id: int


class ScoringMeta(msgspec.Struct, frozen=True):
    """What a scorer needs of ``MetaInfo``."""

    finish_reason: FinishReason | None
    input_token_logprobs: list[ScoredToken] | None = None


class ScoringReply(msgspec.Struct, frozen=True):
    """Reply to ``scoring_request``: the form that decodes fastest."""

    meta_info: ScoringMeta


class ModelInfo(msgspec.Struct, frozen=True):
    """Reply of ``/model_info``; what may be None is our servers' own addition."""

    model_path: str
    is_generation: bool = True
    weight_version: str = "default"
    vocab_size: int | None = None
    max_context_tokens: int | None = None
    tokenizer_fingerprint: str | None = None


class ErrorBody(msgspec.Struct, frozen=True):
    """Body of a 4xx or 5xx reply."""

    message: str
    type: str | None = None
    code: int | None = None


class ErrorReply(msgspec.Struct, frozen=True):
    """The error form that SGLang uses."""

    error: ErrorBody


def _without_nulls(struct: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.asdict(struct)
    return {name: value for name, value in fields.items() if value is not None}


def encode_request(request: GenerateRequest) -> bytes:
    """JSON of one request, every sampling parameter spelled out and no nulls.

    Raises:
        RequestRejectedError: a number or a text that JSON cannot carry.
    """
    body = _without_nulls(request)
    body["sampling_params"] = _without_nulls(request.sampling_params)
    try:
        return msgspec.json.encode(body)
    except (OverflowError, UnicodeEncodeError) as exc:
        raise RequestRejectedError(f"the request cannot be written as JSON: {exc}") from exc


def encode_replies(replies: Sequence[GenerateReply], *, is_batch: bool) -> bytes:
    """JSON of the replies to one request; logprob lists that do not exist are left out."""
    bodies: list[dict[str, Any]] = [
        {
            "text": reply.text,
            "output_ids": reply.output_ids,
            "meta_info": _without_nulls(reply.meta_info)
            | {"finish_reason": reply.meta_info.finish_reason},
        }
        for reply in replies
    ]
    return msgspec.json.encode(bodies if is_batch else bodies[0])


def decode_json(data: bytes, form: type[T]) -> T:
    """Decode the body of a 200 reply, also one with Python's ``NaN`` and ``Infinity``.

    Raises:
        MalformedReplyError: no JSON, or not of the expected form.
    """
    try:
        return msgspec.json.decode(data, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as first:
        try:
            # Servers that write JSON with Python's own module emit NaN, which msgspec takes for
            # broken text. Read as a number it becomes what it is: a logprob that is not finite.
            return msgspec.convert(json.loads(data), type=form)
        except (ValueError, RecursionError):
            raise MalformedReplyError(
                f"reply of {len(data)} bytes is not the JSON expected: {first}"
            ) from first


def decode_reply(data: bytes) -> GenerateReply:
    """Decode the reply to one prompt; raises ``MalformedReplyError``."""
    return decode_json(data, GenerateReply)


def decode_batch_reply(data: bytes) -> list[GenerateReply]:
    """Decode the reply to a batch; raises ``MalformedReplyError``."""
    return decode_json(data, list[GenerateReply])


def error_message(data: bytes) -> str:
    """The sentence in an error body, in one line.

    Recorded forms: ``{"error": {"message": ...}}``, ``{"error": "..."}``, ``{"message": ...}``;
    anything else (a proxy's HTML) is given back as text.
    """
    try:
        body: object = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        body = None
    if isinstance(body, dict):
        inner = body.get("error", body)
        found = inner.get("message", inner.get("detail")) if isinstance(inner, dict) else inner
        if isinstance(found, str):
            return _one_line(found)
    return _one_line(data.decode("utf-8", errors="replace"))


def _one_line(text: str) -> str:
    return printable(text[: 2 * _MAX_MESSAGE_CHARS])[:_MAX_MESSAGE_CHARS] or "(empty body)"


def printable(text: str) -> str:
    """A server's words in one line, without what would steer a terminal or turn a line around."""
    line = " ".join(text.split())
    return line if line.isprintable() else "".join(c if c.isprintable() else "?" for c in line)


def version_key(policy_version: int) -> str:
    """The ``extra_key`` of requests to an engine whose weights change.

    A prefix cache that is not flushed at a publish answers with the old weights' values; prefixes
    of another key are not reused.
    """
    return f"policy-{policy_version}"


def scoring_request(
    input_ids: Sequence[int], start: int, *, extra_key: str | None = None
) -> GenerateRequest:
    """Ask for the logprobs of ``input_ids[start:]``; ``start`` >= 1, nothing predicts token 0.

    The list asked for starts one token earlier, because its first entry has no logprob. An earlier
    start would cost memory and keep the server from reusing its prefix cache.

    Args:
        input_ids: context and scored tokens.
        start: first scored token.
        extra_key: prefixes are reused only among requests of one key; see ``version_key``.
    """
    if not 1 <= start <= len(input_ids):
        raise ValueError(f"scoring starts at token {start}, expected 1 to {len(input_ids)}")
    return GenerateRequest(
        input_ids=tuple(input_ids),
        sampling_params=SamplingParams(max_new_tokens=0),
        return_logprob=True,
        logprob_start_len=start - 1,
        extra_key=extra_key,
    )


def decode_input_logprobs(
    reply: GenerateReply | ScoringReply, *, input_ids: Sequence[int], start: int
) -> NDArray[np.float64]:
    """Take the scores of ``input_ids[start:]`` out of the reply to ``scoring_request``.

    Returns:
        [len(input_ids) - start] nats, finite, <= 0.

    Raises:
        ReplyMismatchError: no list, another length, other ids, or a first entry with a logprob.
        NotFiniteError: a later entry that is null, NaN, infinite or above 0.
    """
    entries = reply.meta_info.input_token_logprobs
    asked = list(input_ids[start - 1 :])
    if entries is None or len(entries) != len(asked):
        found = "no input_token_logprobs" if entries is None else f"{len(entries)} entries"
        raise ReplyMismatchError(
            f"reply has {found}, expected {len(asked)} for tokens {start - 1} to {len(input_ids)}"
        )
    echoed, values = _columns(entries)
    if echoed != asked:
        where = next(i for i, (a, b) in enumerate(zip(echoed, asked, strict=True)) if a != b)
        raise ReplyMismatchError(
            f"reply is about token id {echoed[where]} at position {start - 1 + where}, "
            f"the request has id {asked[where]} there"
        )
    if values[0] is not None:
        raise ReplyMismatchError(
            f"first entry of input_token_logprobs carries logprob {values[0]}, expected null: "
            "the list may be shifted by one"
        )
    # What is missing becomes NaN, which the check refuses.
    return checked_logprobs(np.array(values[1:], dtype=np.float64), first_position=start)


def _columns(
    entries: Sequence[LogprobEntry] | Sequence[ScoredToken],
) -> tuple[list[int], list[float | None]]:
    """Ids and logprobs."""
    if isinstance(entries[0], ScoredToken):
        tokens = cast("Sequence[ScoredToken]", entries)
        return [token.token_id for token in tokens], [token.logprob for token in tokens]
    rows = cast("Sequence[LogprobEntry]", entries)
    return [row[1] for row in rows], [row[0] for row in rows]


def checked_logprobs(
    logprobs: NDArray[np.floating[Any]], *, first_position: int
) -> NDArray[np.float64]:
    """Pass on what can be a logprob; rounding above 0 becomes 0.

    Raises:
        NotFiniteError: an entry that is NaN, infinite, clamped from -inf, or above 0.
    """
    values = logprobs.astype(np.float64)
    is_good = (values > LOWEST_LOGPROB) & (values <= ROUNDING_ABOVE_ZERO)
    if not is_good.all():
        where = int(np.flatnonzero(~is_good)[0])
        raise NotFiniteError(
            f"logprob {values[where]} at position {first_position + where} "
            f"({int((~is_good).sum())} of {len(values)} unusable); expected finite values <= 0"
        )
    return cast("NDArray[np.float64]", np.minimum(values, 0.0))
