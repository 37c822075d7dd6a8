"""The evaluation table: rates, intervals, differences, and what may not be concluded from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from miniverl_dist.training.eval_stats import paired_difference


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


def difference(row: EvaluationRow, base: EvaluationRow, against: str) -> Difference:
    """Difference of two pass rates.

    Over two tasks or more it is paired by task (`eval_stats.paired_difference`). Otherwise, and for
    rows that hold no outcomes by task, the interval comes from the two Wilson intervals.

    Source: Newcombe (1998), method 10, for the latter.
    """
    paired = paired_difference(row.tasks, base.tasks)
    if paired is not None and paired.interval is not None:
        interval = paired.interval
        return Difference(against, paired.value, interval.low, interval.high, is_paired=True)
    value = row.pass_rate - base.pass_rate
    below = math.hypot(row.pass_rate - row.pass_low, base.pass_high - base.pass_rate)
    above = math.hypot(row.pass_high - row.pass_rate, base.pass_rate - base.pass_low)
    return Difference(against, value, value - below, value + above)


def evaluation_lines(report: EvaluationReport) -> list[EvaluationLine]:
    """The rows in their order, each beside the null policy and the row it should be read against.

    The student is compared with where reinforcement learning began (``warm``, else ``before``), the
    warm-up itself with ``before``, other policies with the null policy.
    """
    return [_line(row, report) for row in report.rows]


def _line(row: EvaluationRow, report: EvaluationReport) -> EvaluationLine:
    peers = [other for other in report.rows if _is_comparable(row, other)]
    null = next((other for other in peers if other.policy == "null"), None)
    base = _student_base(row, peers) if row.policy == "student" else null
    found = None
    if base is not None and base is not row:
        found = difference(row, base, base.tag if base.policy == "student" else "null")
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
    tags = {"before": (), "warm": ("before",)}.get(row.tag, ("warm", "before"))
    students = {other.tag: other for other in peers if other.policy == "student"}
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
            f"{line.row.pass_rate:.3f}",
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
    if data.status not in ("finished", "evaluation"):
        found.append(f"This run is not finished (status: {data.status}); its numbers may change.")
    report = data.evaluation
    if report is not None and report.trains_on_eval_tasks:
        found.append(
            "Memorisation: the run trains on tasks that it is evaluated on. The pass rates show "
            "that the loop learns; they say nothing about other tasks."
        )
    found.extend(_restricted_softmax(data.manifest.get("roles")))
    if data.manifest.get("warmup"):
        found.append(
            "The student was first warmed up on expert traces (supervised). Differences are "
            "against the student after that warm-up wherever it was evaluated."
        )
    opd = data.config.get("opd")
    if isinstance(opd, Mapping) and opd.get("sign") == -1:
        found.append("The OPD term has the wrong sign on purpose: this run shows what that breaks.")
    if report is not None and any(row.num_faults for row in report.rows):
        found.append(
            "Episodes lost to the harness (deadline, environment, engine) are left out of the "
            "rates and counted in the column Faults."
        )
    if report is not None and report.rows:
        found.append(
            "The Wilson intervals treat episodes as independent. Episodes of one task are not: the "
            "intervals by task resample tasks, and differences compare both sides on the same "
            "resampled tasks. Where all tasks agree these collapse to a point; read Wilson's then."
        )
        found.extend(_chosen_tasks(report))
        if not any(row.policy == "null" for row in report.rows):
            found.append("The policy that does nothing was not measured: rates lack their floor.")
    label = data.manifest.get("policy_label")
    if label:
        found.append(
            _POLICY_LABELS.get(str(label).split(" ")[0], "How on-policy: {}.").format(label)
        )
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
