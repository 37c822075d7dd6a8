"""One rank of a Megatron student; see ``backends.base.StudentBackend``.

All ranks of a student hold the same batch and call the same method at the same time; every
collective lies within these methods. Whatever can be found out without the other ranks (foreign
ids, nothing to train on) is found out before the first collective, and equally on every rank.

Shapes: N packed tokens, B sequences, M predictions of a microbatch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from miniverl_dist.backends.accumulated import (
    SUMS,
    AccumulatedParts,
    require_no_parts,
    require_one_minibatch,
)
from miniverl_dist.backends.adamw import learning_rate
from miniverl_dist.backends.megatron import device
from miniverl_dist.backends.megatron.accumulate import reduce_gradients, unreduced_gradients
from miniverl_dist.backends.megatron.architecture import Architecture
from miniverl_dist.backends.megatron.arrays import reader
from miniverl_dist.backends.megatron.data import RankMicrobatch, rank_microbatches
from miniverl_dist.backends.megatron.optimizer_state import OptimizerState
from miniverl_dist.backends.megatron.policy import PolicyArrays, policy_loss_function
from miniverl_dist.backends.megatron.reference import FrozenWeights
from miniverl_dist.backends.megatron.routing_replay import check_rows
from miniverl_dist.backends.megatron.setup import build_model, build_optimizer
from miniverl_dist.backends.megatron.step import (
    LossFunction,
    Scored,
    agreed_step,
    packed_logprobs,
    rank_layout,
    score,
    train_microbatches,
)
from miniverl_dist.backends.megatron.student_folder import Counters, StudentFolder
from miniverl_dist.backends.megatron.weights import (
    HFFolder,
    export,
    is_stage_sender,
    load_hf,
)
from miniverl_dist.backends.padding import sequences_with_targets
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.backends.tensors import as_numpy
from miniverl_dist.backends.update_report import update_report
from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.backends.weights_io import TokenizerIdentity
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.config.roles import MegatronModelConfig
from miniverl_dist.errors import (
    BatchError,
    ConfigError,
    MiniverlError,
    StudentLostError,
)
from miniverl_dist.objective.policy_loss import Metrics, reference_kl_penalty
from miniverl_dist.objective.reduction import Denominators
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.batch import (
    BoolArray,
    FloatArray,
    IntArray,
    SftBatch,
    TrainBatch,
    UpdateResult,
)
from miniverl_dist.schemas.routing import PackedRows
from miniverl_dist.schemas.weights import NamedArrays, weights_checksum


class MegatronBackend:
    """Trains this rank's share of a megatron-core decoder.

    Args:
        model: Layout and numerics.
        arch: The decoder; its vocabulary size is that of ``vocabulary``.
        hf_folder: Hugging Face folder with the initial weights.
        tokenizer: Whose ids the batches hold; stored with the weights and compared on load.
        vocabulary: Row of each id.
        loss: Policy loss; a reference policy is kept when ``kl_coef`` is above 0.
        optim: AdamW and its schedule.
        num_steps: Batches of the whole run, where the ``linear`` schedule ends.
        seed: Of whatever the weights do not cover.
        address: Of this rank; alone by default.
        timeout_s: For the ranks to meet, and for every collective.

    Raises:
        ConfigError: ranks, layout and decoder do not fit each other.
        CheckpointError: the folder does not hold this decoder.
    """

    def __init__(  # noqa: PLR0913 -- what a rank is and where it stands, named at the call
        self,
        model: MegatronModelConfig,
        arch: Architecture,
        hf_folder: Path,
        tokenizer: TokenizerIdentity,
        vocabulary: AnyVocabulary,
        *,
        loss: LossConfig,
        optim: OptimConfig,
        num_steps: int,
        seed: int = 0,
        address: RankAddress | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        _check(model, arch, vocabulary, loss)
        self._config = model
        self._join(address or RankAddress(), timeout_s)
        self.policy_version = 0
        self.num_updates = 0
        """Batches trained on; the learning rate follows it."""
        self.model = build_model(arch, model, seed=seed)
        load_hf(self.model, HFFolder(hf_folder).read)
        self.optimizer = build_optimizer(self.model, optim, distributed=model.distributed_optimizer)
        self._vocabulary = vocabulary
        self._loss = loss
        self._optim = optim
        self._num_steps = num_steps
        self._layout = rank_layout(self.model)
        self._state = OptimizerState(self.model.module, self.optimizer)
        self._num_optimizer_steps = 0
        self._reference = FrozenWeights(self.model.module) if loss.kl_coef > 0 else None
        self._folder = StudentFolder(self.model, model, tokenizer)
        self._parts = AccumulatedParts()
        self._lost = ""

    @property
    def sends_weights(self) -> bool:
        """See ``StudentBackend``: one rank of each pipeline stage does."""
        return is_stage_sender()

    def update(self, batch: TrainBatch) -> UpdateResult:
        """See ``StudentBackend``."""
        started_s = time.perf_counter()
        self._require_whole()
        require_no_parts(self._parts, "an update")
        steps = self._minibatches(batch)
        lr = learning_rate(self._optim, self.num_updates, self._num_steps)
        with self._all_or_lost():
            arrays = self._arrays(batch, [part for parts in steps.values() for part in parts])
            taken = [self._policy_step(arrays, index, parts, lr) for index, parts in steps.items()]
        self.policy_version += len(taken)
        self.num_updates += 1
        metrics = update_report(taken)
        metrics |= {"lr": lr, "seconds_update": time.perf_counter() - started_s}
        return UpdateResult(self.policy_version, len(taken), metrics)

    def accumulate(self, batch: TrainBatch, place: int) -> None:
        """See ``StudentBackend``; summed as they come, on each rank."""
        started_s = time.perf_counter()
        self._require_whole()
        with self._all_or_lost():
            require_one_minibatch(batch)
            ((_, cuts),) = self._minibatches(batch).items()
            loss_function = self._policy_loss(self._arrays(batch, cuts), SUMS)
            with unreduced_gradients(self.model), self.model.routing.of_batch(batch.routed_experts):
                metrics = train_microbatches(self.model, cuts, loss_function)
            self._parts.add(place, batch, metrics, {}, started_s)

    def commit_accumulated(self) -> UpdateResult:
        """See ``StudentBackend``."""
        started_s = time.perf_counter()
        self._require_whole()
        parts, reduction = self._parts, self._loss.reduction
        divisor = parts.divisor(reduction)
        lr = learning_rate(self._optim, self.num_updates, self._num_steps)
        with self._all_or_lost():
            reduce_gradients(self.model, divisor)
            own = parts.step_metrics(reduction)
            taken = agreed_step(self.optimizer, own, lr, before_step=self._count_step)
        self.clear_gradients()
        self.policy_version += 1
        self.num_updates += 1
        metrics = update_report([taken])
        metrics |= {"lr": lr, "seconds_update": parts.seconds + time.perf_counter() - started_s}
        return UpdateResult(self.policy_version, 1, metrics)

    def discard_accumulated(self) -> None:
        """See ``StudentBackend``."""
        self.clear_gradients()

    def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        """See ``StudentBackend``. Mean cross-entropy over the masked tokens."""
        self._require_whole()
        require_no_parts(self._parts, "a supervised step")
        rows = self._vocabulary.rows(batch.token_ids)
        num_tokens = int(batch.loss_mask.sum())
        if num_tokens == 0:
            raise BatchError("a supervised batch without a token to learn from")
        useful = sequences_with_targets(batch.sequence_starts, batch.loss_mask)
        parts = self._cut(batch, rows, batch.loss_mask, useful)

        def cross_entropy(part: RankMicrobatch, hidden: Tensor) -> tuple[Tensor, Metrics]:
            scored = self._score(part, hidden, temperature=1.0)
            return -scored.logprobs.sum() / num_tokens, {}

        with self._all_or_lost():
            metrics = self._step(parts, cross_entropy, learning_rate)
        return {
            "loss": float(metrics["loss"]),
            "grad_norm": float(metrics["grad_norm"]),
            "num_loss_tokens": float(num_tokens),
        }

    def finish_warmup(self) -> None:
        """See ``StudentBackend``."""
        self._require_whole()
        self._state.reset()
        self._num_optimizer_steps = 0
        if self._reference is not None:
            self._reference.freeze()

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """See ``StudentBackend``; the same on every rank."""
        self._require_whole()
        check_rows(batch.routed_experts, self.model.arch.experts, self.model.arch.num_layers)
        rows = self._vocabulary.rows(batch.token_ids)
        mask = np.ones(len(rows), dtype=np.bool_)
        mask[batch.sequence_starts[:-1]] = False
        parts = self._cut(batch, rows, mask, np.arange(len(batch.group_ids)))
        with self.model.routing.of_batch(batch.routed_experts):
            return np.where(mask, self._packed(parts, batch), np.nan)

    def snapshot(self) -> WeightSnapshot:
        """See ``StudentBackend``; every rank gets all weights, so it is for small students."""
        tensors: dict[str, NDArray[Any]] = {}
        for bucket in self.export(self.SNAPSHOT_BUCKET_BYTES):
            arrays = {name: as_numpy(tensor).copy() for name, tensor in bucket.items()}
            found: list[dict[str, NDArray[Any]]] = [arrays]
            if dist.get_world_size() > 1:
                found = [{} for _ in range(dist.get_world_size())]
                dist.all_gather_object(found, arrays)
            for sent in found:
                tensors |= sent
        return WeightSnapshot(self.policy_version, tensors, weights_checksum(tensors))

    def export(self, bucket_bytes: int) -> Iterator[Mapping[str, Any]]:
        """See ``StudentBackend``."""
        self._require_whole()
        yield from export(self.model, bucket_bytes)

    def load_weights(self, tensors: NamedArrays) -> None:
        """See ``StudentBackend``."""
        self._require_whole()
        load_hf(self.model, reader(tensors))
        self.optimizer.reload_model_params()

    def save(self, directory: Path) -> None:
        """See ``StudentBackend``; all ranks write below the same directory."""
        self._require_whole()
        counters = Counters(self.policy_version, self.num_updates, self._num_optimizer_steps)
        self._folder.save(directory, counters, self._state, self._reference)

    def load(self, directory: Path, policy_version: int) -> None:
        """See ``StudentBackend``; the layout may be another than the one that saved."""
        self.clear_gradients()
        counters = self._folder.load(directory, policy_version, self._state, self._reference)
        self.policy_version = policy_version
        self.num_updates = counters.num_updates
        self._num_optimizer_steps = counters.num_optimizer_steps
        self._lost = ""

    def close(self) -> None:
        """Leave the process groups; nothing works afterwards. No collective."""
        self._lost = "it has been closed"
        self.model.release()
        device.shutdown_ranks()

    SNAPSHOT_BUCKET_BYTES = 64 * 1024 * 1024

    def _join(self, address: RankAddress, timeout_s: float) -> None:
        """Meet the other ranks and make the groups."""
        device.init_ranks(address, self._config.parallel, timeout_s)

    def _minibatches(self, batch: TrainBatch) -> dict[int, list[RankMicrobatch]]:
        """This rank's microbatches of each optimizer step that has a token to train on."""
        check_rows(batch.routed_experts, self.model.arch.experts, self.model.arch.num_layers)
        rows = self._vocabulary.rows(batch.token_ids)
        useful = sequences_with_targets(batch.sequence_starts, batch.loss_mask)
        if not len(useful):
            raise BatchError(
                f"none of the batch's {len(batch.group_ids)} sequences has a token to train on"
            )
        of_step = batch.minibatch_ids[useful]
        return {
            minibatch: self._cut(batch, rows, batch.loss_mask, useful[of_step == minibatch])
            for minibatch in np.unique(of_step).tolist()
        }

    def _cut(
        self, batch: TrainBatch | SftBatch, rows: IntArray, mask: BoolArray, sequences: IntArray
    ) -> list[RankMicrobatch]:
        starts = batch.sequence_starts
        longest = int(np.diff(starts)[sequences].max())
        if longest > self._config.max_context_tokens:
            raise BatchError(
                f"a sequence of {longest} tokens, max_context_tokens is "
                f"{self._config.max_context_tokens}"
            )
        budget = self._config.max_microbatch_tokens
        return rank_microbatches(rows, starts, mask, sequences, self._layout, budget)

    def _score(self, part: RankMicrobatch, hidden: Tensor, *, temperature: float) -> Scored:
        chunk_size = self._loss.chunk_size
        return score(self.model, part, hidden, chunk_size=chunk_size, temperature=temperature)

    def _packed(self, parts: list[RankMicrobatch], batch: TrainBatch) -> FloatArray:
        return packed_logprobs(
            self.model,
            parts,
            len(batch.token_ids),
            chunk_size=self._loss.chunk_size,
            temperature=batch.temperature,
        )

    def _arrays(self, batch: TrainBatch, parts: list[RankMicrobatch]) -> PolicyArrays:
        """What stays the same over all optimizer steps of a batch."""
        lengths = np.add.reduceat(batch.loss_mask.astype(np.int64), batch.sequence_starts[:-1])
        # In the microbatches of the steps themselves: the first ratio is then 1 to the last bit.
        with self.model.routing.of_batch(batch.routed_experts):
            proximal = self._packed(parts, batch)
        if self._reference is None:
            return PolicyArrays(batch, batch.advantages, proximal, None, lengths)
        # Routed by itself: the engine's choice says nothing of another policy's.
        with self._reference.in_place():
            reference = self._packed(parts, batch)
        advantages = batch.advantages
        if self._loss.kl_estimator == "k1_in_reward":
            advantages = reference_kl_penalty(
                torch.from_numpy(batch.advantages),
                proximal_logprobs=torch.from_numpy(proximal),
                reference_logprobs=torch.from_numpy(reference),
                mask=torch.from_numpy(batch.loss_mask),
                kl_coef=self._loss.kl_coef,
            ).numpy()
        return PolicyArrays(batch, advantages, proximal, reference, lengths)

    def _policy_step(
        self, arrays: PolicyArrays, minibatch: int, parts: list[RankMicrobatch], lr: float
    ) -> Metrics:
        batch = arrays.batch
        denominators = Denominators(
            batch.num_loss_tokens[minibatch], batch.num_sequences[minibatch]
        )
        loss_function = self._policy_loss(arrays, denominators)
        return self._step(parts, loss_function, lr, batch.routed_experts)

    def _policy_loss(self, arrays: PolicyArrays, denominators: Denominators) -> LossFunction:
        scored_by = partial(self._score, temperature=arrays.batch.temperature)
        return policy_loss_function(arrays, self._loss, denominators, scored_by)

    def _step(
        self,
        parts: list[RankMicrobatch],
        loss_function: LossFunction,
        lr: float,
        routed_experts: PackedRows | None = None,
    ) -> Metrics:
        """Gradients, agreement of all ranks that they are finite, and the optimizer step.

        Raises:
            UpdateError: a loss or gradient is not finite; on all ranks, and nothing has changed.
        """
        self.clear_gradients()
        with self.model.routing.of_batch(routed_experts):
            metrics = train_microbatches(self.model, parts, loss_function)
        merged = agreed_step(self.optimizer, metrics, lr, before_step=self._count_step)
        self.clear_gradients()
        return merged

    def clear_gradients(self) -> None:
        """Forget what backward passes have left."""
        self._parts = AccumulatedParts()
        self.model.ddp.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _count_step(self) -> None:
        self._num_optimizer_steps += 1

    @contextmanager
    def _all_or_lost(self) -> Iterator[None]:
        """Errors inside leave the student as it was, or lost when a step has begun.

        Weights are split over ranks and too large to be kept twice, so a step is not undone: the
        newest commit is what brings the student back.
        """
        before = self._num_optimizer_steps
        try:
            yield
        except BaseException as error:
            self.clear_gradients()
            steps = self._num_optimizer_steps - before
            if steps:
                self._lost = f"{steps} optimizer step(s) of a failed update were already taken"
            elif isinstance(error, RuntimeError) and not isinstance(error, MiniverlError):
                self._lost = "its ranks are no longer at the same place"
            if self._lost:
                raise StudentLostError(
                    f"{type(error).__name__}: {error}; {self._lost}: rebuild the student from the "
                    "newest commit"
                ) from error
            raise

    def _require_whole(self) -> None:
        if self._lost:
            raise StudentLostError(
                f"the student cannot be used ({self._lost}): rebuild it from the newest commit"
            )


def _check(
    model: MegatronModelConfig, arch: Architecture, vocabulary: AnyVocabulary, loss: LossConfig
) -> None:
    if arch.vocab_size != len(vocabulary):
        raise ConfigError(
            f"the decoder has {arch.vocab_size} vocabulary rows for {len(vocabulary)} ids"
        )
    if loss.kind == "gspo_token" and model.parallel.context > 1:
        raise ConfigError(
            "loss.kind: gspo_token needs each sequence on one rank, but "
            f"student.model.parallel.context is {model.parallel.context}: use 1, or another loss"
        )
