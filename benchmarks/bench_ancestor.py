"""Claim: our calculator run takes at most the CPU time of miniVERL 0.16's own demo.

Both train a toy student on calculator tasks in one process: a toy teacher is fitted, the student is
warmed up on scripted episodes, then samples its own and is taught on them; evaluations and report
included. Ours has to take at least as many optimizer steps, in its warm-up and behind it. The two
demos differ in model, batch and loss; this compares what a user waits for, not kernels.

miniVERL is installed from the package index into an environment of its own, which is made where
``--venv`` says (default: below the temporary directory) and kept there. CPU time is user plus
system of the whole process tree, one torch thread each. Exit status 1 when the claim does not hold.
About three CPU minutes, most of them the ancestor's; ``--fast-ancestor`` runs its smoke test
instead, which takes a handful of steps and supports no claim.

    python -m benchmarks.bench_ancestor
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "configs" / "lab_calculator.yaml"
PACKAGE, TORCH, TRANSFORMERS = "miniverl[train]==0.16.0", "torch==2.13.0", "transformers==5.24.0"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
MAX_RATIO = 1.0


@dataclass(frozen=True)
class Run:
    """What a run took and did."""

    cpu_seconds: float
    num_warmup_steps: int
    num_policy_steps: int


def install(folder: Path) -> Path:
    """The ancestor's command, installed if it is not there yet."""
    command = folder / "bin" / "miniverl"
    if not command.exists():
        print(f"installing {PACKAGE} into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
        subprocess.run([*pip, TORCH], check=True)  # first: nothing else may choose the build
        subprocess.run([*pip, TORCH, TRANSFORMERS, PACKAGE], check=True)
    return command


def cpu_seconds(command: list[str], log: Path) -> float:
    """User and system seconds of a command and of all processes that it waited for."""
    with log.open("w") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=os.environ | ONE_THREAD, stdout=output, stderr=output
        )
    _, status, usage = os.wait4(process.pid, 0)
    if os.waitstatus_to_exitcode(status) != 0:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        sys.exit(f"error: {' '.join(command[:4])} ... failed:\n{tail}")
    return usage.ru_utime + usage.ru_stime


def run_ancestor(command: Path, folder: Path, *, is_fast: bool) -> Run:
    """Its demo."""
    out = folder / "ancestor"
    arguments = [str(command), "demo", "--output", str(out), *(["--fast"] if is_fast else [])]
    seconds = cpu_seconds(arguments, folder / "ancestor.log")
    lines = _lines(out / "metrics.jsonl")
    total = max(int(line["global_optimizer_step"]) for line in lines)
    policy = sum(line["phase"] == "opd_cycle" for line in lines)
    return Run(seconds, total - policy, policy)


def run_ours(folder: Path, overrides: list[str]) -> Run:
    """Our recipe."""
    out = folder / "ours"
    command = [sys.executable, "-m", "actors.cli", "train", str(RECIPE), "--run-dir", str(out)]
    for override in overrides:
        command += ["--override", override]
    seconds = cpu_seconds(command, folder / "ours.log")
    warmup = sum(line["event"] == "warmup_step" for line in _lines(out / "events.jsonl"))
    policy = sum(int(line["num_optimizer_steps"]) for line in _lines(out / "metrics.jsonl"))
    return Run(seconds, warmup, policy)


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    default = Path(tempfile.gettempdir()) / "miniverl-ancestor"
    parser.add_argument("--venv", type=Path, default=default)
    parser.add_argument("--fast-ancestor", action="store_true")
    parser.add_argument("-o", "--override", action="append", default=[])
    arguments = parser.parse_args()
    command = install(arguments.venv.resolve())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        ours = run_ours(folder, arguments.override)
        theirs = run_ancestor(command, folder, is_fast=arguments.fast_ancestor)
    for label, run in (("ours", ours), ("miniVERL", theirs)):
        print(
            f"{label:<9} {run.cpu_seconds:7.1f} CPU s, {run.num_warmup_steps:4d} warm-up steps, "
            f"{run.num_policy_steps:4d} steps on its own episodes"
        )
    ratio = ours.cpu_seconds / theirs.cpu_seconds
    print(f"ratio {ratio:.2f} (claim: at most {MAX_RATIO:g})")
    steps = [
        (run.num_warmup_steps + run.num_policy_steps, run.num_policy_steps)
        for run in (ours, theirs)
    ]
    if any(mine < other for mine, other in zip(*steps, strict=True)):
        sys.exit("no comparison: ours took fewer steps than the ancestor; raise loop.num_steps")
    if ratio > MAX_RATIO and not arguments.fast_ancestor:
        sys.exit("claim broken")


if __name__ == "__main__":
    main()
