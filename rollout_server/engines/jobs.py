"""A request inside an engine: checked at arrival, filled token by token, answered once; torch-free.

Shapes: P prompt tokens.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import numpy as np

from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.errors import GenerateApiError, TokenizerMismatchError
from miniverl_dist.generate_api.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    SamplingParams,
    WeightVersion,
)
from miniverl_dist.schemas.batch import FloatArray, IntArray
from miniverl_dist.schemas.routing import ExpertRows, encode_engine_rows
from rollout_server.engines.sampling import check_sampling, uniforms


@dataclass(eq=False)
class Job:
    """One request; what stands above ``cached_tokens`` is fixed at arrival."""

    rid: str
    prompt: IntArray
    """[P] vocabulary rows."""
    params: SamplingParams
    stop_rows: frozenset[int]
    draws: FloatArray
    """One per new token; their number is the limit on new tokens."""
    return_logprob: bool
    future: asyncio.Future[GenerateReply]
    arrived_s: float
    cached_tokens: int = 0
    """Leading prompt tokens that were not computed for this request."""
    output: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    return_routed_experts: bool = False
    routing: list[ExpertRows] = field(default_factory=list)
    """[rows, layers, experts per token] of what has been fed, in order; empty without experts."""

    def take(self, token: int, logprob: float) -> Literal["stop", "length"] | None:
        """Append a sampled row; says whether, and why, the request has ended."""
        self.output.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_rows:
            return "stop"
        return "length" if len(self.output) == len(self.draws) else None

    def reply(
        self,
        kind: Literal["stop", "length", "abort"],
        vocabulary: AnyVocabulary,
        weight_version: int,
        message: str | None = None,
    ) -> GenerateReply:
        """What the request gets back, in real ids."""
        ids = vocabulary.ids[np.array(self.output, dtype=np.int64)].tolist()
        version = str(weight_version)
        logprobs = tuple((value, i, None) for value, i in zip(self.logprobs, ids, strict=True))
        meta = MetaInfo(
            id=self.rid,
            finish_reason=FinishReason(
                type=kind,
                length=len(ids) if kind == "length" else None,
                matched=ids[-1] if kind == "stop" else None,
                message=message,
            ),
            prompt_tokens=len(self.prompt),
            completion_tokens=len(ids),
            cached_tokens=self.cached_tokens,
            weight_version=version,
            weight_versions=(WeightVersion(version, 0, len(ids)),) if ids else (),
            output_token_logprobs=logprobs if self.return_logprob else None,
            routed_experts=self._routed_experts(),
            e2e_latency=time.perf_counter() - self.arrived_s,
        )
        return GenerateReply(meta_info=meta, output_ids=tuple(ids))

    def _routed_experts(self) -> str | None:
        """None without experts, as SGLang answers; of all tokens but the last, which is not fed."""
        if not self.return_routed_experts or not self.routing:
            return None
        return encode_engine_rows(np.concatenate(self.routing))


AnyJob = TypeVar("AnyJob", bound=Job)


def accept(
    request: GenerateRequest,
    vocabulary: AnyVocabulary,
    kind: type[AnyJob],
    *,
    max_context_tokens: int,
    engine: str,
    default_rid: str,
) -> AnyJob:
    """Check a request and turn it into a job of this kind; to be called inside the event loop.

    Raises:
        GenerateApiError: parameters no sampler can follow, a wish for input logprobs, a prompt
            that is empty, too long or of foreign ids; the message names ``engine``.
    """
    params, room = request.sampling_params, max_context_tokens - len(request.input_ids)
    check_sampling(params)
    if request.logprob_start_len >= 0 or request.top_logprobs_num > 0:
        raise GenerateApiError(
            f"engine {engine} returns logprobs of sampled tokens only, found logprob_start_len "
            f"{request.logprob_start_len} and top_logprobs_num {request.top_logprobs_num}: score "
            "inputs with a teacher server"
        )
    if not request.input_ids or room < 1:
        raise GenerateApiError(
            f"a prompt of {len(request.input_ids)} tokens does not leave room for one new token: "
            f"engine {engine} takes 1 to {max_context_tokens - 1} tokens (max_context_tokens "
            f"{max_context_tokens})"
        )
    try:
        prompt = vocabulary.rows(request.input_ids)
        is_stop = np.isin(vocabulary.ids, np.array(params.stop_token_ids, np.int64))
    except TokenizerMismatchError as error:
        raise GenerateApiError(f"engine {engine}: input_ids: {error}") from error
    except OverflowError as error:
        raise GenerateApiError(
            f"engine {engine}: input_ids or stop_token_ids: {error}; expected ids of 64 bits"
        ) from error
    return kind(
        rid=request.rid or default_rid,
        prompt=prompt,
        params=params,
        stop_rows=frozenset(np.flatnonzero(is_stop).tolist()),
        draws=uniforms(params.sampling_seed, min(params.max_new_tokens, room)),
        return_logprob=request.return_logprob,
        return_routed_experts=request.return_routed_experts,
        future=asyncio.get_running_loop().create_future(),
        arrived_s=time.perf_counter(),
    )
