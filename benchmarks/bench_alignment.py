"""Claim: alignment and credit are linear, and 16k student tokens take less than 5 ms.

Compares with a two-pointer loop in Python and with a quadratic scan, in the same run. CPU time of
this process, medians. Real tokenizers and text where both are installed, random cuts elsewhere.
Exit status 1 when the claim does not hold.

    python -m benchmarks.bench_alignment
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.alignment.credit import opd_weights
from miniverl_dist.alignment.mau import align
from miniverl_dist.errors import MissingDependencyError
from miniverl_dist.tokens.load import load_tokenizer

SIZES = (256, 1024, 4096, 16384)
MAX_GROWTH, MAX_MS = 20.0, 5.0
IntArray = NDArray[np.int64]
Ends = Callable[[int], tuple[IntArray, IntArray]]


def two_pointers(
    student: Sequence[int], teacher: Sequence[int]
) -> tuple[list[int], list[int], int]:
    """Linear, one token at a time."""
    student_unit, teacher_unit = [0] * len(student), [0] * len(teacher)
    i = j = unit = 0
    while i < len(student) and j < len(teacher):
        student_unit[i] = teacher_unit[j] = unit
        if student[i] == teacher[j]:
            i, j, unit = i + 1, j + 1, unit + 1
        elif student[i] < teacher[j]:
            i += 1
        else:
            j += 1
    return student_unit, teacher_unit, unit


def quadratic(student: Sequence[int], teacher: Sequence[int]) -> tuple[list[int], list[int], int]:
    """Looks every boundary up in the other side's list."""
    units = []
    for own, other in ((student, teacher), (teacher, student)):
        unit, numbers = 0, []
        for end in own:
            numbers.append(unit)
            unit += end in other
        units.append(numbers)
    return units[0], units[1], unit


def synthetic_ends(num_tokens: int) -> tuple[IntArray, IntArray]:
    """Random cuts, 70 % of them shared, about as in real text."""
    rng = np.random.default_rng(0)
    places = rng.permutation(np.arange(1, 4 * num_tokens))
    shared, only = places[: num_tokens * 7 // 10], places[num_tokens * 7 // 10 : num_tokens - 1]
    others = places[num_tokens : num_tokens + only.size]
    last = [4 * num_tokens]
    return np.sort([*shared, *only, *last]), np.sort([*shared, *others, *last])


def real_ends() -> Ends:
    """Ends by the Qwen3.6 and DeepSeek-V4 tokenizers over tool calls and mixed prose."""
    student, teacher = load_tokenizer("qwen3.6"), load_tokenizer("deepseek-v4")
    turns = [
        f"Turn {n}: I'll move {n * 37} files, naïve façade, 整理する {n} 😀 and then check.\n"
        f"<tool_call>\n<function=mv>\n<parameter=source>\nreport_{n * n}.txt\n</parameter>\n"
        f"<parameter=destination>\narchive/{n:04x}\n</parameter>\n</function>\n</tool_call>\n"
        for n in range(600)
    ]
    ids = student.encode("".join(turns))

    def ends(num_tokens: int) -> tuple[IntArray, IntArray]:
        own = ids[:num_tokens]
        data = student.byte_table.join(own)
        return student.byte_table.ends(own), teacher.byte_table.ends(teacher.encode_bytes(data))

    return ends


def median_ms(run: Callable[[], object], repeats: int) -> float:
    """Median CPU milliseconds of one call."""
    times = []
    for _ in range(repeats):
        start = time.process_time_ns()
        run()
        times.append((time.process_time_ns() - start) / 1e6)
    return statistics.median(times)


def measure(student: IntArray, teacher: IntArray) -> dict[str, float]:
    """Milliseconds of each way, after checking that they agree."""
    as_lists = student.tolist(), teacher.tolist()
    units = align(student, teacher)
    ours = units.student_unit.tolist(), units.teacher_unit.tolist(), units.num_units
    for other in (two_pointers, quadratic):
        if other(*as_lists) != ours:
            raise AssertionError(f"{other.__name__} disagrees with align")
    rng = np.random.default_rng(1)
    logprobs = -rng.exponential(size=student.size), -rng.exponential(size=teacher.size)
    return {
        "align": median_ms(lambda: align(student, teacher), 50),
        "opd_weights": median_ms(
            lambda: opd_weights(*logprobs, units, rule="unit", clip=3.0, stop_after=3.0), 50
        ),
        "two pointers": median_ms(lambda: two_pointers(*as_lists), 5),
        "quadratic": median_ms(lambda: quadratic(*as_lists), 1),
    }


def main() -> int:
    try:
        ends, source = real_ends(), "Qwen3.6 and DeepSeek-V4 tokenizers"
    except MissingDependencyError as error:
        ends, source = synthetic_ends, f"random cuts ({error})"
    print(f"tokens from: {source}")
    print(f"{'student':>8} {'teacher':>8} {'units':>8}  ms: align  credit  2-pointer  quadratic")
    found = {}
    for size in SIZES:
        student, teacher = ends(size)
        ms = found[size] = measure(student, teacher)
        print(
            f"{student.size:8d} {teacher.size:8d} {align(student, teacher).num_units:8d} "
            f"{ms['align']:9.3f} {ms['opd_weights']:7.3f} {ms['two pointers']:10.2f} "
            f"{ms['quadratic']:10.1f}"
        )
    for size in SIZES:
        ms = found[size]
        print(
            f"{size:6d} tokens: align is {ms['two pointers'] / ms['align']:.0f}x faster than two "
            f"pointers in Python, {ms['quadratic'] / ms['align']:.0f}x than the quadratic scan"
        )
    growth = {name: found[16384][name] / found[1024][name] for name in found[1024]}
    print("growth from 1k to 16k: " + ", ".join(f"{k} {v:.1f}x" for k, v in growth.items()))
    slowest = max(found[16384]["align"], found[16384]["opd_weights"])
    steepest = max(growth["align"], growth["opd_weights"])
    holds = steepest <= MAX_GROWTH and slowest < MAX_MS
    verdict = "holds" if holds else "FAILS"
    print(f"claim (growth <= {MAX_GROWTH:.0f}x, 16k < {MAX_MS:.0f} ms): {verdict}")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
