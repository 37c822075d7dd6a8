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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from miniverl_dist.lab.arms import (
    COLD_START,
    LEVEL,
    MATCHED,
    BenchmarkReport,
    Difference,
    Interval,
    Measured,
    mean_interval,
    paired_difference,
    t_probability,
    t_quantile,
)
from miniverl_dist.lab.arms_table import (
    NOTHING,
    arms_table,
    difference_cells,
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
    opd_alone: tuple[str, str] | None = None
    """The arm with the teacher's word and without the reward, where one was run."""


QUESTIONS = (
    Question(
        "dense reward, groups of 8",
        (CROSS, "grpo_opd"),
        (CROSS, "grpo"),
        opd_alone=(CROSS, "opd"),
    ),
    Question("dense reward, groups of 4", (CROSS, "grpo_opd-dense-g4"), (CROSS, "grpo-dense-g4")),
    Question(
        "terminal reward, groups of 8",
        (CROSS, "grpo_opd-terminal-g8"),
        (CROSS, "grpo-terminal-g8"),
        opd_alone=(CROSS, "opd"),  # it looks at no reward
    ),
    Question(
        "terminal reward, groups of 4", (CROSS, "grpo_opd-terminal-g4"), (CROSS, "grpo-terminal-g4")
    ),
    Question(
        "same tokenizer, dense, groups of 8",
        (SAME, "grpo_opd"),
        (CROSS, "grpo"),
        opd_alone=(SAME, "opd"),
    ),
    Question(
        "calculator",
        (CALCULATOR, "grpo_opd"),
        (CALCULATOR, "grpo"),
        opd_alone=(CALCULATOR, "opd"),
    ),
)
"""Does the teacher's word help beside the reward?"""
GAINS = ((QUESTIONS[0], QUESTIONS[2]), (QUESTIONS[1], QUESTIONS[3]))
"""Does it help more in the first case than in the second?"""
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
    Question(
        "calculator, OPD alone: lookahead 0 beside 1",
        (CALCULATOR, "opd-lookahead-0"),
        (CALCULATOR, "opd"),
    ),
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
intervals over seeds, differences are paired by seed, verdicts are the pass rate's and each by
itself. Where a table asks several questions, what Holm's correction leaves of it stands below it.

What this cannot show:

* The tasks are trained on and evaluated: this measures memorisation. Student and teacher are toy
  decoders whose softmax is restricted to the ids of these tasks.
* The teacher stands in for a large one: it was fitted on the oracle's episodes of these very tasks.
  What GRPO + OPD has over GRPO alone is that it hears of them through the teacher.
* The settings are those of the GRPO + OPD recipes, chosen on seeds 0, 1 and 2, which are not used
  here, and on these tasks. GRPO alone was not tuned for itself; OPD alone has a coefficient of 1,
  beside a reward it has 0.3.
* "Same tokenizer" and "dense reward, groups of 8" subtract the same runs of GRPO alone: they are
  not two independent answers.
* A fraction of all combinations was run, not all of them; cells that were not run say so."""
DEMONSTRATIONS_TEXT = """\
## What demonstrations of these very tasks come to

The arm `sft` goes on from the same weights, for as many optimizer steps, with the oracle's clean
episodes of the tasks that are evaluated. It samples nothing and asks no teacher, so sampled
episodes are not matched. These are the episodes that the teacher was fitted on: GRPO alone never
sees them, GRPO + OPD hears of them through the teacher, and SFT reads them. Where there are
demonstrations of the very tasks, it is the one to beat."""


BESIDE_TEXT = """\
What stands beside these answers: how many episodes pass after training with the reward alone, in
how many of its groups rewards differ, how many pass after training with the teacher's word alone,
and how many of the teacher's own. It is what there is to look for a reason in; so few cases do not
prove one."""
GAINS_TEXT = """\
That one interval leaves 0 out and another does not is no difference between the two. The gains
themselves, compared:"""


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
    parts += [question_table(QUESTIONS, reports), conclusion(reports)]
    parts += [holm(QUESTIONS, reports), BESIDE_TEXT, beside_table(reports, output)]
    parts += [GAINS_TEXT, gains_table(reports)]
    parts += ["## Other comparisons", question_table(FURTHER, reports), holm(FURTHER, reports)]
    parts += [DEMONSTRATIONS_TEXT, question_table(DEMONSTRATIONS, reports)]
    parts += [holm(DEMONSTRATIONS, reports)]
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
    return [question.text, *difference_cells(found)]


def conclusion(reports: Mapping[str, BenchmarkReport]) -> str:
    """What the first table shows."""
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
    lines = [f"* {names[key]}: {'; '.join(texts)}." for key, texts in by_verdict.items()]
    missing = [q.text for q in QUESTIONS if q not in [question for question, _ in answers]]
    lines += [f"* Not run: {'; '.join(missing)}."] * bool(missing)
    return "\n".join(lines)


def p_value(interval: Interval) -> float | None:
    """Two-sided, of the t test that the interval belongs to; None without an interval."""
    if interval.low is None or interval.high is None:
        return None
    degrees = interval.num_seeds - 1
    error = (interval.high - interval.low) / 2 / t_quantile((1 + LEVEL) / 2, degrees)
    return 2 * (1 - t_probability(abs(interval.mean) / error, degrees))


def holm(questions: Sequence[Question], reports: Mapping[str, BenchmarkReport]) -> str:
    """Which of a table's differences Holm's step-down procedure leaves at 5 % in all."""
    found = {
        question.text: p
        for question in questions
        if (difference := answer(question, reports)) is not None
        and not difference.problems
        and (p := p_value(difference.pass_rate)) is not None
    }
    kept = []
    for rank, (text, p) in enumerate(sorted(found.items(), key=lambda item: item[1])):
        if p * (len(found) - rank) > 1 - LEVEL:
            break
        kept.append(f"{text} (p = {p:.4f})")
    left = "; ".join(kept) or "none"
    return f"Holm's correction over the {len(found)} questions of this table leaves: {left}."


def beside_table(reports: Mapping[str, BenchmarkReport], output: Path) -> str:
    """What was measured of each question's arms and teacher."""
    rows = []
    for question in QUESTIONS:
        alone, found = measured(reports, question.theirs), answer(question, reports)
        if found is None or not alone:
            continue
        teacher = teacher_pass_rates(output / question.ours[0])
        without = measured(reports, question.opd_alone) if question.opd_alone else {}
        groups = sum(m.sampled_groups for m in alone.values())
        dead = sum(m.zero_variance_groups for m in alone.values()) / max(groups, 1)
        rows.append(
            [
                question.text,
                _mean([m.pass_rate for m in alone.values()]),
                f"{1 - dead:.0%}",
                _mean([m.pass_rate for m in without.values()]),
                _mean(teacher),
                verdict(found).partition(":")[0],
            ]
        )
    head = ["question", "GRPO alone", "groups with a signal", "OPD alone", "teacher", "verdict"]
    return markdown_table(head, rows)


def _mean(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" if values else NOTHING


def gains_table(reports: Mapping[str, BenchmarkReport]) -> str:
    """Differences of differences, paired by seed."""
    rows = []
    for more, less in GAINS:
        ours, theirs = gains(more, reports), gains(less, reports)
        found = mean_interval([ours[seed] - theirs[seed] for seed in ours.keys() & theirs.keys()])
        rows.append([f"{more.text} beside {less.text}", shown(found, signed=True)])
    return markdown_table(["gain of GRPO + OPD over GRPO alone", "pass, difference"], rows)


def gains(question: Question, reports: Mapping[str, BenchmarkReport]) -> dict[int, float]:
    """Seed -> how much higher ours passes."""
    ours, theirs = measured(reports, question.ours), measured(reports, question.theirs)
    seeds = ours.keys() & theirs.keys()
    return {seed: ours[seed].pass_rate - theirs[seed].pass_rate for seed in seeds}


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
    text += f" Evaluated: {asked(report)}."
    if teacher := teacher_pass_rates(output / plan):
        text += f" The fitted teachers pass {fmean(teacher):.3f} when sampled."
    return [head, text, arms_table(report), differences_table(report), quantities_table(report)]


def asked(report: BenchmarkReport) -> str:
    """What a pass rate of a plan is about."""
    found = next((o.measured for o in report.outcomes if o.measured), None)
    if found is None or not found.measured_as:
        return "not recorded"
    told = found.measured_as
    num_tasks = len(json.loads(told["tasks.eval"]))
    return (
        f"T = {told['evaluation.tail_calls']} (calls left to the student), "
        f"{told['evaluation.episodes_per_task']} episodes of each of {num_tasks} tasks at "
        f"temperature {told['evaluation.temperature']}"
    )


if __name__ == "__main__":
    main()
