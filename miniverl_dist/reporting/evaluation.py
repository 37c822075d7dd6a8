"""The evaluation table: rates, intervals, differences, and what may not be concluded from them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow


@dataclass(frozen=True)
class Difference:
    """Difference of two pass rates with its 95 % interval, and what it is against."""

    against: str
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        """``+0.20 [+0.05, +0.34] vs warm``."""
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}] vs {self.against}"


@dataclass(frozen=True)
class EvaluationLine:
    """One row of the table with what it is compared to."""

    row: EvaluationRow
    null_rate: float | None
    """Pass rate of the policy that does nothing, at the same horizon."""
    difference: Difference | None


def difference(row: EvaluationRow, base: EvaluationRow, against: str) -> Difference:
    """Difference of two pass rates.

    Source: Newcombe (1998), method 10: the interval from the two Wilson intervals.
    """
    value = row.pass_rate - base.pass_rate
    below = math.hypot(row.pass_rate - row.pass_low, base.pass_high - base.pass_rate)
    above = math.hypot(row.pass_high - row.pass_rate, base.pass_rate - base.pass_low)
    return Difference(against, value, value - below, value + above)


def evaluation_lines(report: EvaluationReport) -> list[EvaluationLine]:
    """The rows in their order, each beside the null policy and the row it should be read against.

    The student is compared with where reinforcement learning began (``warm``, else ``before``), the
    warm-up itself with ``before``, other policies with the null policy.
    """
    return [_line(row, report.rows) for row in report.rows]


def _line(row: EvaluationRow, rows: Sequence[EvaluationRow]) -> EvaluationLine:
    peers = [other for other in rows if other.tail_calls == row.tail_calls]
    null = next((other for other in peers if other.policy == "null"), None)
    base = _student_base(row, peers) if row.policy == "student" else null
    found = None
    if base is not None and base is not row:
        found = difference(row, base, base.tag if base.policy == "student" else "null")
    return EvaluationLine(row, None if null is None else null.pass_rate, found)


def _student_base(row: EvaluationRow, peers: Sequence[EvaluationRow]) -> EvaluationRow | None:
    tags = {"before": (), "warm": ("before",)}.get(row.tag, ("warm", "before"))
    students = {other.tag: other for other in peers if other.policy == "student"}
    return next((students[tag] for tag in tags if tag in students), None)


TABLE_HEAD = (
    "Policy",
    "When",
    "Version",
    "T",
    "Tasks",
    "Episodes",
    "Faults",
    "Pass rate",
    "95 % interval",
    "Null policy",
    "Difference (95 %)",
    "Official per turn",
    "State only",
    "Reward",
    "Calls",
    "Tokens",
)


def table_rows(report: EvaluationReport) -> list[tuple[str, ...]]:
    """Cells of the table as text, in the order of ``TABLE_HEAD``."""
    return [_cells(line) for line in evaluation_lines(report)]


def _cells(line: EvaluationLine) -> tuple[str, ...]:
    row = line.row
    return (
        row.policy,
        row.tag,
        str(row.policy_version),
        str(row.tail_calls),
        str(row.num_tasks),
        str(row.num_episodes),
        str(row.num_faults),
        f"{row.pass_rate:.3f}",
        f"{row.pass_low:.3f} to {row.pass_high:.3f}",
        "not measured" if line.null_rate is None else f"{line.null_rate:.3f}",
        "" if line.difference is None else str(line.difference),
        _share(row.official_per_turn_rate),
        _share(row.state_only_rate),
        f"{row.reward_mean:.3f}",
        f"{row.calls_per_episode:.2f}",
        f"{row.tokens_per_episode:.0f}",
    )


def _share(rate: float | None) -> str:
    """Nothing where the environment has no such check."""
    return "" if rate is None else f"{rate:.3f}"


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
            "The intervals treat episodes as independent. Episodes of one task are not, so the "
            "true uncertainty is larger."
        )
        if not any(row.policy == "null" for row in report.rows):
            found.append("The policy that does nothing was not measured: rates lack their floor.")
    label = data.manifest.get("policy_label")
    if label:
        found.append(
            _POLICY_LABELS.get(str(label).split(" ")[0], "How on-policy: {}.").format(label)
        )
    return found


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
