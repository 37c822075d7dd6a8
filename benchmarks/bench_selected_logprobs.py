"""Claim: at chunk 256 the projection needs at most 3 % of the plain way's memory, same gradients.

Plain way: ``log_softmax(hidden @ weight.T)`` over all rows, then ``gather``; V = 151,936, float32,
forward and backward, no row without a gradient.

Memory: each way runs once in a process of its own, after a warm-up of one row. Counted is by how
much the resident set's high-water mark (VmHWM, reset just before through /proc/self/clear_refs)
rises over what is resident then, less the gradients of hidden states and weight. So inputs, weight
and their gradients count for neither side, all temporaries count, those of the matrix library too.
Blocks from 1 MiB on go back to the system when freed (MALLOC_MMAP_THRESHOLD_), so that what malloc
keeps in reserve, 0 to 90 MiB by chance, counts for neither. 4,096 rows, because the plain way holds
three blocks of [N, V]: it would need 15 GB at 8,192.

Time: CPU seconds of one thread, medians, ways taking turns. ``bound`` multiplies three times and
does nothing else; the chunked way multiplies four times, so it loses to the plain one where hidden
states are wide and wins where the passes over [N, V] weigh more. Exit status 1 when the claim does
not hold. Linux with glibc only; about 80 CPU seconds.

    python -m benchmarks.bench_selected_logprobs
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

import torch
from torch import Tensor

from miniverl_dist.objective.logprobs import selected_logprobs

VOCAB = 151_936
CHUNK_SIZES = (64, 256)
MEMORY_ROWS, MEMORY_WIDTH = 4096, 64
TIME_ROWS, TIME_WIDTHS, NUM_TIMES = 384, (64, 512), 3
MAX_MEMORY_RATIO, MAX_DIFFERENCE = 0.03, 2e-6

Inputs = tuple[Tensor, Tensor, Tensor]
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


def plain(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """What everybody writes first."""
    return torch.log_softmax(hidden @ weight.T, -1).gather(1, targets[:, None]).squeeze(1)


def chunked(chunk_size: int) -> Way:
    """The product's way."""
    return lambda hidden, weight, targets: selected_logprobs(hidden, weight, targets, chunk_size)


def way_of(name: str) -> Way:
    """``plain``, or a chunk size."""
    return plain if name == "plain" else chunked(int(name))


def make_inputs(num_rows: int, width: int) -> Inputs:
    """Logits of a spread of about 4 nats, as in a language model's sure and unsure rows."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_rows, width, generator=generator)
    weight = torch.randn(VOCAB, width, generator=generator) * (4 / width**0.5)
    targets = torch.randint(VOCAB, (num_rows,), generator=generator)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def run(way: Way, inputs: Inputs) -> list[Tensor]:
    """Values and both gradients."""
    values = way(*inputs)
    slopes = torch.linspace(-1, 1.1, len(values))
    return [values.detach(), *torch.autograd.grad(values, inputs[:2], slopes)]


def resident_bytes(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` of this process."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}: this benchmark needs Linux")


def measure_memory_here(name: str) -> int:
    """Bytes of the way's temporaries in this (fresh) process."""
    inputs = make_inputs(MEMORY_ROWS, MEMORY_WIDTH)
    hidden, weight, targets = inputs
    # Loads the libraries; what it allocates goes back to the system.
    run(way_of(name), (hidden[:1].detach().requires_grad_(), weight, targets[:1]))
    before = resident_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    run(way_of(name), inputs)
    gradients = (hidden.numel() + weight.numel()) * 4
    return resident_bytes("VmHWM") - before - gradients


def measure_memory(name: str) -> int:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.bench_selected_logprobs", "--memory-of", name]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(2**20)}
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return int(done.stdout)


def bound(inputs: Inputs) -> None:
    """Three products over chunks of 256 rows, and nothing else."""
    hidden, weight = inputs[0].detach(), inputs[1].detach()
    logits, total = torch.empty(256, VOCAB), torch.zeros_like(weight)
    for rows in torch.split(hidden, 256):
        chunk = torch.mm(rows, weight.T, out=logits[: len(rows)])
        torch.mm(chunk, weight)
        total.addmm_(chunk.T, rows)


def median_seconds(inputs: Inputs) -> dict[str, float]:
    """CPU seconds of each way, and with a fifth of the rows in the loss."""
    few = torch.zeros(TIME_ROWS)
    few[::5] = 1.0
    ways: dict[str, Callable[[], object]] = {
        "bound": lambda: bound(inputs),
        "plain": lambda: run(plain, inputs),
        "chunk 256": lambda: run(chunked(256), inputs),
        "chunk 256, 20 % of rows in the loss": lambda: torch.autograd.grad(
            chunked(256)(*inputs), inputs[:2], few
        ),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(NUM_TIMES):
        for name, way in ways.items():
            started = time.process_time()
            way()
            seconds[name].append(time.process_time() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def differences(inputs: Inputs) -> dict[str, float]:
    """Relative difference (2-norm) of values and gradients between chunk 256 and the plain way."""
    pairs = zip(run(chunked(256), inputs), run(plain, inputs), strict=True)
    ratios = [float((one - other).norm() / other.norm()) for one, other in pairs]
    return dict(zip(("values", "hidden gradient", "weight gradient"), ratios, strict=True))


def report_memory() -> bool:
    """Print peaks; whether the claim holds."""
    plain_bytes = measure_memory("plain")
    print(f"memory, {MEMORY_ROWS} rows x {VOCAB}: plain {plain_bytes / 2**20:.0f} MiB")
    ratios = {size: measure_memory(str(size)) / plain_bytes for size in CHUNK_SIZES}
    for size, ratio in ratios.items():
        mebibytes = ratio * plain_bytes / 2**20
        print(f"  chunk {size:4d}: {mebibytes:6.0f} MiB, {ratio:.2%} of plain")
    return ratios[256] <= MAX_MEMORY_RATIO


def report_time_and_differences(width: int) -> bool:
    """Print CPU seconds and differences; whether the gradients agree."""
    inputs = make_inputs(TIME_ROWS, width)
    seconds = median_seconds(inputs)
    print(f"CPU time, {TIME_ROWS} rows, hidden size {width}:")
    for name, value in seconds.items():
        to_bound, to_plain = value / seconds["bound"], value / seconds["plain"]
        print(f"  {name}: {value:.2f} s, {to_bound:.2f}x bound, {to_plain:.2f}x plain")
    found = differences(inputs)
    print("  chunk 256 against plain: " + ", ".join(f"{k} {v:.1e}" for k, v in found.items()))
    return max(found.values()) <= MAX_DIFFERENCE


def main() -> int:
    """Print the tables and whether the claim holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-of", help="measure one way in this process and print bytes")
    name = parser.parse_args().memory_of
    torch.set_num_threads(1)
    if name is not None:
        print(measure_memory_here(name))
        return 0
    holds = report_memory()
    for width in TIME_WIDTHS:
        holds &= report_time_and_differences(width)
    verdict = "holds" if holds else "FAILS"
    print(
        f"claim (chunk 256: memory <= {MAX_MEMORY_RATIO:.0%}, "
        f"differences <= {MAX_DIFFERENCE:.0e}): {verdict}"
    )
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
