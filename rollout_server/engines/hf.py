"""The rollout engine on transformers: small models of the Qwen3 family, on the CPU or one GPU.

``generate`` queues a request and waits; ``_serve`` runs while there is work. Each turn of it admits
waiting requests in FIFO order while there are free slots, has the worker thread compute one token
of every running request, and hands the tokens out. Only the worker touches the model and its
caches, only the event loop touches requests, and the two never work on a step at the same time.

What a request samples depends on its prompt, its seed and the weights; company moves logits by
rounding only (matrix products of other shapes), so that a draw within 1e-6 or so of the border
between two tokens may fall the other way. torch's threads are those of the process.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.errors import CheckpointError, ConfigError, EngineError, PublishError
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.batch import FloatArray, IntArray
from rollout_server.engines.hf_decoder import BatchDecoder, DecoderCounters, empty_model
from rollout_server.engines.hf_weights import fill, held_checksum, matched_views
from rollout_server.engines.jobs import Job, accept
from rollout_server.engines.sampling import sample

T = TypeVar("T")

KEPT_PER_SLOT = 2
"""Caches kept per slot: the prompt of a request, and all it has fed when it ended."""


class HFEngine:
    """Samples from a transformers model; see ``rollout_server.engines.base.Engine``.

    Args:
        folder: Holds ``config.json``; weights in it are not read, they come by ``load_weights``.
        vocabulary: The real ids that the softmax covers, in the order of the embedding's rows.
        batch_slots: Requests decoded at once. Memory: so many caches, and twice as many kept ones.
        max_context_tokens: Of prompt and output; a model with a shorter context has its own.
        dtype: ``float32`` or ``bfloat16``; published weights must have it too.
        name: Names the engine in receipts and events.
        device: As torch names it.

    Raises:
        ConfigError: the folder's model is unsupported or has fewer rows than the vocabulary.
    """

    def __init__(
        self,
        folder: Path,
        vocabulary: AnyVocabulary,
        *,
        batch_slots: int = 16,
        max_context_tokens: int = 16_384,
        dtype: Literal["float32", "bfloat16"] = "float32",
        name: str = "hf-0",
        device: str = "cpu",
    ) -> None:
        self.name = name
        self.weight_version = -1
        self._model = empty_model(folder, dtype=dtype, device=device)
        config = self._model.config
        if len(vocabulary) > config.vocab_size:
            raise ConfigError(
                f"the vocabulary has {len(vocabulary)} ids, but {folder.name}/config.json gives "
                f"the embedding {config.vocab_size} rows (vocab_size): another tokenizer's model?"
            )
        self._vocabulary = vocabulary
        self._batch_slots = batch_slots
        self._max_context_tokens = min(max_context_tokens, config.max_position_embeddings)
        self._decoder = BatchDecoder(self._model, len(vocabulary), KEPT_PER_SLOT * batch_slots)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._waiting: deque[Job] = deque()
        self._running: list[Job] = []
        self._serving: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._loading = asyncio.Lock()
        self._is_closed = False
        self._num_requests = 0

    @property
    def counters(self) -> DecoderCounters:
        """Work done since the engine was made."""
        return self._decoder.counters

    @property
    def num_rows(self) -> int:
        """Rows of the batch that hold memory."""
        return self._decoder.num_rows

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """See ``Engine``."""
        if self._is_closed:
            raise EngineError(f"engine {self.name} is closed")
        if self.weight_version < 0:
            raise EngineError(f"engine {self.name} holds no weights yet: load_weights comes first")
        self._num_requests += 1
        job = accept(
            request,
            self._vocabulary,
            Job,
            max_context_tokens=self._max_context_tokens,
            engine=self.name,
            default_rid=f"{self.name}-{self._num_requests}",
        )
        self._waiting.append(job)
        self._wake()
        try:
            # Resolved by _serve when the request ends, by close, or by _serve's own failure.
            return await job.future
        finally:
            self._forget(job)

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """See ``Engine``."""
        async with self._loading:
            # Set when the last running request ends; nothing is admitted meanwhile.
            await self._quiet.wait()
            if self._is_closed:
                raise PublishError(f"engine {self.name} is closed")
            return await self._in_worker(self._take_weights, snapshot)

    async def close(self) -> None:
        """See ``Engine``."""
        self._is_closed = True
        for job in [*self._running, *self._waiting]:
            self._finish(job, "abort", f"engine {self.name} was closed")
        if self._serving is not None:
            # Ends by itself: it drops the rows of what has just ended.
            await asyncio.wait([self._serving])
        # Waits for a load that has begun.
        async with self._loading:
            self._worker.shutdown(wait=False)
            self._decoder.clear()
            self._model.to("meta")

    async def _in_worker(self, work: Callable[..., T], *args: object) -> T:
        """Run ``work`` in the worker thread and wait for its end, even when cancelled."""
        running = asyncio.get_running_loop().run_in_executor(self._worker, work, *args)
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            # A thread cannot be stopped; whoever comes next must not meet its half of the work.
            await asyncio.wait([running])
            raise

    def _take_weights(self, snapshot: WeightSnapshot) -> str:
        try:
            views = matched_views(self._model, snapshot.tensors)
        except CheckpointError as error:
            raise PublishError(
                f"engine {self.name} cannot take the weights of policy version "
                f"{snapshot.policy_version}: {error}"
            ) from error
        self._decoder.clear()
        try:
            fill(views, snapshot.tensors)
        except BaseException:
            # The device failed half way through: there is no version that the weights are of.
            self.weight_version = -1
            raise
        self.weight_version = snapshot.policy_version
        return held_checksum(views)

    def _wake(self) -> None:
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name=f"{self.name} serving")
            self._serving.add_done_callback(self._on_served)

    async def _serve(self) -> None:
        # Rows without a request are those that have just ended or were cancelled. While a load
        # holds waiting requests back, the turns of this loop queue behind it in the worker.
        while self._running or self._waiting or self._decoder.num_rows:
            if not self._loading.locked():
                self._admit()
            jobs = tuple(self._running)
            # Waits for one forward pass; callers queue, cancel and take replies meanwhile.
            tokens, logprobs = await self._in_worker(self._step, jobs)
            for job, token, logprob in zip(jobs, tokens.tolist(), logprobs.tolist(), strict=True):
                # A request that was cancelled meanwhile takes its token too; nobody sees it.
                ended = job.take(token, logprob)
                if ended is not None:
                    self._finish(job, ended)

    def _on_served(self, task: asyncio.Task[None]) -> None:
        """Hand a failure of the serving task to everyone who waits for it."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        for job in [*self._running, *self._waiting]:
            if not job.future.done():
                failure = EngineError(f"engine {self.name} failed while decoding: {error!r}")
                failure.__cause__ = error
                job.future.set_exception(failure)
            self._forget(job)

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._batch_slots:
            self._running.append(self._waiting.popleft())
            self._quiet.clear()

    def _step(self, jobs: Sequence[Job]) -> tuple[IntArray, FloatArray]:
        """One token of each job with its logprob; runs in the worker thread."""
        logits = self._decoder.step(jobs)
        if not jobs:
            return np.zeros(0, dtype=np.int64), np.zeros(0)
        draws = np.array([job.draws[len(job.output)] for job in jobs])
        return sample(logits, [job.params for job in jobs], draws)

    def _finish(
        self, job: Job, kind: Literal["stop", "length", "abort"], message: str | None = None
    ) -> None:
        if not job.future.done():
            job.future.set_result(job.reply(kind, self._vocabulary, self.weight_version, message))
        self._forget(job)

    def _forget(self, job: Job) -> None:
        """Free what a request holds; nothing to do when it has ended already."""
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._running:
            self._running.remove(job)
        if not self._running:
            self._quiet.set()
