"""Stage one of the two-stage backward pass: from hidden states to their gradient, chunk by chunk.

Shapes: M rows, H hidden, V vocabulary, n rows of a chunk.

For each chunk of rows: targets from the provider, logits, divergence, and the gradient by hidden
states and head, in the memory of the chunk's logits. The [M, V] logits never exist. Stage two is
the caller's ``hidden.backward(result.grad_hidden)`` through the rest of the model.

Running out of memory halves the chunk and nothing else. A chunk changes the sums in its last step
only, so one that failed has counted for nothing and its rows are simply done again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.errors import BatchError, OutOfMemoryError
from miniverl_dist.objective.distribution import Targets, TopKRows, overwrite_with_slopes
from miniverl_dist.objective.logprobs import LogitChunk, add_product, check_chunking

OnRetry = Callable[[int, int], None]

_OUT_OF_MEMORY_TEXTS = (
    "out of memory",
    "not enough memory",
    "defaultcpuallocator",
    "cublas_status_alloc_failed",
)
_WHAT_HELPS = (
    "loss.chunk_size (fewer rows of logits at a time)",
    "distill.top_k, or distill.support: top_k_tail (smaller targets)",
    "student.model.max_microbatch_tokens (fewer activations)",
    "student.model.gradient_checkpointing: true (fewer of them kept)",
    "memory.strategy: swap (the teacher is not in memory during the update)",
    "loop.group_size, loop.num_groups or selection.ratio (fewer rows)",
)


class ChunkTargetProvider(Protocol):
    """Gives the targets of some rows at a time: stored ones, or a teacher's that is in memory."""

    def targets(self, rows: slice) -> Targets | None:
        """Targets of rows ``[start, stop)`` of the M rows, on the student's device.

        May be asked again for rows it has given before, in other cuts; None where the objective
        needs no teacher.
        """


@dataclass
class ChunkedResult:
    """What stage one leaves."""

    losses: Tensor
    """[M] divergence of every row, nats, detached; without ``coef`` and denominator."""
    grad_hidden: Tensor
    """[M, H] of ``sum(losses) * coef / denominator``; dtype of the hidden states."""
    grad_weight: Tensor | None
    """[V, H] of the same, in the weight's dtype; None where it was not wanted."""
    metrics: dict[str, float]
    """Sums over the rows, where there is a teacher: ``teacher_entropy_sum`` in nats, and of top-k
    targets ``teacher_tail_mass_sum``, the mass of their buckets."""
    chunk_size: int
    """The last one."""
    num_retries: int


@torch.no_grad()
def distillation_gradients(  # noqa: PLR0913 -- tensors and settings that are named at the call
    hidden: Tensor,
    weight: Tensor,
    sampled_rows: Tensor,
    provider: ChunkTargetProvider,
    config: DistillConfig,
    *,
    denominator: float,
    chunk_size: int,
    on_retry: OnRetry | None,
    needs_weight: bool = True,
) -> ChunkedResult:
    """Divergence of all rows and its gradients by hidden states and head.

    Args:
        hidden: [M, H] state that predicts each row's token; detached here.
        weight: [V, H] the head, of the same dtype; detached here.
        sampled_rows: [M] int64 row of the head of each written token.
        provider: Targets, a chunk at a time.
        config: Divergence, temperature and ``coef``.
        denominator: What the sum over rows is divided by, > 0: the rows of the whole minibatch.
        chunk_size: Rows whose logits exist at a time; changes losses and gradients by no more
            than rounding.
        on_retry: Called with the rows that did not fit and the new chunk size.
        needs_weight: Whether the head is trained.

    Raises:
        OutOfMemoryError: not even one row fits.
        BatchError: shapes, targets, chunk size or denominator do not fit.
    """
    _check(hidden, weight, sampled_rows, denominator)
    check_chunking(chunk_size, config.temperature)
    sums = _Sums(hidden, weight, sampled_rows, provider, config, denominator, needs_weight)
    start, num_retries = 0, 0
    while start < len(hidden):
        rows = slice(start, min(start + chunk_size, len(hidden)))
        failure = sums.try_add(rows)
        if failure is None:
            start = rows.stop
            continue
        num_rows = rows.stop - start
        if num_rows == 1:
            raise OutOfMemoryError(_one_row_is_too_much(start, hidden, weight, failure))
        chunk_size = num_rows // 2
        num_retries += 1
        sums.forget_chunk()
        if on_retry is not None:
            on_retry(num_rows, chunk_size)
    return sums.result(chunk_size, num_retries)


class _Sums:
    """Gradients and values so far, and the memory of one chunk of logits."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        sampled_rows: Tensor,
        provider: ChunkTargetProvider,
        config: DistillConfig,
        denominator: float,
        needs_weight: bool,
    ) -> None:
        self._hidden, self._weight = hidden.detach(), weight.detach()
        self._sampled_rows = sampled_rows
        self._provider = provider
        self._config = config
        self._factor = config.coef / denominator / config.temperature
        dtype = torch.promote_types(weight.dtype, torch.float32)
        self._losses = torch.zeros(len(hidden), dtype=dtype, device=hidden.device)
        self._entropies = torch.zeros_like(self._losses)
        self._tail_masses: Tensor | None = None
        self._grad_hidden = torch.zeros_like(self._hidden)
        self._grad_weight = torch.zeros_like(self._weight, dtype=dtype) if needs_weight else None
        self._chunk: LogitChunk | None = None

    def try_add(self, rows: slice) -> str | None:
        """Add a chunk; gives the reason where memory ran out, and has then added nothing.

        The error itself is not kept: its frames would keep the failed chunk's memory.
        """
        try:
            self._add(rows)
        except (RuntimeError, MemoryError) as error:
            if not _is_out_of_memory(error):
                raise
            return str(error).strip().partition("\n")[0] or type(error).__name__
        return None

    def _add(self, rows: slice) -> None:
        targets = self._provider.targets(rows)
        states = self._hidden[rows]
        if self._chunk is None:
            self._chunk = LogitChunk(self._weight, len(states), self._config.temperature)
        logits = self._chunk.project(states)
        found = overwrite_with_slopes(logits, targets, self._sampled_rows[rows], self._config)
        slopes = self._chunk.lowered(len(states))
        self._losses[rows] = found.divergences
        if found.entropies is not None:
            self._entropies[rows] = found.entropies
        if isinstance(targets, TopKRows):
            if self._tail_masses is None:
                self._tail_masses = torch.zeros_like(self._losses)
            self._tail_masses[rows] = targets.tail_logprobs.exp().to(self._losses.dtype)
        self._grad_hidden[rows] = torch.mm(slopes, self._weight).mul_(self._factor)
        if self._grad_weight is not None:  # last: the only step that may not be done twice
            add_product(self._grad_weight, slopes, states * self._factor)

    def forget_chunk(self) -> None:
        """Give the memory back before a smaller chunk is tried."""
        self._chunk = None
        if self._hidden.is_cuda:
            torch.cuda.empty_cache()

    def result(self, chunk_size: int, num_retries: int) -> ChunkedResult:
        """All rows are in."""
        metrics = {}
        if self._config.needs_teacher:
            metrics["teacher_entropy_sum"] = float(self._entropies.sum())
        if self._tail_masses is not None:
            metrics["teacher_tail_mass_sum"] = float(self._tail_masses.sum())
        weight = self._grad_weight
        return ChunkedResult(
            losses=self._losses,
            grad_hidden=self._grad_hidden,
            grad_weight=None if weight is None else weight.to(self._weight.dtype),
            metrics=metrics,
            chunk_size=chunk_size,
            num_retries=num_retries,
        )


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return any(text in str(error).lower() for text in _OUT_OF_MEMORY_TEXTS)


def _one_row_is_too_much(start: int, hidden: Tensor, weight: Tensor, failure: str) -> str:
    knobs = "; ".join(_WHAT_HELPS)
    return (
        f"memory ran out at row {start} of {len(hidden)} with a chunk of one row of "
        f"{len(weight)} logits ({failure}); nothing has changed. What makes an update smaller: "
        f"{knobs}"
    )


def _check(hidden: Tensor, weight: Tensor, sampled_rows: Tensor, denominator: float) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise BatchError(
            f"expected hidden [M, H] and weight [V, H], found {list(hidden.shape)} and "
            f"{list(weight.shape)}"
        )
    if hidden.dtype != weight.dtype:
        raise BatchError(f"hidden states are {hidden.dtype}, the head is {weight.dtype}")
    if sampled_rows.shape != hidden.shape[:1]:
        raise BatchError(f"{list(sampled_rows.shape)} sampled rows for {len(hidden)} hidden states")
    if not denominator > 0:
        raise BatchError(f"the denominator of a distillation step must be > 0, found {denominator}")
