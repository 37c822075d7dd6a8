"""What engines in this process share: requests that wait, run, end or fail; torch-free.

``generate`` queues a job and waits for its future. An engine's ``_serve``, started by ``_wake``,
takes jobs from ``_waiting`` to ``_running`` and ends each with ``_finish``, until there is no work.
``_quiet`` is set while nothing runs: that is when weights may change.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from typing import Generic, Literal

from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.errors import EngineError
from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from rollout_server.engines.jobs import AnyJob, accept


class QueuedEngine(ABC, Generic[AnyJob]):
    """Base of engines that decode in this process; see ``rollout_server.engines.base.Engine``.

    Args:
        name: Names the engine in receipts and events.
        vocabulary: The real ids that the softmax covers.
        job: What a request becomes.
        max_context_tokens: Of prompt and output.
    """

    def __init__(
        self, name: str, vocabulary: AnyVocabulary, job: type[AnyJob], max_context_tokens: int
    ) -> None:
        self.name = name
        self.weight_version = -1
        self._vocabulary, self._kind = vocabulary, job
        self._max_context_tokens = max_context_tokens
        self._waiting: deque[AnyJob] = deque()
        self._running: list[AnyJob] = []
        self._serving: asyncio.Task[None] | None = None
        self._quiet = asyncio.Event()
        self._quiet.set()
        self._loading = asyncio.Lock()
        self._is_closed = False
        self._num_requests = 0

    async def start(self) -> None:
        """See ``Engine``: it stands already."""

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
            self._kind,
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

    @property
    @abstractmethod
    def _has_work(self) -> bool:
        """Whether ``_serve`` would have something to do."""

    @abstractmethod
    async def _serve(self) -> None:
        """Serve until there is no work."""

    def _wake(self) -> None:
        if self._has_work and (self._serving is None or self._serving.done()):
            self._serving = asyncio.create_task(self._serve(), name=f"{self.name} serving")
            self._serving.add_done_callback(self._on_served)

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

    def _abort_all(self) -> None:
        """Take no more requests, and end all there are."""
        self._is_closed = True
        for job in [*self._running, *self._waiting]:
            self._finish(job, "abort", f"engine {self.name} was closed")

    def _finish(
        self, job: AnyJob, kind: Literal["stop", "length", "abort"], message: str | None = None
    ) -> None:
        if not job.future.done():
            job.future.set_result(job.reply(kind, self._vocabulary, self.weight_version, message))
        self._forget(job)

    def _forget(self, job: AnyJob) -> None:
        """Free what a request holds; nothing to do when it has ended already."""
        if job in self._waiting:
            self._waiting.remove(job)
        if job in self._running:
            self._running.remove(job)
            self._release(job)
        if not self._running:
            self._quiet.set()

    def _release(self, job: AnyJob) -> None:
        """Free what a running request holds beside its place in the queue."""
