"""The hf student: any causal LM of transformers on one device, all of its weights or LoRA.

An update that fails leaves everything as it was, at this cost: with LoRA, adapter and moments are
kept twice while it runs. Whole weights are not: until the first optimizer step of the update
nothing has changed but gradients, which are dropped; a failure behind it (in the second of several
minibatches) cannot be undone and raises ``StudentLostError``, upon which the loop goes back to the
newest commit.

Shapes: N packed tokens, B sequences.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from miniverl_dist.backends.accumulated import (
    SUMS,
    AccumulatedParts,
    require_no_parts,
    require_one_minibatch,
)
from miniverl_dist.backends.adamw import learning_rate
from miniverl_dist.backends.base import in_buckets
from miniverl_dist.backends.distilled import RowLoss, open_stages
from miniverl_dist.backends.hf_adapters import REFERENCE
from miniverl_dist.backends.hf_checkpoint import HFCheckpoint
from miniverl_dist.backends.hf_optimizer import MasterAdamW
from miniverl_dist.backends.hf_steps import HFSteps
from miniverl_dist.backends.hf_student import HFStudent
from miniverl_dist.backends.padding import (
    Microbatch,
    cut_microbatches,
    minibatches,
    sequences_with_targets,
)
from miniverl_dist.backends.policy_step import (
    StepArrays,
    denominators_of,
    require_finite,
    step_arrays,
)
from miniverl_dist.backends.tensors import as_numpy, as_tensor
from miniverl_dist.backends.update_report import update_report
from miniverl_dist.backends.vocabulary import FullVocabulary
from miniverl_dist.backends.weights_io import TokenizerIdentity
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.config.roles import HFStudentConfig
from miniverl_dist.errors import BatchError, StudentLostError
from miniverl_dist.objective.policy_loss import Metrics
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.batch import FloatArray, IntArray, SftBatch, TrainBatch, UpdateResult
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.weights import NamedArrays, weights_checksum


class HFBackend:
    """Trains a transformers model; see ``backends.base.StudentBackend``.

    Args:
        config: The model.
        vocab_rows: Ids that the tokenizer has; the softmax covers no further row.
        tokenizer: Whose ids these are; stored with the weights and compared on load.
        loss: Policy loss; a reference policy is kept when ``kl_coef`` is above 0.
        optim: AdamW and its schedule.
        num_steps: Batches of the whole run, where the ``linear`` schedule ends.
        seed: Of new adapters and of dropout.
        base_sha256: Of the folder's files; a LoRA checkpoint belongs to one of them.
        rows: How whole distributions are compared; None where no batch asks for it.

    Raises:
        ConfigError: a folder, device or layer that cannot be trained so.
        MissingDependencyError: transformers, or what quantisation needs.
    """

    def __init__(  # noqa: PLR0913 -- things that mean different things, named at the call
        self,
        config: HFStudentConfig,
        vocab_rows: int,
        tokenizer: TokenizerIdentity,
        *,
        loss: LossConfig,
        optim: OptimConfig,
        num_steps: int,
        seed: int = 0,
        base_sha256: str = "",
        rows: RowLoss | None = None,
    ) -> None:
        self.policy_version = 0
        self.num_updates = 0
        """Batches trained on; the learning rate follows it."""
        self.vocabulary = FullVocabulary(vocab_rows)
        self._config = config
        self._loss = loss
        self._optim = optim
        self._num_steps = num_steps
        self._seed = seed
        self._row_loss = rows
        self.student = HFStudent(config, vocab_rows, with_reference=loss.kl_coef > 0, seed=seed)
        self._optimizer = MasterAdamW(self.student.trained, optim)
        self._steps = HFSteps(self.student, self._optimizer, loss)
        self._checkpoint = HFCheckpoint(self.student, tokenizer, base_sha256)
        self._parts = AccumulatedParts()
        self._lost = ""
        """Why nothing but a load helps; empty otherwise."""

    @property
    def sends_weights(self) -> bool:
        """See ``StudentBackend``: the only rank sends all."""
        return True

    def update(self, batch: TrainBatch) -> UpdateResult:
        """See ``StudentBackend``."""
        started_s = time.perf_counter()
        self._require_whole()
        require_no_parts(self._parts, "an update")
        rows = self.vocabulary.rows(batch.token_ids)
        steps = minibatches(batch, self._config.max_microbatch_tokens)
        lr = learning_rate(self._optim, self.num_updates, self._num_steps)
        halvings: list[tuple[int, int]] = []
        with self._all_or_nothing():
            arrays = self._arrays(batch, rows, [part for parts in steps.values() for part in parts])
            taken = [
                self._optimizer_step(arrays, batch, minibatch, parts, lr, halvings)
                for minibatch, parts in steps.items()
            ]
        self.policy_version += len(taken)
        self.num_updates += 1
        metrics = update_report(taken)
        metrics |= {"lr": lr, "seconds_update": time.perf_counter() - started_s}
        return UpdateResult(self.policy_version, len(taken), metrics, tuple(halvings))

    def accumulate(self, batch: TrainBatch, place: int) -> None:
        """See ``StudentBackend``; each part's gradients are kept, and summed at the commit."""
        started_s = time.perf_counter()
        self._require_whole()
        with self._all_or_nothing():
            require_one_minibatch(batch)
            rows = self.vocabulary.rows(batch.token_ids)
            ((_, cuts),) = minibatches(batch, self._config.max_microbatch_tokens).items()
            arrays, seed = self._arrays(batch, rows, cuts), self._dropout_seed(place)
            metrics = self._steps.policy_gradients(arrays, batch, cuts, SUMS, None, seed)
            require_finite(float(metrics["loss"]))
            self._parts.add(place, batch, metrics, self._optimizer.take_gradients(), started_s)

    def commit_accumulated(self) -> UpdateResult:
        """See ``StudentBackend``."""
        started_s = time.perf_counter()
        self._require_whole()
        parts, self._parts = self._parts, AccumulatedParts()
        divisor = parts.divisor(self._loss.reduction)
        lr = learning_rate(self._optim, self.num_updates, self._num_steps)
        with self._all_or_nothing():
            self._optimizer.give_gradients(parts.gradients, divisor)
            norm = self._optimizer.step(lr)
        self.policy_version += 1
        self.num_updates += 1
        metrics = update_report([parts.step_metrics(self._loss.reduction) | {"grad_norm": norm}])
        metrics |= {"lr": lr, "seconds_update": parts.seconds + time.perf_counter() - started_s}
        return UpdateResult(self.policy_version, 1, metrics)

    def discard_accumulated(self) -> None:
        """See ``StudentBackend``."""
        self._parts = AccumulatedParts()
        self._optimizer.take_gradients()

    def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        """See ``StudentBackend``. Mean cross-entropy over the masked tokens."""
        self._require_whole()
        require_no_parts(self._parts, "a supervised step")
        rows = self.vocabulary.rows(batch.token_ids)
        num_tokens = int(batch.loss_mask.sum())
        if num_tokens == 0:
            raise BatchError("a supervised batch without a token to learn from")
        chosen = sequences_with_targets(batch.sequence_starts, batch.loss_mask)
        parts = self._cut(batch.sequence_starts, chosen)
        with self._all_or_nothing():
            loss = self._steps.sft_gradients(
                rows, parts, batch.loss_mask, num_tokens, self._dropout_seed("sft")
            )
            require_finite(loss)
            norm = self._optimizer.step(learning_rate)
        return {"loss": loss, "grad_norm": norm, "num_loss_tokens": float(num_tokens)}

    def finish_warmup(self) -> None:
        """See ``StudentBackend``."""
        self._require_whole()
        self._optimizer.reset()
        self.student.freeze_reference()

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """See ``StudentBackend``."""
        self._require_whole()
        rows = self.vocabulary.rows(batch.token_ids)
        parts = self._cut(batch.sequence_starts, np.arange(len(batch.group_ids)))
        mask = np.ones(len(rows), dtype=np.bool_)
        mask[batch.sequence_starts[:-1]] = False
        return self._steps.logprobs(rows, parts, mask, batch.temperature)

    def snapshot(self) -> WeightSnapshot:
        """See ``StudentBackend``; adapters are merged, so any engine can hold the weights."""
        self._require_whole()
        tensors = {name: as_numpy(weight).copy() for name, weight in self.student.merged()}
        return WeightSnapshot(self.policy_version, tensors, weights_checksum(tensors))

    def export(self, bucket_bytes: int) -> Iterator[Mapping[str, Any]]:
        """See ``StudentBackend``; under the names that the model has in transformers' memory."""
        self._require_whole()
        yield from in_buckets(self.student.merged(), bucket_bytes)

    def load_weights(self, tensors: NamedArrays) -> None:
        """See ``StudentBackend``; with LoRA, these are the actor's adapter."""
        values = {name: as_tensor(np.array(array)) for name, array in tensors.items()}
        self.student.check(values)
        self.student.take(values)
        self._optimizer.take_weights()

    def start_from(self, directory: Path, policy_version: int) -> None:
        """Take the actor's weights or adapter of a checkpoint, and nothing else of it.

        Raises:
            CheckpointError, TokenizerMismatchError: see ``HFCheckpoint.read``.
        """
        _, weights = self._checkpoint.read_actor(directory, policy_version)
        self._begin_with(weights)

    def start_from_adapter(self, factors: Mapping[str, Tensor]) -> None:
        """Begin with an adapter of the actor's own form.

        Raises:
            CheckpointError: of another form.
        """
        self.student.check(factors)
        self._begin_with(factors)

    def _begin_with(self, weights: Mapping[str, Tensor]) -> None:
        self.student.take(weights)
        self._optimizer.take_weights()
        self.student.freeze_reference()

    def save(self, directory: Path) -> None:
        """See ``StudentBackend``."""
        self._require_whole()
        self._checkpoint.save(directory, self._optimizer, self.policy_version, self.num_updates)

    def load(self, directory: Path, policy_version: int) -> None:
        """See ``StudentBackend``."""
        stored = self._checkpoint.read(directory, policy_version)
        self.discard_accumulated()
        self._checkpoint.take(stored, self._optimizer)
        self.policy_version = policy_version
        self.num_updates = stored.counters.num_updates
        self._lost = ""

    def close(self) -> None:
        """See ``StudentBackend``; nothing works afterwards."""
        self._lost = "it has been closed"
        self.discard_accumulated()
        self.student.model.module.to("meta")

    def _cut(self, sequence_starts: IntArray, sequences: IntArray) -> list[Microbatch]:
        return cut_microbatches(sequence_starts, sequences, self._config.max_microbatch_tokens)

    def _arrays(self, batch: TrainBatch, rows: IntArray, parts: list[Microbatch]) -> StepArrays:
        score = partial(self._steps.logprobs, rows, parts, batch.loss_mask, batch.temperature)
        reference = partial(score, REFERENCE) if self.student.has_reference else None
        return step_arrays(batch, rows, self._loss, score, reference)

    def _optimizer_step(
        self,
        arrays: StepArrays,
        batch: TrainBatch,
        minibatch: int,
        parts: list[Microbatch],
        lr: float,
        halvings: list[tuple[int, int]],
    ) -> Metrics:
        chunk_size = self._steps.chunk_size
        stages = open_stages(self._row_loss, batch, minibatch, chunk_size, halvings)
        denominators, seed = denominators_of(batch, minibatch), self._dropout_seed(minibatch)
        merged = self._steps.policy_gradients(arrays, batch, parts, denominators, stages, seed)
        self._steps.chunk_size = chunk_size if stages is None else stages.chunk_size
        require_finite(float(merged["loss"]))
        return merged | {"grad_norm": self._optimizer.step(lr)}

    def _dropout_seed(self, what: int | str) -> int:
        """The same after a resume: it depends on counters that a checkpoint holds."""
        return derive_seed(self._seed, self.policy_version, self._optimizer.num_steps, what)

    def _require_whole(self) -> None:
        if self._lost:
            raise StudentLostError(
                f"the student cannot be used ({self._lost}): load the newest commit"
            )

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Errors inside leave the student as it was, or lost; see the module's docstring."""
        undo: Callable[[], None] | None = None
        if self.student.adapters is not None:
            undo = self._optimizer.undo()
        before = self._optimizer.num_steps
        try:
            yield
        except BaseException as error:
            self.discard_accumulated()
            steps = self._optimizer.num_steps - before
            if undo is not None:
                undo()
            elif steps:
                self._lost = f"{steps} optimizer step(s) of a failed update were already taken"
                raise StudentLostError(
                    f"{type(error).__name__}: {error}; {self._lost}: load the newest commit"
                ) from error
            raise
