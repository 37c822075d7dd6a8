"""The evaluation table: rates, intervals, differences, and what may not be concluded from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from miniverl_dist.reporting.eval_notes import report_notes
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from miniverl_dist.training.eval_stats import STUDENT, paired_difference


@dataclass(frozen=True)
class Difference:
    """Difference of two pass rates with its 95 % interval, and what it is against."""

    against: str
    value: float
    low: float
    high: float
    is_paired: bool = False
    """True: tasks were resampled, both sides on the same ones; False: from the two Wilson
    intervals, as if the episodes were independent."""

    def __str__(self) -> str:
        """``+0.20 [+0.05, +0.34] vs warm``."""
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}] vs {self.against}"


@dataclass(frozen=True)
class EvaluationLine:
    """One row of the table with what it is compared to."""

    row: EvaluationRow
    null: EvaluationRow | None
    """The policy that does nothing, on the same tasks at the same horizon."""
    difference: Difference | None
    ceiling: float | None
    """Share of the row's tasks whose answer key nobody doubts; None where no doubt is declared."""

    @property
    def null_rate(self) -> float | None:
        """Pass rate of the policy that does nothing."""
        return None if self.null is None else self.null.pass_rate


def difference(row: EvaluationRow, base: EvaluationRow, against: str) -> Difference | None:
    """Difference of two pass rates; None where one side, or every task, has no episode that counts.

    Over two tasks or more it is paired by task (`eval_stats.paired_difference`). Otherwise, and for
    rows that hold no outcomes by task, the interval comes from the two Wilson intervals.

    Source: Newcombe (1998), method 10, for the latter.
    """
    paired = paired_difference(row.tasks, base.tasks)
    if paired is not None and paired.interval is not None:
        interval = paired.interval
        return Difference(against, paired.value, interval.low, interval.high, is_paired=True)
    own, other = row.pass_interval, base.pass_interval
    has_no_task_in_common = paired is None and row.tasks and base.tasks
    if own is None or other is None or has_no_task_in_common:
        return None
    (rate, low, high), (base_rate, base_low, base_high) = own, other
    value = rate - base_rate
    below = math.hypot(rate - low, base_high - base_rate)
    above = math.hypot(high - rate, base_rate - base_low)
    return Difference(against, value, value - below, value + above)


def evaluation_lines(report: EvaluationReport) -> list[EvaluationLine]:
    """The rows in their order, each beside the null policy and the row it should be read against.

    The student is compared with where reinforcement learning began (``warm``, else ``before``, else
    its initial weights), the warm-up itself with ``before``. Other policies, and a student without
    such a row at the same T, are compared with the null policy.
    """
    return [_line(row, report) for row in report.rows]


def _line(row: EvaluationRow, report: EvaluationReport) -> EvaluationLine:
    peers = [other for other in report.rows if _is_comparable(row, other)]
    null = next((other for other in peers if other.policy == "null"), None)
    base = null
    if row.policy == STUDENT:
        base = _student_base(row, peers) or null
    found = None
    if base is not None and base is not row:
        found = difference(row, base, base.tag if base.policy == STUDENT else "null")
    return EvaluationLine(row, null, found, ceiling(row, report))


def _is_comparable(row: EvaluationRow, other: EvaluationRow) -> bool:
    """Same horizon and same tasks: T = 3 of every T leaves out what has fewer calls."""
    places = [{(o.task_id, o.tail_calls) for o in side.tasks} for side in (row, other)]
    has_same_tasks = places[0] == places[1] or not all(places)
    return other.tail_calls == row.tail_calls and has_same_tasks


def ceiling(row: EvaluationRow, report: EvaluationReport) -> float | None:
    """Share of a row's tasks without doubt; None where the report declares no doubt."""
    if not report.doubtful_ids:
        return None
    ids = [outcome.task_id for outcome in row.tasks] or report.task_ids
    return 1.0 - sum(task_id in report.doubtful_ids for task_id in ids) / len(ids)


def _student_base(row: EvaluationRow, peers: Sequence[EvaluationRow]) -> EvaluationRow | None:
    began = ("warm", "before", "initial", f"initial-T{row.tail_calls}")
    tags = began[began.index(row.tag) + 1 :] if row.tag in began else began
    students = {other.tag: other for other in peers if other.policy == STUDENT}
    return next((students[tag] for tag in tags if tag in students), None)


TABLE_HEAD: Final = (
    "Policy",
    "When",
    "T",
    "Tasks",
    "Eps.",
    "Pass",
    "95 % Wilson",
    "95 % by task",
    "Null",
    "Ceiling",
)


def table_rows(report: EvaluationReport) -> list[tuple[str, ...]]:
    """Pass rates as text, in the order of ``TABLE_HEAD``; more in `eval_tables`."""
    return [
        (
            *row_name(line.row),
            str(line.row.num_tasks),
            str(line.row.num_episodes),
            share(line.row.pass_rate),
            span(line.row.pass_low, line.row.pass_high),
            span(line.row.pass_low_by_task, line.row.pass_high_by_task),
            share(line.null_rate),
            share(line.ceiling),
        )
        for line in evaluation_lines(report)
    ]


def row_name(row: EvaluationRow) -> tuple[str, str, str]:
    """Policy, moment and T: what tells the rows of a report apart."""
    return row.policy, row.tag, str(row.tail_calls)


def share(rate: float | None) -> str:
    """A rate, or a dash where it was not measured or does not exist."""
    return "-" if rate is None else f"{rate:.3f}"


def span(low: float | None, high: float | None) -> str:
    """``0.40 to 0.60``, or a dash."""
    return "-" if low is None or high is None else f"{low:.2f} to {high:.2f}"


def caveats(data: RunData) -> list[str]:
    """What a reader must know before quoting a number, in plain words."""
    found = []
    if data.status != "finished":
        what = "evaluation" if data.is_evaluation else "run"
        found.append(
            f"This {what} is not finished (status: {data.status}); its numbers may change."
        )
    report = data.evaluation
    students = report is not None and any(row.policy == STUDENT for row in report.rows)
    if report is not None:
        found.extend(report_notes(report))
    if report is not None and report.trains_on_eval_tasks and (students or not data.is_evaluation):
        found.append(
            "Memorisation: the run trains on tasks that it is evaluated on. The pass rates show "
            "that the loop learns; they say nothing about other tasks."
        )
    found.extend(_restricted_softmax(data.manifest.get("roles")))
    if students or not data.is_evaluation:
        found.extend(_warm_start(data))
    if not data.is_evaluation:
        found.extend(_training(data))
    if report is not None and report.rows:
        found.extend(_statistics(report))
    return found


def _warm_start(data: RunData) -> list[str]:
    """Weights that were there before the run; a folder of an evaluation says so in its recipe."""
    student = data.config.get("student")
    declared = student.get("warm_start") if isinstance(student, Mapping) else None
    if not data.manifest.get("warm_start") and not declared:
        return []
    return [
        "The student did not begin untrained: it was started from weights that another run had "
        "trained (student.warm_start). Its first rows show those weights, and differences are "
        "against them where they were evaluated at the same T."
    ]


def _training(data: RunData) -> list[str]:
    """What is to be known of how a run trains; an evaluation's folder trains nothing."""
    found = []
    if data.manifest.get("warmup"):
        found.append(
            "The student was first warmed up on expert traces (supervised). Differences are "
            "against the student after that warm-up where it was evaluated at the same T."
        )
    opd = data.config.get("opd")
    if isinstance(opd, Mapping) and opd.get("sign") == -1:
        found.append("The OPD term has the wrong sign on purpose: this run shows what that breaks.")
    label = data.manifest.get("policy_label")
    if label:
        found.append(
            _POLICY_LABELS.get(str(label).split(" ")[0], "How on-policy: {}.").format(label)
        )
    return found


def _statistics(report: EvaluationReport) -> list[str]:
    """How the rates of a report were found."""
    found = []
    if any(row.num_faults for row in report.rows):
        found.append(
            "Episodes lost to the harness (deadline, environment, engine) are left out of the "
            "rates and counted in the column Faults."
        )
    found.append(
        "The Wilson intervals treat episodes as independent. Episodes of one task are not: the "
        "intervals by task resample tasks, and differences compare both sides on the same "
        "resampled tasks. Where all tasks agree these collapse to a point; read Wilson's then."
    )
    found.extend(_chosen_tasks(report))
    if not any(row.policy == "null" for row in report.rows):
        found.append("The policy that does nothing was not measured: rates lack their floor.")
    return found


def _chosen_tasks(report: EvaluationReport) -> list[str]:
    """How the tasks were chosen, and what of them is in doubt."""
    found = []
    if report.split:
        how = _SPLITS.get(report.split, report.split)
        found.append(f"Evaluation tasks: {len(report.task_ids)}, {how}.")
    if report.doubtful_ids:
        found.append(
            f"Of these tasks {len(report.doubtful_ids)} have an answer key in doubt "
            f"({report.doubtful_source}). They count like the others; the column Ceiling is the "
            "share of the rest, which a good policy need not exceed."
        )
    return found


_SPLITS = {
    "tail": "the last ones of the data (split tail), which are all of one kind",
    "stratified": "drawn in proportion to the classes (split stratified)",
    "ids": "listed by id in the recipe",
}
_POLICY_LABELS = {
    "strictly": "Strictly on-policy: every batch was sampled by the very weights that it updates.",
    "minibatched": (
        "Minibatched: several optimizer steps are taken on each batch, so all but the first use "
        "samples of slightly older weights."
    ),
    "off-policy": "{}: batches may be sampled by weights that are some publishes old.",
}


def _restricted_softmax(roles: object) -> list[str]:
    if not isinstance(roles, Mapping):
        return []
    found = []
    for name, role in roles.items():
        limit: Any = role.get("restricted_softmax") if isinstance(role, Mapping) else None
        if isinstance(limit, Mapping):
            found.append(
                f"The {name}'s softmax is restricted to {limit.get('num_ids')} of "
                f"{limit.get('vocab_size')} ids (those of the task set, all bytes, control "
                "tokens). Its pass rates and log-probabilities do not compare with those of a "
                "model that may choose any id."
            )
    return found
