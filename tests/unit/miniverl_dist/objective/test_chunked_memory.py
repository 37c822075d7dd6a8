"""Running out of memory halves the chunk, and neither losses nor gradients notice."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from pydantic import BaseModel
from torch import Tensor

from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import OutOfMemoryError
from miniverl_dist.objective.chunked import ChunkedResult, distillation_gradients
from tests.support.distillation import (
    CPU_ALLOCATOR_MESSAGE,
    Costs,
    Inputs,
    Stored,
    assert_same_bits,
    distill_config,
    parts,
)

ROOT = Path(__file__).resolve().parents[4]
LACKS_OF_MEMORY = (
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
    RuntimeError(CPU_ALLOCATOR_MESSAGE),
    RuntimeError("[enforce fail at x.cpp:1] not enough memory: you tried to allocate 8 bytes"),
    RuntimeError("MPS backend out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
)


UNDER_A_LIMIT = """
import resource
from pathlib import Path
import torch
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.objective.chunked import distillation_gradients

class Nothing:
    def targets(self, rows):
        return None

torch.set_num_threads(1)
hidden, weight = torch.randn(512, 4), torch.randn(50_000, 4)
sampled, config = torch.arange(512), DistillConfig(divergence="sampled_nll")

def run(chunk_size, on_retry=None):
    return distillation_gradients(hidden, weight, sampled, Nothing(), config, denominator=1.0,
                                  chunk_size=chunk_size, on_retry=on_retry)

run(1)  # loads what there is to load
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + 60 * 2**20, resource.RLIM_INFINITY))
halvings = []
found = run(512, lambda *sizes: halvings.append(sizes))  # 512 rows are 98 MiB
assert halvings[0] == (512, 256), halvings
expected = run(found.chunk_size)
for part in ("losses", "grad_hidden", "grad_weight"):
    assert torch.equal(getattr(found, part), getattr(expected, part)), part
"""


@pytest.mark.parametrize("lack", LACKS_OF_MEMORY, ids=str)
@pytest.mark.parametrize(("num_failures", "smaller"), [(1, 4), (2, 2), (3, 1)])
def test_the_chunk_is_halved_and_nothing_else(
    lack: Exception, num_failures: int, smaller: int
) -> None:
    inputs = Inputs(11, 8, 4, distill_config())
    left = [lack] * num_failures

    def fail(_rows: slice) -> None:
        if left:
            raise left.pop()

    halvings: list[tuple[int, int]] = []
    result = inputs.run(8, fail=fail, on_retry=lambda *sizes: halvings.append(sizes))
    assert_same_bits(parts(result), parts(inputs.run(smaller)))
    assert halvings == [(8, 4), (4, 2), (2, 1)][:num_failures]
    assert (result.chunk_size, result.num_retries) == (smaller, num_failures)


def test_finished_rows_are_not_done_again() -> None:
    """Fails on rows 8 .. 11, then once more on 8 .. 9: before them chunks of 4, then of 1."""
    inputs = Inputs(14, 8, 4, distill_config("jsd"))
    failing = [(8, 10), (8, 12)]
    provider = Stored(inputs.targets, lambda rows: _fail_once(rows, failing))
    result = distillation_gradients(
        inputs.hidden,
        inputs.weight,
        inputs.sampled,
        provider,
        inputs.config,
        denominator=7.0,
        chunk_size=4,
        on_retry=None,
    )
    ones = [(row, row + 1) for row in range(8, 14)]
    assert provider.asked == [(0, 4), (4, 8), (8, 12), (8, 10), *ones]
    before = parts(inputs.run(4, rows=slice(0, 8)))
    after = parts(inputs.run(1, rows=slice(8, 14)))
    assert_same_bits(
        parts(result)[:2],
        (torch.cat((before[0], after[0])), torch.cat((before[1], after[1]))),
    )
    torch.testing.assert_close(parts(result)[2], before[2] + after[2], rtol=1e-12, atol=1e-12)


def _fail_once(rows: slice, failing: list[tuple[int, int]]) -> None:
    if (rows.start, rows.stop) in failing:
        failing.remove((rows.start, rows.stop))
        raise MemoryError


@pytest.mark.parametrize(
    ("exact", "dtype"),
    [(True, torch.float32), (False, torch.bfloat16)],
)
def test_wherever_it_happens_nothing_counts_twice(exact: bool, dtype: torch.dtype) -> None:
    """Every operation of a chunk fails once, before it has done anything, as allocators do."""
    inputs = Inputs(4, 8, 4, distill_config("reverse_kl", exact=exact), dtype=dtype)
    expected = inputs.run(2)
    with Costs() as costs:
        inputs.run(4)
    num_retried = 0
    for place in range(1, costs.num_operations + 1):
        found = _failing_at(inputs, place)
        if isinstance(found, RuntimeError):  # outside of the chunk: halving helps nobody
            assert str(found) == CPU_ALLOCATOR_MESSAGE
            continue
        num_retried += 1
        assert found.num_retries == 1
        assert found.metrics == expected.metrics
        assert_same_bits(parts(found), parts(expected))
    assert num_retried > 0.7 * costs.num_operations


def _failing_at(inputs: Inputs, place: int) -> ChunkedResult | RuntimeError:
    try:
        with Costs(fails_at=place):
            return inputs.run(4)
    except RuntimeError as error:
        return error


@pytest.mark.skipif(sys.platform != "linux", reason="needs RLIMIT_AS and /proc")
def test_the_real_allocator() -> None:
    """A process that may not grow by as much as the chunk needs."""
    done = subprocess.run(
        [sys.executable, "-c", UNDER_A_LIMIT], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_failed_chunks_memory_is_free_before_the_retry(share: float) -> None:
    """Neither the chunk nor the error's frames hold it; fails amid the chunk's operations."""
    inputs = Inputs(4, 97, 4, distill_config())
    with Costs() as costs:
        inputs.run(4)
    alive: list[Tensor] = []
    with Costs(fails_at=int(share * costs.num_operations)):
        result = inputs.run(4, on_retry=lambda *_sizes: alive.extend(_logits_alive(97)))
    assert result.num_retries == 1
    assert alive == []


def test_what_did_not_fit_is_halved_not_what_was_allowed() -> None:
    """A chunk size far above the rows there are would take many useless tries."""
    inputs = Inputs(6, 8, 4, distill_config())
    halvings: list[tuple[int, int]] = []

    def fail(rows: slice) -> None:
        if rows.stop - rows.start > 2:
            raise MemoryError

    result = inputs.run(1000, fail=fail, on_retry=lambda *sizes: halvings.append(sizes))
    assert halvings == [(6, 3), (3, 1)]
    assert result.chunk_size == 1


def test_the_last_error_names_six_knobs_that_the_config_has() -> None:
    def fail(rows: slice) -> None:
        if rows.stop > 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nMore text")

    halvings: list[tuple[int, int]] = []
    with pytest.raises(OutOfMemoryError) as caught:
        Inputs(5, 8, 4, distill_config()).run(
            4, fail=fail, on_retry=lambda *sizes: halvings.append(sizes)
        )
    assert halvings == [(4, 2), (2, 1)]
    message = str(caught.value)
    assert "row 3 of 5" in message
    assert "CUDA out of memory. Tried 2 GiB." in message
    assert "More text" not in message
    knobs = message.partition("What makes an update smaller: ")[2].split("; ")
    assert len(knobs) == 6
    known = set(_config_paths(RunConfig))
    for knob in knobs:
        named = re.findall(r"\b[a-z_]+(?:\.[a-z_]+)+", knob)
        assert named, knob
        assert set(named) <= known, knob


@pytest.mark.parametrize("error", [RuntimeError("mat1 and mat2 shapes"), ValueError("memory")])
def test_other_errors_are_not_taken_for_it(error: Exception) -> None:
    def fail(_rows: slice) -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        Inputs(5, 8, 4, distill_config()).run(4, fail=fail)
    assert caught.value is error


def _logits_alive(vocab: int) -> Iterator[Tensor]:
    for found in gc.get_objects():
        if type(found) is Tensor and found.dim() == 2 and found.shape[1] == vocab:
            yield found


def _config_paths(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields, through unions and optionals."""
    for name, field in model.model_fields.items():
        yield prefix + name
        for inner in _models_in(field.annotation):
            yield from _config_paths(inner, f"{prefix}{name}.")


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
