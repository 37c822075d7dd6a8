"""The toy student: one decoder, one optimizer, one process.

Shapes: N packed tokens, B sequences, b sequences of a microbatch, L padded length, M predictions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch

from miniverl_dist.backends.accumulated import (
    SUMS,
    AccumulatedParts,
    require_no_parts,
    require_one_minibatch,
)
from miniverl_dist.backends.adamw import AdamW, learning_rate
from miniverl_dist.backends.base import in_buckets
from miniverl_dist.backends.distilled import RowLoss, TwoStages, open_stages
from miniverl_dist.backends.padding import (
    Microbatch,
    cut_microbatches,
    minibatches,
    sequences_with_targets,
)
from miniverl_dist.backends.policy_step import (
    Scored,
    StepArrays,
    denominators_of,
    policy_term,
    require_finite,
    step_arrays,
)
from miniverl_dist.backends.toy_model import ToyModel
from miniverl_dist.backends.update_report import update_report
from miniverl_dist.backends.weights_io import (
    TokenizerIdentity,
    ToyFolder,
    load_toy_folder,
    read_json,
    read_tensors,
    save_toy_folder,
    write_json,
    write_tensors,
)
from miniverl_dist.config.recipe import LossConfig, OptimConfig
from miniverl_dist.config.roles import ToyModelConfig
from miniverl_dist.errors import BatchError, CheckpointError, TokenizerMismatchError
from miniverl_dist.objective.logprobs import (
    Predictions,
    predictions,
    selected_logprobs_with_entropy,
)
from miniverl_dist.objective.policy_loss import Metrics, merge_metrics
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
from miniverl_dist.schemas.weights import NamedArrays, weights_checksum

MAX_PADDED_TOKENS = 2048
REFERENCE_FILE = "reference.safetensors"
OPTIMIZER_FILE = "optimizer.safetensors"
TRAINER_FILE = "trainer.json"
ARCHITECTURE_FIELDS = ("num_layers", "hidden_size", "num_heads", "ffn_size")


class ToyBackend:
    """Trains a toy decoder; see ``backends.base.StudentBackend``.

    Args:
        config: Sizes of the model.
        vocabulary_ids: The real ids its softmax covers.
        tokenizer: Whose ids these are; stored with the weights and compared on load.
        loss: Policy loss; a reference policy is kept when ``kl_coef`` is above 0.
        optim: AdamW and its schedule.
        num_steps: Batches of the whole run, where the ``linear`` schedule ends.
        seed: Of the initial weights.
        rows: How whole distributions are compared; None where no batch asks for it.
    """

    def __init__(
        self,
        config: ToyModelConfig,
        vocabulary_ids: Sequence[int] | IntArray,
        tokenizer: TokenizerIdentity,
        *,
        loss: LossConfig,
        optim: OptimConfig,
        num_steps: int,
        seed: int = 0,
        rows: RowLoss | None = None,
    ) -> None:
        self.model = ToyModel(config, vocabulary_ids, seed)
        self.policy_version = 0
        self.num_updates = 0
        """Batches trained on; the learning rate follows it."""
        self._tokenizer = tokenizer
        self._loss = loss
        self._optim = optim
        self._num_steps = num_steps
        self._row_loss, self._chunk_size = rows, loss.chunk_size
        for weight in self.model.weights.values():
            weight.requires_grad_()
        self._optimizer = AdamW(self.model.weights, optim)
        self._reference = ToyModel(config, vocabulary_ids, seed) if loss.kl_coef > 0 else None
        self._parts = AccumulatedParts()

    @property
    def sends_weights(self) -> bool:
        """See ``StudentBackend``: the only rank sends all."""
        return True

    def update(self, batch: TrainBatch) -> UpdateResult:
        """See ``StudentBackend``."""
        started_s = time.perf_counter()
        require_no_parts(self._parts, "an update")
        rows = self.model.vocabulary.rows(batch.token_ids)
        steps = minibatches(batch, MAX_PADDED_TOKENS)
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
        metrics = update_report(taken) | {
            "lr": lr,
            "seconds_update": time.perf_counter() - started_s,
        }
        return UpdateResult(self.policy_version, len(taken), metrics, tuple(halvings))

    def accumulate(self, batch: TrainBatch, place: int) -> None:
        """See ``StudentBackend``; each part's gradients are kept, and summed at the commit."""
        started_s = time.perf_counter()
        with self._all_or_nothing():
            require_one_minibatch(batch)
            rows = self.model.vocabulary.rows(batch.token_ids)
            ((_, cuts),) = minibatches(batch, MAX_PADDED_TOKENS).items()
            metrics = self._gradients(self._arrays(batch, rows, cuts), batch, cuts, SUMS)
            require_finite(float(metrics["loss"]))
            self._parts.add(place, batch, metrics, self._optimizer.take_gradients(), started_s)

    def commit_accumulated(self) -> UpdateResult:
        """See ``StudentBackend``."""
        started_s = time.perf_counter()
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
        require_no_parts(self._parts, "a supervised step")
        rows = self.model.vocabulary.rows(batch.token_ids)
        num_tokens = int(batch.loss_mask.sum())
        if num_tokens == 0:
            raise BatchError("a supervised batch without a token to learn from")
        chosen = sequences_with_targets(batch.sequence_starts, batch.loss_mask)
        with self._all_or_nothing():
            total = 0.0
            for part in cut_microbatches(batch.sequence_starts, chosen, MAX_PADDED_TOKENS):
                scored = self._score(self.model, rows, part, batch.loss_mask)
                loss = -scored.logprobs.sum() / num_tokens
                loss.backward()  # type: ignore[no-untyped-call]
                total += float(loss.detach())
            require_finite(total)
            norm = self._optimizer.step(learning_rate)
        return {"loss": total, "grad_norm": norm, "num_loss_tokens": float(num_tokens)}

    def finish_warmup(self) -> None:
        """See ``StudentBackend``."""
        self._optimizer.reset()
        if self._reference is not None:
            self._reference.load_arrays(self.model.arrays())

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """See ``StudentBackend``."""
        rows = self.model.vocabulary.rows(batch.token_ids)
        everything = np.arange(len(batch.group_ids))
        parts = cut_microbatches(batch.sequence_starts, everything, MAX_PADDED_TOKENS)
        mask = np.ones(len(rows), dtype=np.bool_)
        mask[batch.sequence_starts[:-1]] = False
        return self._packed(self.model, rows, parts, mask, batch.temperature)

    def snapshot(self) -> WeightSnapshot:
        """See ``StudentBackend``."""
        tensors = self.model.arrays()
        return WeightSnapshot(self.policy_version, tensors, weights_checksum(tensors))

    def export(self, bucket_bytes: int) -> Iterator[NamedArrays]:
        """See ``StudentBackend``."""
        yield from in_buckets(self.model.arrays().items(), bucket_bytes)

    def load_weights(self, tensors: NamedArrays) -> None:
        """See ``StudentBackend``."""
        self.model.load_arrays(tensors)

    def save(self, directory: Path) -> None:
        """See ``StudentBackend``."""
        model = self.model
        save_toy_folder(
            directory, model.config, model.vocabulary.ids, self._tokenizer, model.arrays()
        )
        if self._reference is not None:
            write_tensors(directory / REFERENCE_FILE, self._reference.arrays())
        write_tensors(directory / OPTIMIZER_FILE, self._optimizer.state())
        counters = {
            "policy_version": self.policy_version,
            "num_updates": self.num_updates,
            "num_optimizer_steps": self._optimizer.num_steps,
        }
        write_json(directory / TRAINER_FILE, counters)

    def load(self, directory: Path, policy_version: int) -> None:
        """See ``StudentBackend``."""
        folder = load_toy_folder(directory)
        self._check_same_student(folder)
        counters = read_json(directory / TRAINER_FILE)
        names = ("policy_version", "num_updates", "num_optimizer_steps")
        if not isinstance(counters, dict) or not all(type(counters.get(n)) is int for n in names):
            raise CheckpointError(f"{TRAINER_FILE} needs the integers {', '.join(names)}")
        if counters["policy_version"] != policy_version:
            raise CheckpointError(
                f"{TRAINER_FILE} is of policy version {counters['policy_version']}, expected "
                f"{policy_version}: weights and run state belong to different commits"
            )
        with self._all_or_nothing():
            moments = read_tensors(directory / OPTIMIZER_FILE)
            self.discard_accumulated()
            self._optimizer.restore(moments, counters["num_optimizer_steps"])
            # Checked as a whole before its first weight changes, like the student's below, whose
            # shapes the folder's own check has passed already.
            if self._reference is not None:
                self._reference.load_arrays(read_tensors(directory / REFERENCE_FILE))
            self.model.load_arrays(folder.weights)
            self.policy_version = policy_version
            self.num_updates = counters["num_updates"]

    def close(self) -> None:
        """See ``StudentBackend``: nothing is held."""

    def _check_same_student(self, folder: ToyFolder) -> None:
        if folder.tokenizer.fingerprint != self._tokenizer.fingerprint:
            raise TokenizerMismatchError(
                f"the checkpoint was trained on ids of {folder.tokenizer.name} "
                f"({folder.tokenizer.fingerprint[:12]}), this student holds "
                f"{self._tokenizer.name} ({self._tokenizer.fingerprint[:12]})"
            )
        if not np.array_equal(folder.vocabulary_ids, self.model.vocabulary.ids):
            raise CheckpointError(
                f"the checkpoint covers {len(folder.vocabulary_ids)} ids, this student "
                f"{len(self.model.vocabulary)} (or as many others): tasks or prompt have changed"
            )
        for name in ARCHITECTURE_FIELDS:
            found, expected = (c.model_dump()[name] for c in (folder.config, self.model.config))
            if found != expected:
                raise CheckpointError(f"the checkpoint has {name} {found}, expected {expected}")

    def _arrays(self, batch: TrainBatch, rows: IntArray, parts: list[Microbatch]) -> StepArrays:
        def score(model: ToyModel) -> FloatArray:
            return self._packed(model, rows, parts, batch.loss_mask, batch.temperature)

        reference = None if self._reference is None else partial(score, self._reference)
        return step_arrays(batch, rows, self._loss, partial(score, self.model), reference)

    def _optimizer_step(
        self,
        arrays: StepArrays,
        batch: TrainBatch,
        minibatch: int,
        parts: list[Microbatch],
        lr: float,
        halvings: list[tuple[int, int]],
    ) -> Metrics:
        stages = open_stages(self._row_loss, batch, minibatch, self._chunk_size, halvings)
        denominators = denominators_of(batch, minibatch)
        merged = self._gradients(arrays, batch, parts, denominators, stages)
        self._chunk_size = self._chunk_size if stages is None else stages.chunk_size
        require_finite(float(merged["loss"]))
        return merged | {"grad_norm": self._optimizer.step(lr)}

    def _gradients(
        self,
        arrays: StepArrays,
        batch: TrainBatch,
        parts: list[Microbatch],
        denominators: Denominators,
        stages: TwoStages | None = None,
    ) -> Metrics:
        """Add the gradients of some microbatches to those that the weights have."""
        sums: list[Metrics] = []
        for part in parts:
            found = self._predictions(self.model, arrays.rows, part, batch.loss_mask)

            def policy(states: torch.Tensor) -> tuple[torch.Tensor, Metrics]:
                scored = self._scored(found._replace(hidden=states), part, batch.temperature)  # noqa: B023 - called at once
                return policy_term(scored, arrays, batch, self._loss, denominators)

            if stages is None:
                loss, metrics = policy(found.hidden)
                loss.backward()  # type: ignore[no-untyped-call]
                sums.append(metrics | {"loss": loss.detach()})
                continue
            packed = _packed_places(found, part)
            head, term = self.model.head, policy if batch.is_sampled else None
            sums.append(stages.backward(found, packed, head, batch, part, term))
        return merge_metrics(*sums)

    @torch.no_grad()
    def _packed(
        self,
        model: ToyModel,
        rows: IntArray,
        parts: list[Microbatch],
        mask: BoolArray,
        temperature: float,
    ) -> FloatArray:
        """[N] nats on the mask, NaN off it."""
        packed = np.full(len(rows), np.nan)
        for part in parts:
            scored = self._score(model, rows, part, mask, temperature)
            packed[scored.packed] = scored.logprobs.numpy()
        return packed

    def _score(
        self,
        model: ToyModel,
        rows: IntArray,
        part: Microbatch,
        mask: BoolArray,
        temperature: float = 1.0,
    ) -> Scored:
        return self._scored(self._predictions(model, rows, part, mask), part, temperature, model)

    def _predictions(
        self, model: ToyModel, rows: IntArray, part: Microbatch, mask: BoolArray
    ) -> Predictions:
        token_rows = torch.from_numpy(rows[part.packed])
        return predictions(
            model.hidden(token_rows),
            token_rows,
            torch.from_numpy(part.lengths),
            torch.from_numpy(mask[part.packed] & ~part.is_padding),
        )

    def _scored(
        self,
        found: Predictions,
        part: Microbatch,
        temperature: float,
        model: ToyModel | None = None,
    ) -> Scored:
        head = (model or self.model).head
        logprobs, entropy = selected_logprobs_with_entropy(
            found.hidden, head, found.targets, self._chunk_size, temperature=temperature
        )
        sequences = found.positions // part.packed.shape[1]
        return Scored(_packed_places(found, part), sequences, logprobs, entropy)

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Put weights, optimizer and counters back when the block raises, whatever it raises."""
        weights, moments = self.model.arrays(), self._optimizer.state()
        num_steps = self._optimizer.num_steps
        counters = self.policy_version, self.num_updates
        try:
            yield
        except BaseException:
            self.model.load_arrays(weights)
            self._optimizer.restore(moments, num_steps)
            self.policy_version, self.num_updates = counters
            self.discard_accumulated()
            raise


def _packed_places(found: Predictions, part: Microbatch) -> IntArray:
    """[M] place of each predicted token in the packed batch."""
    places: IntArray = part.packed.reshape(-1)[found.positions.numpy()]
    return places
