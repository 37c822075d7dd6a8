"""The toy engine: continuous batching over a fixed KV cache, inside the event loop.

``generate`` queues a request and waits; ``_serve`` runs while there is work. Each turn of it
admits waiting requests to free slots in FIFO order, computes one fixed-shape step (prompt tokens
first, then one next token per running request) and gives the event loop a chance. Since a row of
a step depends on its own slot only, what a request gets back depends on its prompt, its seed and
the weights; company shows in ``cached_tokens`` and seconds alone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from miniverl_dist.backends.toy_inference import ToyDecoder
from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import (
    CheckpointError,
    PublishError,
)
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.weights import weights_checksum
from rollout_server.engines.jobs import Job
from rollout_server.engines.queued import QueuedEngine
from rollout_server.engines.sampling import sample
from rollout_server.engines.slots import SlotTable


@dataclass(eq=False)
class _Job(Job):
    """A request and its place in the cache."""

    slot: int = -1
    is_started: bool = False
    """False while it waits for a sibling to compute their shared prefix."""


@dataclass
class EngineCounters:
    """Work done since the engine was made."""

    num_steps: int = 0
    num_prefilled_tokens: int = 0
    num_decoded_tokens: int = 0


class ToyEngine(QueuedEngine[_Job]):
    """Samples from a toy decoder; see ``rollout_server.engines.base.Engine``.

    Args:
        config: Sizes; ``batch_slots`` requests run at once.
        vocabulary_ids: The real ids that the softmax covers.
        name: Names the engine in receipts and events.
    """

    def __init__(
        self, config: ToyModelConfig, vocabulary_ids: Sequence[int] | IntArray, name: str = "toy-0"
    ) -> None:
        self._model = ToyModel(config, vocabulary_ids)
        super().__init__(name, self._model.vocabulary, _Job, config.max_context_tokens)
        self.counters = EngineCounters()
        self._decoder = ToyDecoder(self._model, config.batch_slots)
        self._slots = SlotTable(config.batch_slots, config.max_context_tokens)

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """See ``Engine``."""
        try:
            async with self._loading:
                # Set when the last running request ends; nothing is admitted meanwhile.
                await self._quiet.wait()
                if self._is_closed:
                    raise PublishError(f"engine {self.name} is closed")
                return self._take_weights(snapshot)
        finally:
            # Also after a failure or a cancelled wait: requests may be queueing behind it.
            self._wake()

    async def close(self) -> None:
        """See ``Engine``."""
        self._abort_all()
        if self._serving is not None:
            # Ends by itself: nothing is left to serve.
            await asyncio.wait([self._serving])

    def _take_weights(self, snapshot: WeightSnapshot) -> str:
        try:
            self._model.load_arrays(snapshot.tensors)
        except CheckpointError as error:
            raise PublishError(
                f"engine {self.name} cannot take the weights of policy version "
                f"{snapshot.policy_version}: {error}"
            ) from error
        self._decoder.flush()
        self._slots.clear()
        self.weight_version = snapshot.policy_version
        return weights_checksum(self._model.arrays())

    @property
    def _has_work(self) -> bool:
        """False too while a load holds waiting requests back."""
        return bool(self._running or (self._waiting and not self._loading.locked()))

    async def _serve(self) -> None:
        while self._has_work:
            if not self._loading.locked():
                self._admit()
            self._start_jobs()
            self._step()
            # Lets callers queue, cancel and take their replies between two steps.
            await asyncio.sleep(0)

    def _admit(self) -> None:
        while self._waiting:
            slot = self._slots.reserve(self._waiting[0].prompt)
            if slot is None:
                return
            job = self._waiting.popleft()
            job.slot = slot
            self._running.append(job)
            self._quiet.clear()

    def _start_jobs(self) -> None:
        """Copy what is cached of each new prompt, unless a sibling is about to cache more."""
        for job in self._running:
            if job.is_started:
                continue
            found = self._slots.best_prefix(job.slot)
            if found is None:
                continue
            source, length = found
            if source != job.slot:
                self._decoder.copy_prefix(source, job.slot, length)
            self._slots.cached[job.slot] = job.cached_tokens = length
            job.is_started = True

    def _step(self) -> None:
        slots, positions = self._pick_rows()
        if not len(slots):
            return
        table = self._slots
        computed = np.bincount(slots, minlength=len(table.cached))
        emitting = positions == table.lengths[slots] - 1
        logits = self._decoder.step(
            slots, positions, table.tokens[slots, positions], want_logits=bool(emitting.any())
        )
        table.cached += computed
        self.counters.num_steps += 1
        if logits is None:
            return
        row_of_slot = dict(zip(slots[emitting].tolist(), np.flatnonzero(emitting), strict=True))
        jobs = [job for job in self._running if job.slot in row_of_slot]
        draws = np.array([job.draws[len(job.output)] for job in jobs])
        rows = np.array([row_of_slot[job.slot] for job in jobs])
        chosen, logprobs = sample(logits[rows], [job.params for job in jobs], draws)
        for job, token, logprob in zip(jobs, chosen.tolist(), logprobs.tolist(), strict=True):
            self._take_token(job, token, logprob)

    def _pick_rows(self) -> tuple[IntArray, IntArray]:
        """Slots and positions of the next step: prompts first, so that batches fill up early."""
        table, room = self._slots, self._decoder.num_rows
        slots: list[int] = []
        positions: list[int] = []
        for job in self._running:
            if job.is_started and not job.output:
                first, end = int(table.cached[job.slot]), int(table.lengths[job.slot])
                end = min(end, first + room - len(slots))
                slots += [job.slot] * (end - first)
                positions += range(first, end)
        num_prompt_rows = len(slots)
        slots += [job.slot for job in self._running if job.output][: room - num_prompt_rows]
        positions += table.cached[slots[num_prompt_rows:]].tolist()
        self.counters.num_prefilled_tokens += num_prompt_rows
        self.counters.num_decoded_tokens += len(slots) - num_prompt_rows
        return np.array(slots, dtype=np.int64), np.array(positions, dtype=np.int64)

    def _take_token(self, job: _Job, token: int, logprob: float) -> None:
        end = job.take(token, logprob)
        if end is None:
            self._slots.append(job.slot, token)
        else:
            self._finish(job, end)

    def _release(self, job: _Job) -> None:
        self._slots.release(job.slot)
