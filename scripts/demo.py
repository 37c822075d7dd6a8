"""The demos: run the arms side by side, print one table, assert what may be claimed.

    main        GRPO+OPD beside GRPO: the loop learns; null stays at 0
    sign        the OPD term with the wrong sign beside the right one: it collapses
    lookahead   OPD alone with and without lookahead: without it the pass rate climbs and collapses

Each arm is one process on one core, started by the same command a user would type.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from miniverl_dist.reporting.report import write_report
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow

ROOT = Path(__file__).resolve().parents[1]
MIN_RISE = 0.15
COLLAPSED = 0.6
"""An arm has collapsed when it ends below this share of the best step of its own training."""

CAVEATS = """\
What this shows: the loop runs end to end on real tasks and its signal teaches the student.
What it does not: the 13 tasks are trained on and evaluated, so this is memorisation; student and
teacher are toy decoders whose softmax is restricted to the ids of these tasks; the rise from
`before` to `warm` is supervised learning on scripted traces, not reinforcement learning; one seed
supports no claim that one arm is better than the other."""


@dataclass(frozen=True)
class Arm:
    """One run of a demo."""

    label: str
    config: str


DEMOS: dict[str, tuple[Arm, ...]] = {
    "main": (Arm("grpo_opd", "local_bfcl.yaml"), Arm("grpo", "local_bfcl_grpo.yaml")),
    "sign": (
        Arm("right sign", "local_bfcl.yaml"),
        Arm("wrong sign", "local_bfcl_wrong_sign.yaml"),
    ),
    "lookahead": (
        Arm("lookahead 1", "local_bfcl_opd.yaml"),
        Arm("lookahead 0", "local_bfcl_opd_no_lookahead.yaml"),
    ),
}


def run_arms(arms: Sequence[Arm], folder: Path) -> dict[str, EvaluationReport]:
    """Run all arms at once; the first one's progress is shown, the others' goes to a file."""
    processes = []
    for index, arm in enumerate(arms):
        run_dir = folder / Path(arm.config).stem
        command = [sys.executable, "-m", "actors.cli", "train"]
        command += [str(ROOT / "configs" / arm.config), "--run-dir", str(run_dir)]
        log = None if index == 0 else (folder / f"{run_dir.name}.log").open("w")
        processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log))
        if log is not None:
            log.close()
    for arm, process in zip(arms, processes, strict=True):
        if process.wait() != 0:
            for other in processes:
                other.terminate()
            sys.exit(f"error: arm {arm.label} failed; see its log in {folder}")
    return {arm.label: read_report(folder / Path(arm.config).stem) for arm in arms}


def read_report(run_dir: Path) -> EvaluationReport:
    """The evaluation rows of a finished run."""
    return EvaluationReport.model_validate_json((run_dir / "eval.json").read_bytes())


def row(report: EvaluationReport, policy: str, tag: str) -> EvaluationRow:
    """One row of the report."""
    return next(r for r in report.rows if r.policy == policy and r.tag == tag)


def table(reports: dict[str, EvaluationReport]) -> Table:
    """All rows of all arms, with the change since the warm-up."""
    shown = Table(title="sampled pass rate at T = 1 (95 % Wilson interval; change since warm-up)")
    for column in ("arm", "policy", "when", "pass", "interval", "change", "reward"):
        is_text = column in ("arm", "policy", "when")
        shown.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for label, report in reports.items():
        warm = row(report, "student", "warm").pass_rate
        for r in report.rows:
            shown.add_row(
                label,
                r.policy,
                r.tag,
                f"{r.pass_rate:.3f}",
                f"{r.pass_low:.3f} .. {r.pass_high:.3f}",
                f"{r.pass_rate - warm:+.3f}" if r.tag == "after" else "",
                f"{r.reward_mean:.3f}",
            )
        shown.add_section()
    return shown


def rises(report: EvaluationReport) -> float:
    """Sampled pass rate after training minus after the warm-up."""
    return row(report, "student", "after").pass_rate - row(report, "student", "warm").pass_rate


def best_training_step(run_dir: Path) -> float:
    """Highest pass rate of a training step."""
    lines = (run_dir / "metrics.jsonl").read_bytes().splitlines()
    return max(float(json.loads(line)["pass_rate"]) for line in lines)


def check(demo: str, reports: dict[str, EvaluationReport], folder: Path) -> list[str]:
    """What may be claimed, each line true or the demo fails."""
    arms = [arm.label for arm in DEMOS[demo]]
    claims: list[tuple[bool, str]] = []
    if demo == "main":
        rise = rises(reports[arms[0]])
        claims.append((rise >= MIN_RISE, f"{arms[0]}: pass rose by {rise:.3f} (>= {MIN_RISE})"))
    else:
        after = row(reports[arms[1]], "student", "after").pass_rate
        best = best_training_step(folder / Path(DEMOS[demo][1].config).stem)
        claims.append(
            (
                after < COLLAPSED * best,
                f"{arms[1]}: pass reached {best:.3f} in a training step and ended at {after:.3f}",
            )
        )
        rise = rises(reports[arms[0]])
        claims.append((rise >= MIN_RISE, f"{arms[0]}: pass rose by {rise:.3f} (>= {MIN_RISE})"))
    nulls = [r.pass_rate for report in reports.values() for r in report.rows if r.policy == "null"]
    claims.append((nulls != [] and not any(nulls), "the null policy passes nothing"))
    failed = [text for is_true, text in claims if not is_true]
    if failed:
        sys.exit("error: this run does not show what the demo claims: " + "; ".join(failed))
    return [text for _, text in claims]


def main() -> None:
    """Run one demo and print its table."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("demo", choices=sorted(DEMOS))
    arguments.add_argument("--runs", type=Path, default=Path("runs"))
    chosen = arguments.parse_args()
    started = time.monotonic()
    folder = chosen.runs.resolve() / f"demo-{chosen.demo}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder.mkdir(parents=True)
    reports = run_arms(DEMOS[chosen.demo], folder)
    console = Console()
    console.width = max(console.width, 92)  # a pipe has 80, which would cut the table
    console.print(table(reports))
    for line in check(chosen.demo, reports, folder):
        console.print(f"shown: {line}", markup=False, soft_wrap=True)
    console.print(CAVEATS, markup=False, soft_wrap=True)
    first, second = (folder / Path(arm.config).stem for arm in DEMOS[chosen.demo])
    write_report(first, compare=[second])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    console.print(
        f"report: {first / 'report.html'}\n{time.monotonic() - started:.0f} s, largest process "
        f"{peak:.2f} GiB",
        markup=False,
        soft_wrap=True,
    )


if __name__ == "__main__":
    main()
