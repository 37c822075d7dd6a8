"""The rollout engine on transformers: small models of any family, on the CPU or one GPU.

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
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np

from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.errors import CheckpointError, ConfigError, PublishError
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.batch import FloatArray, IntArray
from rollout_server.engines.hf_check import decoding_problem
from rollout_server.engines.hf_decoder import KNOWN, BatchDecoder, DecoderCounters, empty_model
from rollout_server.engines.hf_weights import fill, held_checksum, matched_views
from rollout_server.engines.jobs import Job
from rollout_server.engines.queued import QueuedEngine
from rollout_server.engines.sampling import sample

T = TypeVar("T")

KEPT_PER_SLOT = 2
"""Caches kept per slot: the prompt of a request, and all it has fed when it ended."""


class HFEngine(QueuedEngine[Job]):
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
        self._model = empty_model(folder, dtype=dtype, device=device)
        config = self._model.config
        if len(vocabulary) > config.vocab_size:
            raise ConfigError(
                f"the vocabulary has {len(vocabulary)} ids, but {folder.name}/config.json gives "
                f"the embedding {config.vocab_size} rows (vocab_size): another tokenizer's model?"
            )
        longest = min(max_context_tokens, config.max_position_embeddings)
        super().__init__(name, vocabulary, Job, longest)
        self._batch_slots = batch_slots
        self._decoder = BatchDecoder(self._model, len(vocabulary), KEPT_PER_SLOT * batch_slots)
        self._is_trusted = config.model_type in KNOWN
        """Whether decoding in company gives what a pass without a cache gives."""
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    @property
    def counters(self) -> DecoderCounters:
        """Work done since the engine was made."""
        return self._decoder.counters

    @property
    def num_rows(self) -> int:
        """Rows of the batch that hold memory."""
        return self._decoder.num_rows

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
        self._abort_all()
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
        if not self._is_trusted and (problem := decoding_problem(self._model, self._decoder)):
            self.weight_version = -1
            raise PublishError(f"engine {self.name} cannot sample from this model: {problem}")
        self._is_trusted = True
        self.weight_version = snapshot.policy_version
        return held_checksum(views)

    @property
    def _has_work(self) -> bool:
        """True too for rows without a request: those that have just ended or were cancelled."""
        return bool(self._running or self._waiting or self._decoder.num_rows)

    async def _serve(self) -> None:
        # While a load holds waiting requests back, the turns of this loop queue behind it in the
        # worker.
        while self._has_work:
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
