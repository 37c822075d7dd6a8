"""Claim: distillation at chunk 256: at most 10 % of the plain memory, no more time, no more error.

Plain way: all logits at once, ``log_softmax``, the divergence by its formula, and automatic
differentiation back to hidden states and head; V = 151,936, float32. Both ways get the teacher's
distributions from the same place, a chunk at a time or all at once: kept rows are stored; the exact
teacher is in memory as hidden states and a head of its own, so that the plain way must hold its
[M, V] too. Measured are reverse KL with 32 kept tokens and a tail, and exact reverse KL.

Memory: each way runs once in a process of its own, after a warm-up of one row. Counted is by how
much the resident set's high-water mark (VmHWM, reset just before through /proc/self/clear_refs)
rises over what is resident then, less the gradients of hidden states and weight. Blocks from 1 MiB
on go back to the system when freed (MALLOC_MMAP_THRESHOLD_): malloc's reserve counts for neither.

Time: CPU seconds of one thread, medians, ways taking turns. Errors: relative distance (2-norm) of
losses and gradients from the plain way in float64, fed with the same numbers. Exit status 1 when
the claim does not hold. Linux with glibc only; about three CPU minutes and 7 GiB.

    python -m benchmarks.bench_chunked_distillation
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.objective.chunked import distillation_gradients
from miniverl_dist.objective.distribution import FullTargets, Targets, TopKRows, keep_top_k

VOCAB, TOP_K = 151_936, 32
CHUNK_SIZES = (32, 256)
MEMORY_ROWS, MEMORY_WIDTH = 2048, 64
TIME_ROWS, TIME_WIDTH, NUM_TIMES = 384, 256, 3
ERROR_ROWS = 32
MAX_MEMORY_RATIO, MAX_TIME_RATIO, MAX_ERROR_RATIO = 0.10, 1.0, 1.5
SUPPORTS = ("top_k_tail", "exact_full_vocab")


class Teacher(NamedTuple):
    """Implements ``ChunkTargetProvider``: a head over its own hidden states, or stored rows."""

    hidden: Tensor
    weight: Tensor
    stored: Targets | None

    def targets(self, rows: slice) -> Targets:
        """Of some rows."""
        if self.stored is not None:
            return type(self.stored)(*(field[rows] for field in self.stored))
        logits = self.hidden[rows] @ self.weight.T
        return FullTargets(logits.log_softmax(1))


class Inputs(NamedTuple):
    """Of one call."""

    hidden: Tensor
    weight: Tensor
    teacher: Teacher
    config: DistillConfig

    def rows(self, number: int) -> Inputs:
        """The first few."""
        stored = self.teacher.stored
        if stored is not None:
            stored = type(stored)(*(field[:number] for field in stored))
        teacher = Teacher(self.teacher.hidden[:number], self.teacher.weight, stored)
        return Inputs(self.hidden[:number], self.weight, teacher, self.config)


Found = tuple[Tensor, Tensor, Tensor]
Way = Callable[[Inputs], Found]


def make_inputs(num_rows: int, width: int, support: str) -> Inputs:
    """Logits of a spread of about 4 nats; the teacher's are near the student's."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    hidden, weight = normal(num_rows, width), normal(VOCAB, width) * (4 / width**0.5)
    teacher = Teacher(hidden + 0.3 * normal(num_rows, width), weight, None)
    config = DistillConfig(divergence="reverse_kl", support=support, top_k=TOP_K)  # type: ignore[arg-type]
    if support == "top_k_tail":
        parts = []
        for start in range(0, num_rows, 64):
            full = teacher.targets(slice(start, start + 64))
            assert isinstance(full, FullTargets)
            parts.append(keep_top_k(full, TOP_K))
        stored = TopKRows(*(torch.cat(fields) for fields in zip(*parts, strict=True)))
        teacher = teacher._replace(stored=stored)
    return Inputs(hidden, weight, teacher, config)


def plain(inputs: Inputs) -> Found:
    """What everybody writes first."""
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()
    with torch.no_grad():
        targets = inputs.teacher.targets(slice(None))
    student = (hidden @ weight.T).log_softmax(1)
    if isinstance(targets, TopKRows):
        kept = student.gather(1, targets.rows)
        tail = student.scatter(1, targets.rows, -torch.inf).logsumexp(1)
        student = torch.cat((kept, tail[:, None]), 1)
        teacher = torch.cat((targets.logprobs, targets.tail_logprobs[:, None]), 1)
    else:
        teacher = targets.logprobs
    losses = (student.exp() * (student - teacher)).sum(1)
    return losses.detach(), *torch.autograd.grad(losses.sum() / len(losses), (hidden, weight))


def chunked(chunk_size: int) -> Way:
    """The product's way."""

    def run(inputs: Inputs) -> Found:
        found = distillation_gradients(
            inputs.hidden,
            inputs.weight,
            torch.zeros(len(inputs.hidden), dtype=torch.int64),
            inputs.teacher,
            inputs.config,
            denominator=len(inputs.hidden),
            chunk_size=chunk_size,
            on_retry=None,
        )
        assert found.grad_weight is not None
        return found.losses, found.grad_hidden, found.grad_weight

    return run


def way_of(name: str) -> Way:
    """``plain``, or a chunk size."""
    return plain if name == "plain" else chunked(int(name))


def resident_bytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def measure_memory_here(name: str, support: str) -> int:
    """Bytes of the way's temporaries in this (fresh) process."""
    inputs = make_inputs(MEMORY_ROWS, MEMORY_WIDTH, support)
    way_of(name)(inputs.rows(1))  # loads the libraries; what it allocates goes back to the system
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    way_of(name)(inputs)
    gradients = (inputs.hidden.numel() + inputs.weight.numel()) * 4
    return resident_bytes("VmHWM") - before - gradients


def measure_memory(name: str, support: str) -> int:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_chunked_distillation"]
    command += ["--memory-of", name, "--support", support]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return int(done.stdout)


def report_memory(support: str) -> bool:
    """Print peaks; whether the claim holds."""
    plain_bytes = measure_memory("plain", support)
    print(f"{support}: memory, {MEMORY_ROWS} rows x {VOCAB}: plain {plain_bytes / 2**20:.0f} MiB")
    ratios = {size: measure_memory(str(size), support) / plain_bytes for size in CHUNK_SIZES}
    for size, ratio in ratios.items():
        mebibytes = ratio * plain_bytes / 2**20
        print(f"  chunk {size:4d}: {mebibytes:6.0f} MiB, {ratio:.2%} of plain")
    return ratios[256] <= MAX_MEMORY_RATIO


def report_time(support: str) -> bool:
    """Print CPU seconds; whether the claim holds."""
    inputs = make_inputs(TIME_ROWS, TIME_WIDTH, support)
    ways = {name: way_of(name) for name in ("plain", *map(str, CHUNK_SIZES))}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_TIMES):
        for name, way in ways.items():
            started = time.process_time()
            way(inputs)
            seconds[name].append(time.process_time() - started)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    print(f"{support}: CPU time, {TIME_ROWS} rows, hidden size {TIME_WIDTH}:")
    for name, value in medians.items():
        print(f"  {name:5s} {value:.2f} s, {value / medians['plain']:.2f}x plain")
    return medians["256"] <= MAX_TIME_RATIO * medians["plain"]


def in_float64(inputs: Inputs) -> Inputs:
    """The same numbers; an exact teacher's distributions too."""
    targets = inputs.teacher.targets(slice(None))
    fields = (field.double() if field.is_floating_point() else field for field in targets)
    teacher = inputs.teacher._replace(stored=type(targets)(*fields))
    return Inputs(inputs.hidden.double(), inputs.weight.double(), teacher, inputs.config)


def report_errors(support: str) -> bool:
    """Print distances from float64; whether the claim holds."""
    inputs = make_inputs(ERROR_ROWS, TIME_WIDTH, support)
    exact = plain(in_float64(inputs))
    errors = {}
    for name in ("plain", "256"):
        pairs = zip(way_of(name)(inputs), exact, strict=True)
        errors[name] = [float((one.double() - other).norm() / other.norm()) for one, other in pairs]
        texts = ", ".join(f"{value:.1e}" for value in errors[name])
        print(f"{support}: errors of losses, hidden gradient, weight gradient, {name}: {texts}")
    pairs = zip(errors["256"], errors["plain"], strict=True)
    return all(found <= MAX_ERROR_RATIO * other for found, other in pairs)


def main() -> int:
    """Print the tables and whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-of", help="measure one way in this process and print bytes")
    parser.add_argument("--support", choices=SUPPORTS, default=SUPPORTS[0])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.memory_of is not None:
        print(measure_memory_here(arguments.memory_of, arguments.support))
        return 0
    holds = True
    for support in SUPPORTS:
        holds &= report_memory(support)
        holds &= report_time(support)
        holds &= report_errors(support)
    verdict = "holds" if holds else "FAILS"
    print(
        f"claim (chunk 256: memory <= {MAX_MEMORY_RATIO:.0%}, CPU time <= {MAX_TIME_RATIO:.0%} of "
        f"plain, errors <= {MAX_ERROR_RATIO}x plain): {verdict}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
