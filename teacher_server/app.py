"""The teacher's server: ``/generate`` for scoring only, and what its operators look at."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from aiohttp import web

from miniverl_dist.errors import RequestRejectedError, ServerUnavailableError
from miniverl_dist.generate_api.app import ServerLimits, build_app
from miniverl_dist.generate_api.bearer import BearerToken
from miniverl_dist.generate_api.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    LogprobEntry,
    MetaInfo,
    ModelInfo,
    WeightVersion,
)
from teacher_server.admission import TokenAdmission
from teacher_server.batching import (
    BatchScorer,
    OneByOne,
    ScoredBatch,
    ScoreJob,
    ScoreQueue,
    ScoreResult,
    TextScorer,
)
from teacher_server.service_metrics import CONTENT_TYPE, ServiceMetrics

__all__ = ["ServiceLimits", "SglangLikeHandler", "TextScorer", "build_teacher_app"]

WEIGHT_VERSION = "default"
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServiceLimits:
    """What a teacher's server takes; the fields of ``config.serve`` of the same names."""

    max_queued_tokens: int = 2**20
    """Prompt tokens that wait or are at work; 429 above."""
    max_body_bytes: int = 64 * 2**20
    max_batch_size: int = 256
    """Prompts of one request."""
    max_requests: int = 1024
    """Prompts that wait or are at work; 503 above."""
    max_top_logprobs: int = 64
    body_deadline_s: float = 60.0
    score_deadline_s: float = 600.0
    """For one prompt, the wait for those before it included; 503 afterwards."""
    max_retry_after_s: float = 60.0


class SglangLikeHandler:
    """Answers scoring requests as SGLang does: echoed ids, null first, temperature ignored.

    Scores run in one thread of their own: health checks go on meanwhile.
    """

    def __init__(self, scorer: TextScorer, limits: ServiceLimits | None = None) -> None:
        self._limits = limits or ServiceLimits()
        self._scorer = scorer
        batches = scorer if isinstance(scorer, BatchScorer) else None
        self._queue = ScoreQueue(batches or OneByOne(scorer), self._count)
        self._max_top = 0 if batches is None else self._limits.max_top_logprobs
        self.admission = TokenAdmission(
            self._limits.max_queued_tokens, max_retry_after_s=self._limits.max_retry_after_s
        )
        self.metrics = ServiceMetrics(
            {
                "queued_tokens": lambda: self.admission.num_tokens,
                "queued_texts": lambda: self.admission.num_texts,
                "kept_tokens": lambda: 0 if batches is None else batches.num_kept_tokens,
            }
        )

    async def close(self) -> None:
        """End the thread after the batch at work, or leave it; scores that wait are cancelled."""
        if not await self._queue.close():
            _log.warning("a forward pass was still at work; its scores are thrown away")

    def model_info(self) -> ModelInfo:
        """The scorer's model."""
        return ModelInfo(
            model_path=self._scorer.name,
            weight_version=WEIGHT_VERSION,
            vocab_size=self._scorer.vocab_size,
            max_context_tokens=self._scorer.max_context_tokens,
            tokenizer_fingerprint=self._scorer.tokenizer_fingerprint,
        )

    def check(self, request: GenerateRequest) -> None:
        """Refuse generation and ids that the model does not have."""
        if request.sampling_params.max_new_tokens != 0:
            raise RequestRejectedError(
                f"max_new_tokens is {request.sampling_params.max_new_tokens}: this server only "
                "scores, expected 0"
            )
        if request.return_text_in_logprobs:
            raise RequestRejectedError("return_text_in_logprobs is not supported by this server")
        if request.top_logprobs_num and not self._max_top:
            raise RequestRejectedError("top_logprobs_num is not supported by this server's scorer")
        if request.top_logprobs_num > self._max_top:
            raise RequestRejectedError(
                f"top_logprobs_num is {request.top_logprobs_num}, expected at most {self._max_top}"
            )
        self._scorer.check(request.input_ids)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Score one text from ``logprob_start_len`` on."""
        started = time.monotonic()
        result = await self._scored(request) if request.return_logprob else None
        entries = None if result is None else _entries(request, result)
        top = None if result is None or not request.top_logprobs_num else _top_entries(result)
        return GenerateReply(
            meta_info=MetaInfo(
                id=request.rid or uuid.uuid4().hex,
                finish_reason=FinishReason(type="length", length=0),
                prompt_tokens=len(request.input_ids),
                completion_tokens=0,
                cached_tokens=0 if result is None else result.num_cached_tokens,
                weight_version=WEIGHT_VERSION,
                weight_versions=(WeightVersion(version=WEIGHT_VERSION, start=0, end=0),),
                input_token_logprobs=entries,
                output_token_logprobs=None if entries is None else (),
                input_top_logprobs=top if top is None or not entries else (None, *top),
                output_top_logprobs=None if top is None else (),
                e2e_latency=time.monotonic() - started,
            )
        )

    async def _scored(self, request: GenerateRequest) -> ScoreResult:
        ids, first = request.input_ids, request.logprob_start_len
        if first == -1 or first >= len(ids) - 1:
            return ScoreResult(np.empty(0))  # nothing to compute: at most the token without a score
        job = ScoreJob(np.asarray(ids, dtype=np.int64), first + 1, request.top_logprobs_num)
        try:
            # Waits for the texts before it in the scorer's thread.
            async with asyncio.timeout(self._limits.score_deadline_s):
                return await self._queue.score(job)
        except TimeoutError:
            raise ServerUnavailableError(
                f"not scored within {self._limits.score_deadline_s:.3g} s"
            ) from None

    def _count(self, jobs: Sequence[ScoreJob], batch: ScoredBatch, seconds: float) -> None:
        asked = sum(len(job.token_ids) for job in jobs)
        cached = sum(result.num_cached_tokens for result in batch.results.values())
        self.admission.measured(asked, seconds)
        self.metrics.add("texts_total", len(jobs))
        self.metrics.add("asked_tokens_total", asked)
        self.metrics.add("cached_tokens_total", cached)
        self.metrics.add("prefilled_tokens_total", asked - cached)
        self.metrics.add("padding_tokens_total", batch.num_padding_tokens)
        self.metrics.add("batches_total", 1)
        self.metrics.add("scoring_seconds_total", seconds)


def _entries(request: GenerateRequest, result: ScoreResult) -> tuple[LogprobEntry, ...]:
    ids, first = request.input_ids, request.logprob_start_len
    if first == -1 or first == len(ids):
        return ()
    later = zip(result.logprobs.tolist(), ids[first + 1 :], strict=True)
    return ((None, ids[first], None), *((score, token, None) for score, token in later))


def _top_entries(result: ScoreResult) -> tuple[list[LogprobEntry], ...]:
    """One list for each position that has a score, the most likely first."""
    if result.top is None:
        return ()
    rows = zip(result.top.logprobs.tolist(), result.top.ids.tolist(), strict=True)
    return tuple([(lp, token, None) for lp, token in zip(*row, strict=True)] for row in rows)


def build_teacher_app(
    scorer: TextScorer,
    *,
    limits: ServiceLimits | None = None,
    token: BearerToken | None = None,
) -> web.Application:
    """The app around a scorer, ``GET /metrics`` included; its thread ends with the app."""
    limits = limits or ServiceLimits()
    handler = SglangLikeHandler(scorer, limits)
    app = build_app(
        handler,
        limits=ServerLimits(
            vocab_size=scorer.vocab_size,
            max_context_tokens=scorer.max_context_tokens,
            max_body_bytes=limits.max_body_bytes,
            max_batch_size=limits.max_batch_size,
            max_requests=limits.max_requests,
            body_deadline_s=limits.body_deadline_s,
        ),
        admit=handler.admission.admit,
        token=token,
        observe=handler.metrics.answered,
    )

    async def metrics(request: web.Request) -> web.Response:
        del request
        return web.Response(text=handler.metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def close(app: web.Application) -> None:
        del app
        await handler.close()

    app.router.add_get("/metrics", metrics)
    app.on_cleanup.append(close)
    return app
