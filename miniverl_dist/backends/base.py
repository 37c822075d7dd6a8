"""What every student backend does: ``ports.StudentPool`` without the waiting; torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.batch import FloatArray, SftBatch, TrainBatch, UpdateResult
from miniverl_dist.schemas.weights import NamedArrays


class Sized(Protocol):
    """A numpy array or a torch tensor."""

    @property
    def nbytes(self) -> int:
        """Bytes of its values."""


Weight = TypeVar("Weight", bound=Sized)


def in_buckets(
    weights: Iterable[tuple[str, Weight]], bucket_bytes: int
) -> Iterator[dict[str, Weight]]:
    """Weights that one process holds whole, so many bytes at a time; a larger one goes alone."""
    bucket: dict[str, Weight] = {}
    size = 0
    for name, weight in weights:
        if bucket and size + weight.nbytes > bucket_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = weight
        size += weight.nbytes
    yield bucket


class StudentBackend(Protocol):
    """Weights, optimizer and reference policy of one student (or of one rank of it).

    Every method that changes something changes all of it or, when it raises, nothing.
    """

    @property
    def policy_version(self) -> int:
        """Committed optimizer steps."""

    @property
    def sends_weights(self) -> bool:
        """Whether ``export`` has anything in this rank's buckets."""

    def update(self, batch: TrainBatch) -> UpdateResult:
        """Proximal (and reference) logprobs, then one optimizer step per minibatch.

        Raises:
            BatchError: the batch cannot be computed (too long, nothing to train on).
            TokenizerMismatchError: ids that the student does not have.
            UpdateError: a loss or a gradient that is not finite.
        """

    def accumulate(self, batch: TrainBatch, place: int) -> None:
        """Add the gradients of a part of a step's batch; see ``backends.accumulated``.

        Until the step is committed or discarded, nothing else may change the student but a
        ``load``, which discards.

        Args:
            batch: of one minibatch, sampled at the same temperature as the other parts.
            place: Where it stands in the batch. A backend that promises equal bits sums in this
                order, whatever the order of arrival.

        Raises:
            BatchError, TokenizerMismatchError, UpdateError: as ``update`` does; all parts are
                discarded.
        """

    def commit_accumulated(self) -> UpdateResult:
        """One optimizer step over the mean of all parts.

        Raises:
            BatchError: nothing has been accumulated.
            UpdateError: the gradient is not finite; all parts are discarded.
        """

    def discard_accumulated(self) -> None:
        """Forget the parts; may be repeated."""

    def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        """One supervised step; counts neither as a policy version nor as an update."""

    def finish_warmup(self) -> None:
        """Forget the warm-up's optimizer state and freeze the reference policy here."""

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """[N] nats of every token at the batch's temperature; NaN at position 0 of a sequence."""

    def snapshot(self) -> WeightSnapshot:
        """Copies of the current weights, for a publish within this process."""

    def export(self, bucket_bytes: int) -> Iterator[Mapping[str, Any]]:
        """The current weights under the engines' names, a bucket at a time.

        Every rank of a student walks through its buckets at the same time, since a bucket is
        gathered over the ranks that share its tensors; those that have nothing to send get an
        empty one. Together the ranks send every tensor once.

        Args:
            bucket_bytes: at most so much is gathered at a time; a larger tensor goes alone.

        Returns:
            Name -> numpy array, or torch tensor on the rank's device; valid until the next bucket.
        """

    def load_weights(self, tensors: NamedArrays) -> None:
        """Replace the weights; optimizer, reference and version stay.

        Raises:
            CheckpointError: the weights of another architecture.
        """

    def save(self, directory: Path) -> None:
        """Write weights, reference and optimizer; equal states give equal bytes.

        Raises:
            CheckpointError: a file could not be written.
        """

    def load(self, directory: Path, policy_version: int) -> None:
        """Restore what ``save`` wrote at this policy version.

        Raises:
            CheckpointError: broken, of another architecture, or of another policy version.
            TokenizerMismatchError: trained on another tokenizer's ids.
        """

    def close(self) -> None:
        """Leave the process group and free what is held; may be repeated."""
