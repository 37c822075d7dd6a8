"""Whether student and teacher are in memory at once: estimate, choice and reason; torch-free.

The choice is about memory alone. Where the objective needs the teacher during the update, ``auto``
never trades it for another objective: it is an error that says what does not fit.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from miniverl_dist.config.lab import DistillConfig, MemoryConfig
from miniverl_dist.errors import ConfigError

BYTES_PER_TRAINED_PARAMETER = 16
"""float32 weight, gradient and two moments."""
BYTES_PER_FROZEN_PARAMETER = 4
"""float32 weight: a reference policy."""
SHARE_OF_FREE = 0.8
"""Of the machine's free memory; the rest is for activations and everybody else."""
Strategy = Literal["resident", "swap"]


@dataclass(frozen=True)
class Estimate:
    """Bytes of a run's largest holders."""

    student_bytes: int
    """Weights, gradients, moments, and a frozen reference where there is one."""
    teacher_bytes: int
    """Weights."""
    chunk_bytes: int
    """One chunk of logits of both, and its gradient."""

    @property
    def resident_bytes(self) -> int:
        """All at once."""
        return self.student_bytes + self.teacher_bytes + self.chunk_bytes


@dataclass(frozen=True)
class MemoryChoice:
    """A strategy with its reason; goes into events and manifest."""

    strategy: Strategy
    reason: str


def settled_strategy(
    memory: MemoryConfig, distill: DistillConfig, *, is_online: bool, is_shared: bool
) -> Strategy | None:
    """The strategy where no figure decides it; None where it depends on what fits.

    Args:
        memory: What the recipe asks for.
        distill: Support decides whether the teacher can be let go.
        is_online: See ``choose``.
        is_shared: See ``choose``.
    """
    if memory.strategy != "auto":
        return memory.strategy
    if is_shared or distill.support == "exact_full_vocab":
        return "resident"
    return None if is_online else "swap"


def choose(
    memory: MemoryConfig,
    distill: DistillConfig,
    estimate: Estimate,
    *,
    is_online: bool,
    is_shared: bool = False,
    free_bytes: int | None = None,
) -> MemoryChoice:
    """The strategy of a run.

    Args:
        memory: What the recipe asks for.
        distill: Support decides whether the teacher can be let go.
        estimate: Of the run.
        is_online: Whether the student samples; stored episodes are asked about once.
        is_shared: Whether the teacher's weights are the student's frozen ones, which stay anyway.
        free_bytes: Memory to plan with; None asks the config, then the machine.

    Raises:
        ConfigError: the objective needs both in memory, and they do not fit; or not even the
            student fits into what the recipe lets ``auto`` plan with.
    """
    limit = memory.limit_bytes or free_bytes or int(available_bytes() * SHARE_OF_FREE)
    needed = (
        f"student {_mib(estimate.student_bytes)}, teacher {_mib(estimate.teacher_bytes)} and one "
        f"chunk {_mib(estimate.chunk_bytes)} of {_mib(limit)}"
    )
    if memory.strategy == "auto" and estimate.student_bytes > (memory.limit_bytes or math.inf):
        # What a machine has free is no such limit: the student may live on a device of its own.
        raise ConfigError(
            f"memory.limit_bytes: not even the student fits ({needed}): raise it, or leave it out "
            "to plan with what the machine has free"
        )
    fits = estimate.resident_bytes <= limit
    settled = settled_strategy(memory, distill, is_online=is_online, is_shared=is_shared)
    if settled is None:
        if fits:
            return MemoryChoice("resident", f"both fit: {needed}")
        return MemoryChoice("swap", f"both do not fit: {needed}")
    if memory.strategy != "auto":
        return MemoryChoice(settled, f"as the recipe says; {needed}")
    if is_shared:
        return MemoryChoice(settled, f"the teacher is the student's own backbone; {needed}")
    if settled == "swap":
        return MemoryChoice(settled, f"stored episodes are asked about once and kept; {needed}")
    if not fits:
        raise ConfigError(
            f"memory.strategy auto: exact_full_vocab needs student and teacher at once, but "
            f"they do not fit ({needed}): use distill.support top_k_tail, or a smaller "
            "loss.chunk_size"
        )
    return MemoryChoice(settled, f"exact_full_vocab needs the teacher in the update; {needed}")


def available_bytes() -> int:
    """Memory this process may still take: the machine's, or its container's if that is less."""
    found = [os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")]
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        lines = meminfo.read_text().splitlines()
        found += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    limit, used = (Path("/sys/fs/cgroup", name) for name in ("memory.max", "memory.current"))
    if limit.exists() and limit.read_text().strip() != "max":
        found.append(int(limit.read_text()) - int(used.read_text()))
    return max(min(found), 0)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size >= 2**20 / 10 else f"{size} bytes"
