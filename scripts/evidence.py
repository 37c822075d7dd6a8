"""Run the arm plans, and write docs/evidence.md from what has finished of them.

    python -m scripts.evidence                    run what is missing (hours), then write
    python -m scripts.evidence --write            write from what has finished so far

Every plan of configs/benchmarks/ has a folder below ``--output``; stopped anywhere, the same
command goes on. What has not been run is named as such. The document holds what the plans'
benchmark.json say; the conclusions follow from the intervals by rule, not by hand.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from miniverl_dist.lab.arms import (
    COLD_START,
    MATCHED,
    BenchmarkReport,
    Difference,
    Measured,
    paired_difference,
)
from miniverl_dist.lab.arms_table import (
    arms_table,
    differences_table,
    markdown_table,
    quantities_table,
    shown,
    verdict,
)

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = ROOT / "docs" / "evidence.md"
CROSS, SAME = "local_bfcl_cross_tokenizer", "local_bfcl_same_tokenizer"
CALCULATOR = "lab_calculator"
BFCL_SFT, CALCULATOR_SFT = "local_bfcl_sft", "lab_calculator_sft"
PLANS = (CROSS, SAME, CALCULATOR, BFCL_SFT, CALCULATOR_SFT)
COMMAND = "python -m scripts.evidence"
MATCHED_WITHOUT_SAMPLING = ("optimizer_steps", "start_sha256", "num_eval_episodes")


@dataclass(frozen=True)
class Question:
    """A comparison that the document answers."""

    text: str
    ours: tuple[str, str]
    """Plan and arm."""
    theirs: tuple[str, str]
    matched: tuple[str, ...] = MATCHED
    """What has to be equal in each seed; fields of `Measured`."""


QUESTIONS = (
    Question("dense reward, groups of 8", (CROSS, "grpo_opd"), (CROSS, "grpo")),
    Question("dense reward, groups of 4", (CROSS, "grpo_opd-dense-g4"), (CROSS, "grpo-dense-g4")),
    Question(
        "terminal reward, groups of 8", (CROSS, "grpo_opd-terminal-g8"), (CROSS, "grpo-terminal-g8")
    ),
    Question(
        "terminal reward, groups of 4", (CROSS, "grpo_opd-terminal-g4"), (CROSS, "grpo-terminal-g4")
    ),
    Question("same tokenizer, dense, groups of 8", (SAME, "grpo_opd"), (CROSS, "grpo")),
    Question("calculator", (CALCULATOR, "grpo_opd"), (CALCULATOR, "grpo")),
)
"""Does the teacher's word help beside the reward?"""
FURTHER = (
    Question("OPD alone beside GRPO alone", (CROSS, "opd"), (CROSS, "grpo")),
    Question("OPD alone: lookahead 0 beside 1", (CROSS, "opd-lookahead-0"), (CROSS, "opd")),
    Question(
        "GRPO + OPD: lookahead 0 beside 1", (CROSS, "grpo_opd-lookahead-0"), (CROSS, "grpo_opd")
    ),
    Question("OPD alone: same tokenizer beside cross", (SAME, "opd"), (CROSS, "opd")),
    Question("GRPO + OPD: same tokenizer beside cross", (SAME, "grpo_opd"), (CROSS, "grpo_opd")),
    Question(
        "same tokenizer, OPD alone: lookahead 0 beside 1", (SAME, "opd-lookahead-0"), (SAME, "opd")
    ),
    Question("calculator: OPD alone beside GRPO alone", (CALCULATOR, "opd"), (CALCULATOR, "grpo")),
)
DEMONSTRATIONS = tuple(
    Question(f"{name}: SFT beside {text}", (sft, "sft"), (plan, arm), MATCHED_WITHOUT_SAMPLING)
    for name, sft, plan in (("BFCL", BFCL_SFT, CROSS), ("calculator", CALCULATOR_SFT, CALCULATOR))
    for text, arm in (("GRPO alone", "grpo"), ("GRPO + OPD", "grpo_opd"))
)

INTRODUCTION = f"""\
# Learning evidence

Written by `{COMMAND}` from the results of the plans in `configs/benchmarks/`; do
not edit. `{COMMAND} --write` writes it again from what has finished.

What is asked: does a teacher's word on every sampled token help beside the verifier's reward, with
which credit, and where? Every arm of a seed starts from the same warmed-up weights (weights only),
asks the same fitted teacher, samples equally many episodes, treats groups without variance the same
way, and is evaluated on the same episodes' seeds. Seeds are the unit: intervals are 95 % t
intervals over seeds, differences are paired by seed. No correction for the number of comparisons is
made: among twenty true zeros one interval would leave 0 out.

What this cannot show: the tasks are trained on and evaluated, so this measures memorisation;
student and teacher are toy decoders whose softmax is restricted to the ids of these tasks; the
settings of `local_bfcl.yaml` were chosen on seeds 0, 1 and 2, which are not used here. A fraction
of all combinations was run, not all of them; cells that were not run say so."""
DEMONSTRATIONS_TEXT = """\
## What demonstrations of these very tasks come to

The arm `sft` goes on from the same weights, for as many optimizer steps, with the oracle's clean
episodes of the tasks that are evaluated. It samples nothing and asks no teacher, so sampled
episodes are not matched. Demonstrations say what the other arms have to find: this is what there
is to memorise, and no rival of a method for tasks without demonstrations."""


def main() -> None:
    """Run, unless only the document is wanted; write it either way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("runs/evidence"))
    parser.add_argument("--write", action="store_true", help="run nothing")
    parser.add_argument("--document", type=Path, default=DOCUMENT)
    arguments = parser.parse_args()
    for plan in PLANS:
        if not arguments.write:
            run_plan(plan, arguments.output)
        arguments.document.write_text(document(arguments.output))
    print(f"wrote {arguments.document}")


def run_plan(plan: str, output: Path) -> None:
    """Run what a plan has left, one process at a time; failed runs do not end the others."""
    command = [sys.executable, "-m", "actors.cli", "benchmark"]
    command += [f"configs/benchmarks/{plan}.yaml", "--output", str(output.resolve() / plan)]
    subprocess.run(command, cwd=ROOT, check=False)


def document(output: Path) -> str:
    """The whole text, from the results below ``output``."""
    reports = {plan: report for plan in PLANS if (report := read_report(output / plan))}
    parts = [INTRODUCTION, machine(output), "## Does the teacher help beside the reward?"]
    parts += [question_table(QUESTIONS, reports), conclusion(reports, output)]
    parts += ["## Other comparisons", question_table(FURTHER, reports)]
    parts += [DEMONSTRATIONS_TEXT, question_table(DEMONSTRATIONS, reports)]
    for plan in PLANS:
        parts += plan_section(plan, reports.get(plan), output)
    return "\n\n".join(parts) + "\n"


def read_report(folder: Path) -> BenchmarkReport | None:
    """A plan's results so far; None before its first run has ended."""
    path = folder / "benchmark.json"
    return BenchmarkReport.model_validate_json(path.read_bytes()) if path.exists() else None


def machine(output: Path) -> str:
    """Where the runs were made, as they recorded it."""
    found = sorted(output.glob("*/runs/*/environment.json"))
    if not found:
        return "No run has been made yet."
    recorded = json.loads(found[0].read_bytes())
    packages = recorded["packages"]
    return (
        f"Machine: {recorded['machine']}, {recorded['num_cpus']} cores, no accelerator, one\n"
        f"thread a run; Python {recorded['python']}, torch {packages['torch']}, bfcl-eval\n"
        f"{packages['bfcl-eval']}. CPU seconds are user and system time of a run's process on a\n"
        "machine that others used too."
    )


def measured(reports: Mapping[str, BenchmarkReport], place: tuple[str, str]) -> dict[int, Measured]:
    """Seed -> what was measured in a plan's arm."""
    plan, arm = place
    outcomes = reports[plan].outcomes if plan in reports else ()
    return {o.run.seed: o.measured for o in outcomes if o.run.arm == arm and o.measured}


def answer(question: Question, reports: Mapping[str, BenchmarkReport]) -> Difference | None:
    """Ours minus theirs over the seeds that both have; None before the first one."""
    names = ["/".join(place) for place in (question.ours, question.theirs)]
    return paired_difference(
        names[0],
        measured(reports, question.ours),
        names[1],
        measured(reports, question.theirs),
        matched=question.matched,
    )


def question_table(questions: Sequence[Question], reports: Mapping[str, BenchmarkReport]) -> str:
    """One row per question."""
    return markdown_table(
        ["question", "seeds", "pass, difference", "reward, difference", "verdict"],
        [_row(question, answer(question, reports)) for question in questions],
    )


def _row(question: Question, found: Difference | None) -> list[str]:
    if found is None:
        return [question.text, "0", "not run", "not run", ""]
    cells = [shown(interval, signed=True) for interval in (found.pass_rate, found.reward)]
    return [question.text, str(found.pass_rate.num_seeds), *cells, verdict(found)]


def conclusion(reports: Mapping[str, BenchmarkReport], output: Path) -> str:
    """What the first table shows and, where GRPO + OPD does not win, what goes with it."""
    answers = [(q, found) for q in QUESTIONS if (found := answer(q, reports)) is not None]
    by_verdict: dict[str, list[str]] = {}
    for question, found in answers:
        by_verdict.setdefault(verdict(found).partition(":")[0], []).append(question.text)
    names = {
        "higher": "GRPO + OPD is higher than GRPO with",
        "lower": "GRPO + OPD is lower than GRPO with",
        "not shown": "No difference is shown with",
        "no significance claimed": "Too few seeds, or none that differ: nothing is claimed, with",
        "not comparable": "The runs cannot be compared with",
    }
    lines = [f"* {names[key]}: {', '.join(texts)}." for key, texts in by_verdict.items()]
    missing = [q.text for q in QUESTIONS if q not in [question for question, _ in answers]]
    lines += [f"* Not run: {', '.join(missing)}."] * bool(missing)
    losing = [q for q, found in answers if verdict(found) != "higher"]
    return "\n".join([*lines, *_reasons(losing, reports, output)])


def _reasons(
    questions: Sequence[Question], reports: Mapping[str, BenchmarkReport], output: Path
) -> Iterator[str]:
    """Why the teacher may not have helped, in measured numbers."""
    for question in questions:
        alone = measured(reports, question.theirs)
        teacher = teacher_pass_rates(output / question.ours[0])
        groups = sum(m.sampled_groups for m in alone.values())
        dead = sum(m.zero_variance_groups for m in alone.values()) / max(groups, 1)
        reached = fmean(m.pass_rate for m in alone.values())
        text = (
            f"* Why not with {question.text}: GRPO alone reaches {reached:.3f} and has a signal in "
            f"{1 - dead:.0%} of its groups"
        )
        if teacher:
            side = "above" if fmean(teacher) > reached else "no more than"
            text += (
                f"; the teacher itself, when sampled, passes {fmean(teacher):.3f}, {side} what "
                "GRPO reaches"
            )
        yield text + "."


def teacher_pass_rates(folder: Path) -> list[float]:
    """Of the fitted teachers of a plan, one a seed."""
    found = []
    for path in sorted(folder.glob(f"runs/{COLD_START}-seed-*/eval.json")):
        rows = json.loads(path.read_bytes())["rows"]
        found += [row["pass_rate"] for row in rows if row["policy"] == "teacher"]
    return found


def plan_section(plan: str, report: BenchmarkReport | None, output: Path) -> list[str]:
    """All tables of a plan."""
    head = f"## `configs/benchmarks/{plan}.yaml`"
    if report is None:
        return [head, "Not run."]
    num_finished = sum(o.measured is not None for o in report.outcomes)
    seeds = ", ".join(map(str, report.seeds))
    text = f"{num_finished} of {len(report.outcomes)} runs have finished (seeds {seeds})."
    if teacher := teacher_pass_rates(output / plan):
        text += f" The fitted teachers pass {fmean(teacher):.3f} when sampled."
    return [head, text, arms_table(report), differences_table(report), quantities_table(report)]


if __name__ == "__main__":
    main()
