"""Reading what clients send to ``/generate``: measured first, then decoded.

The text of a batch is short where it is compressed, and its objects are many: they are counted
before they are made, so that no body holds up the event loop or fills the memory.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from miniverl_dist.errors import RequestRejectedError
from miniverl_dist.generate_api.wire import GenerateRequest, SamplingParams

T = TypeVar("T")

_FIELD_BYTES, _FIELD_BYTES_PER_PROMPT = 64 * 2**10, 4 * 2**10
"""For all that a body says beside ``input_ids``."""


class _Envelope(msgspec.Struct, frozen=True):
    """What a long body is measured by; the rest is skipped."""

    input_ids: msgspec.Raw = msgspec.Raw(b"null")


class _WireRequest(msgspec.Struct, frozen=True):
    """A request as it may arrive: one prompt or a batch, any field one value or one per prompt."""

    input_ids: msgspec.Raw = msgspec.Raw(b"null")
    sampling_params: SamplingParams | list[SamplingParams] | None = None
    return_logprob: bool | list[bool] | None = None
    logprob_start_len: int | list[int] | None = None
    top_logprobs_num: int | list[int] | None = None
    return_text_in_logprobs: bool | None = None
    rid: str | list[str | None] | None = None
    extra_key: str | list[str | None] | None = None
    return_routed_experts: bool | list[bool] | None = None
    stream: bool | None = None


def decode_requests(
    data: bytes, *, max_prompts: int = 2**30, max_context_tokens: int = 2**30
) -> tuple[list[GenerateRequest], bool]:
    """Read a body of ``POST /generate``.

    Where one key occurs twice in an object, the last one counts, as in most readers of JSON.

    Args:
        data: JSON; however long, its objects are not made before they have been counted.
        max_prompts: of a batch.
        max_context_tokens: of a prompt; here for all of them together.

    Returns:
        ``(requests, is_batch)``; a batch is answered by a list, whatever its length.

    Raises:
        RequestRejectedError: the body does not follow the contract; one bad item spoils a batch.
    """
    _require_short_fields(data, max_prompts)
    wire = _decode_body(data, _WireRequest)
    if wire.stream:
        raise RequestRejectedError("stream: true is unsupported, the server answers in one piece")
    raw = bytes(wire.input_ids).strip()
    if raw == b"null":
        raise RequestRejectedError("input_ids are required (text prompts are not supported)")
    is_batch = raw[:1] == b"[" and raw[1:].lstrip()[:1] == b"["
    _require_countable(raw, is_batch, max_prompts, max_context_tokens)
    if is_batch:
        prompts = _decode_body(raw, list[tuple[int, ...]], where="input_ids: ")
    else:
        prompts = [_decode_body(raw, tuple[int, ...], where="input_ids: ")]
    count = len(prompts)
    columns = (
        _spread("sampling_params", wire.sampling_params, count, SamplingParams()),
        _spread("return_logprob", wire.return_logprob, count, default=False),
        _spread("logprob_start_len", wire.logprob_start_len, count, -1),
        _spread("top_logprobs_num", wire.top_logprobs_num, count, 0),
        [bool(wire.return_text_in_logprobs)] * count,
        _spread("rid", _separate(wire.rid, count), count, None),
        _spread("extra_key", wire.extra_key, count, None),
        _spread("return_routed_experts", wire.return_routed_experts, count, default=False),
    )
    return [
        GenerateRequest(ids, *fields) for ids, *fields in zip(prompts, *columns, strict=True)
    ], is_batch


def _require_short_fields(data: bytes, max_prompts: int) -> None:
    allowed = _FIELD_BYTES + _FIELD_BYTES_PER_PROMPT * max_prompts
    if len(data) <= allowed:
        return
    beside = len(data) - len(bytes(_decode_body(data, _Envelope).input_ids))
    if beside > allowed:
        raise RequestRejectedError(
            f"the body has {beside} bytes beside input_ids, expected at most {allowed} for "
            f"{max_prompts} prompts",
            status=413,
        )


def _require_countable(
    raw: bytes, is_batch: bool, max_prompts: int, max_context_tokens: int
) -> None:
    """Refuse by brackets and commas: every prompt has one of these, every id but one of those."""
    num_prompts = raw.count(b"[") - is_batch
    if is_batch and num_prompts > max_prompts:
        raise RequestRejectedError(f"a batch of {num_prompts} prompts, expected 1 to {max_prompts}")
    num_tokens = raw.count(b",") + 1
    if num_tokens > max_context_tokens * (max_prompts if is_batch else 1):
        together = f" in each of {max_prompts} prompts" if is_batch else ""
        raise RequestRejectedError(
            f"{num_tokens} input tokens exceed the context length of {max_context_tokens} "
            f"tokens{together}"
        )


def _decode_body(data: bytes, form: type[T], where: str = "") -> T:
    try:
        return msgspec.json.decode(data, type=form)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as exc:
        raise RequestRejectedError(f"{where}{exc}") from exc


def _separate(rid: str | list[str | None] | None, count: int) -> str | list[str | None] | None:
    """A batch under one rid gets one per prompt, since a rid names one request."""
    if isinstance(rid, str) and count > 1:
        return [f"{rid}_{index}" for index in range(count)]
    return rid


def _spread(name: str, value: T | list[T] | None, count: int, default: T) -> list[T]:
    if value is None:
        return [default] * count
    if not isinstance(value, list):
        return [value] * count
    if len(value) != count:
        raise RequestRejectedError(f"{name} has {len(value)} entries for {count} prompts")
    return value
