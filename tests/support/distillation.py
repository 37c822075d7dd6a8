"""Teachers, students and rows for tests of whole distributions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.objective.chunked import ChunkedResult, distillation_gradients
from miniverl_dist.objective.distribution import FullTargets, Targets, divergence, keep_top_k

WITH_TEACHER = ("forward_kl", "reverse_kl", "jsd", "cross_entropy")
DIVERGENCES = (*WITH_TEACHER, "sampled_nll")
SAMPLED = 2
CPU_ALLOCATOR_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you "
    "tried to allocate 600000000000 bytes. Error code 12 (Cannot allocate memory)"
)


def distill_config(
    name: str = "reverse_kl", *, exact: bool = False, **fields: Any
) -> DistillConfig:
    values: dict[str, Any] = {"top_k": 3} | fields
    support = "exact_full_vocab" if exact else "top_k_tail"
    return DistillConfig(divergence=name, support=support, **values)  # type: ignore[arg-type]


def full_targets(*rows: list[float]) -> FullTargets:
    """From the teacher's logits; -inf is a token it cannot write."""
    return FullTargets(torch.tensor(rows, dtype=torch.float64).log_softmax(1))


def measure(
    student: Tensor, targets: Targets | None, config: DistillConfig
) -> tuple[Tensor, Tensor]:
    """Values [n] and the gradient [n, V] of their sum."""
    logits = student.detach().requires_grad_()
    sampled = torch.full((len(student),), SAMPLED)
    values = divergence(logits, targets, sampled, config)
    return values.detach(), torch.autograd.grad(values.sum(), logits)[0]


class Stored:
    """Implements ``ChunkTargetProvider`` over rows in memory; fails at will."""

    def __init__(
        self, targets: Targets | None, fail: Callable[[slice], None] | None = None
    ) -> None:
        self._targets = targets
        self._fail = fail
        self.asked: list[tuple[int, int]] = []

    def targets(self, rows: slice) -> Targets | None:
        assert not torch.is_grad_enabled()
        self.asked.append((rows.start, rows.stop))
        if self._fail is not None:
            self._fail(rows)
        return None if self._targets is None else cut(self._targets, rows)


def cut(targets: Targets, rows: slice | Tensor) -> Targets:
    return type(targets)(*(field[rows] for field in targets))


class Inputs:
    """M rows of hidden states, a head and the teacher's distributions."""

    def __init__(
        self,
        num_rows: int,
        vocab: int,
        width: int,
        config: DistillConfig,
        *,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.config = config
        self.hidden = normal(num_rows, width).to(dtype)
        self.weight = normal(vocab, width).to(dtype)
        self.sampled = torch.randint(vocab, (num_rows,), generator=generator)
        full = FullTargets(normal(num_rows, vocab).mul(2).log_softmax(1))
        exact = config.support == "exact_full_vocab"
        self.targets: Targets | None = full if exact else keep_top_k(full, config.top_k)
        if not config.needs_teacher:
            self.targets = None

    def run(
        self,
        chunk_size: int,
        *,
        fail: Callable[[slice], None] | None = None,
        rows: slice | Tensor = slice(None),
        **arguments: Any,
    ) -> ChunkedResult:
        targets = None if self.targets is None else cut(self.targets, rows)
        settings = {"denominator": 7.0, "on_retry": None} | arguments
        return distillation_gradients(
            self.hidden[rows],
            self.weight,
            self.sampled[rows],
            Stored(targets, fail),
            self.config,
            chunk_size=chunk_size,
            **settings,
        )

    def naive(self, denominator: float = 7.0) -> tuple[Tensor, Tensor, Tensor]:
        """All logits at once, and automatic differentiation through the projection."""
        hidden, weight = self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()
        losses = divergence(hidden @ weight.T, self.targets, self.sampled, self.config)
        total = losses.sum() * (self.config.coef / denominator)
        return losses.detach(), *torch.autograd.grad(total, (hidden, weight))


def parts(result: ChunkedResult) -> tuple[Tensor, Tensor, Tensor]:
    assert result.grad_weight is not None
    return result.losses, result.grad_hidden, result.grad_weight


def assert_same_bits(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


class Costs(TorchDispatchMode):
    """Counts operations, remembers the largest tensor made, and can fail one operation."""

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.num_operations = 0
        self.largest = 0
        self._fails_at = fails_at

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        self.num_operations += 1
        if self.num_operations == self._fails_at:
            raise RuntimeError(CPU_ALLOCATOR_MESSAGE)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.numel())
        return result
