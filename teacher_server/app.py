"""The teacher's server: ``/generate`` for scoring only, one text at a time."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from miniverl_dist.errors import RequestRejectedError
from miniverl_dist.generate_api.app import ServerLimits, build_app
from miniverl_dist.generate_api.wire import (
    FinishReason,
    GenerateReply,
    GenerateRequest,
    LogprobEntry,
    MetaInfo,
    ModelInfo,
    WeightVersion,
)

WEIGHT_VERSION = "default"


class TextScorer(Protocol):
    """What scores texts; ``teacher_server.scorer.PrefillScorer``, without torch in sight."""

    @property
    def name(self) -> str:
        """The model's name."""

    @property
    def vocab_size(self) -> int:
        """Ids are below; not every id need be known."""

    @property
    def max_context_tokens(self) -> int:
        """Longest text."""

    @property
    def tokenizer_fingerprint(self) -> str | None:
        """Whose ids it reads; None where the model does not say."""

    def check(self, token_ids: Sequence[int]) -> None:
        """Raise ``RequestRejectedError`` for a text that cannot be scored."""

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.floating[Any]]:
        """[L - start] nats of ``token_ids[start:]``; blocks, and takes one call at a time."""


class SglangLikeHandler:
    """Answers scoring requests as SGLang does: echoed ids, null first, temperature ignored.

    Scores run in one thread of its own, in order of arrival: health checks go on meanwhile, and
    no score shares its forward pass with another.
    """

    def __init__(self, scorer: TextScorer) -> None:
        self._scorer = scorer
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="scorer")

    def close(self) -> None:
        """End the thread after the score at work; scores that wait are cancelled."""
        self._thread.shutdown(wait=True, cancel_futures=True)

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
        if request.top_logprobs_num or request.return_text_in_logprobs:
            raise RequestRejectedError(
                "top_logprobs_num and return_text_in_logprobs are not supported by this server"
            )
        self._scorer.check(request.input_ids)

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Score one text from ``logprob_start_len`` on."""
        started = time.monotonic()
        entries = await self._entries(request) if request.return_logprob else None
        return GenerateReply(
            meta_info=MetaInfo(
                id=request.rid or uuid.uuid4().hex,
                finish_reason=FinishReason(type="length", length=0),
                prompt_tokens=len(request.input_ids),
                completion_tokens=0,
                weight_version=WEIGHT_VERSION,
                weight_versions=(WeightVersion(version=WEIGHT_VERSION, start=0, end=0),),
                input_token_logprobs=entries,
                output_token_logprobs=None if entries is None else (),
                e2e_latency=time.monotonic() - started,
            )
        )

    async def _entries(self, request: GenerateRequest) -> tuple[LogprobEntry, ...]:
        ids, first = request.input_ids, request.logprob_start_len
        if first == -1 or first == len(ids):
            return ()
        # Waits for the texts before it in the scorer's thread.
        scores = await asyncio.get_running_loop().run_in_executor(
            self._thread, self._scorer.score, ids, first + 1
        )
        later = zip(scores.tolist(), ids[first + 1 :], strict=True)
        return ((None, ids[first], None), *((score, token, None) for score, token in later))


def build_teacher_app(scorer: TextScorer) -> web.Application:
    """The app around a scorer; its thread ends with the app."""
    handler = SglangLikeHandler(scorer)
    app = build_app(
        handler,
        limits=ServerLimits(
            vocab_size=scorer.vocab_size, max_context_tokens=scorer.max_context_tokens
        ),
    )

    async def close(app: web.Application) -> None:
        del app
        await asyncio.to_thread(handler.close)

    app.on_cleanup.append(close)
    return app
