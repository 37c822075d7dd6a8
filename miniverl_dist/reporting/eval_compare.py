"""Two evaluations beside each other: refused unless they measured the same thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.observability.run_dir import EVALUATION
from miniverl_dist.reporting.compare_notes import (
    differing,
    one_sided,
    rewards_differ,
    row_key,
    row_names,
    setting_notes,
    uncounted,
)
from miniverl_dist.reporting.eval_tables import EvaluationTable, chosen, parts_of
from miniverl_dist.reporting.evaluation import ceiling, difference, share
from miniverl_dist.reporting.run_data import parse_evaluation
from miniverl_dist.schemas.evaluation import (
    EvaluationReport,
    EvaluationRow,
    TailCalls,
    TaskOutcome,
)
from miniverl_dist.schemas.messages import FrozenModel
from miniverl_dist.training.eval_stats import paired_difference, rate_of

_MAX_NAMED: Final = 3
"""Ids that an error names before it only counts."""


@dataclass(frozen=True)
class Side:
    """One of the two evaluations."""

    label: str
    report: EvaluationReport


@dataclass(frozen=True)
class RowChoice:
    """Rows of one side: of a policy at a moment, at one T or at all that there are."""

    policy: str
    tag: str
    tail_calls: TailCalls | None = None

    @classmethod
    def parse(cls, text: str) -> RowChoice:
        """Read ``POLICY:WHEN`` or ``POLICY:WHEN:T``; a policy may hold colons itself.

        Raises:
            ConfigError: it is neither.
        """
        head, _, last = text.rpartition(":")
        tail: TailCalls | None = None
        if head.count(":") and (last == "all" or last.isdecimal()):
            tail = "all" if last == "all" else int(last)
            head, _, last = head.rpartition(":")
        if not head or not last:
            raise ConfigError(
                f"{text!r} names no row; expected POLICY:WHEN or POLICY:WHEN:T, for instance "
                "student:after:1"
            )
        return cls(head, last, tail)


class ComparedRate(FrozenModel):
    """A rate on both sides and what B adds; intervals are 95 %, None where there is none."""

    name: str
    """``all`` or a class."""
    num_tasks: int
    rate_a: float
    rate_b: float
    null_rate: float | None
    difference: float
    """B minus A."""
    low: float | None
    high: float | None
    is_paired: bool
    """True: the interval resamples tasks, the same ones on both sides."""


class ComparedRow(FrozenModel):
    """A row of A and a row of B."""

    row_a: str
    row_b: str
    """``policy when, T = 1``."""
    passes: ComparedRate | None
    """None where no task has an episode that counts on both sides."""
    rewards: ComparedRate | None
    """None for rows without outcomes by task, and under different reward weights."""
    by_class: tuple[ComparedRate, ...]
    """A task counts in each class that it uses."""
    ceiling: float | None
    num_faults_a: int
    num_faults_b: int
    notes: tuple[str, ...] = ()
    """Why there is no difference, and in what the two were asked differently."""


class Comparison(FrozenModel):
    """What `compare` found."""

    a: str
    b: str
    environment: str
    temperature: float
    scope: str
    """Which tasks: ``the same 30 tasks``, or the intersection and of what."""
    is_intersection: bool
    rows: tuple[ComparedRow, ...]
    notes: tuple[str, ...] = ()
    """Settings that differ, and rows that only one side has."""


def read_side(path: Path) -> Side:
    """An evaluation from a run directory or an evaluation file.

    Raises:
        RecordError: there is none, or it is damaged.
    """
    file = path / EVALUATION if path.is_dir() else path
    if not file.is_file():
        raise RecordError(
            f"{file} does not exist: expected a run directory that holds {EVALUATION}, or such a "
            "file; `miniverl-dist eval` writes one"
        )
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise RecordError(f"{file} cannot be read: {error.strerror}") from None
    return Side(str(path), parse_evaluation(raw, str(file)))


def compare(
    a: Side,
    b: Side,
    *,
    row_a: RowChoice | None = None,
    row_b: RowChoice | None = None,
    intersection: bool = False,
) -> Comparison:
    """Compare rows of two evaluations, by default all that have the same name in both.

    Args:
        a: One side.
        b: The other; differences are B minus A.
        row_a: Take this row of A instead; ``row_b`` defaults to the same name.
        row_b: Take this row of B instead; ``row_a`` defaults to the same name.
        intersection: Keep the tasks and horizons that both have, instead of refusing others.

    Raises:
        ConfigError: the two did not measure the same thing.
    """
    _require_same(a, b, "environment", a.report.environment, b.report.environment)
    _require_same(a, b, "temperature", a.report.temperature, b.report.temperature)
    if not intersection:
        _require_same_tasks(a, b)
    pairs = _pairs(a, b, row_a or row_b, row_b or row_a, intersection=intersection)
    rows = tuple(_compared(a, b, pair, intersection=intersection) for pair in pairs)
    ids = set(a.report.task_ids) & set(b.report.task_ids)
    scope = f"the same {len(ids)} tasks"
    if intersection:
        num_a, num_b = len(a.report.task_ids), len(b.report.task_ids)
        scope = f"INTERSECTION ONLY: {len(ids)} tasks of {num_a} (A) and {num_b} (B)"
    return Comparison(
        a=a.label,
        b=b.label,
        environment=a.report.environment,
        temperature=a.report.temperature,
        scope=scope,
        is_intersection=intersection,
        rows=rows,
        notes=(
            *setting_notes(a.report, b.report),
            *(one_sided(a.report, b.report) if row_a is None and row_b is None else ()),
        ),
    )


def _require_same(a: Side, b: Side, what: str, of_a: object, of_b: object) -> None:
    if of_a != of_b:
        raise ConfigError(
            f"not comparable: {what} is {of_a} in A ({a.label}) and {of_b} in B ({b.label}); "
            "evaluate both under the same settings"
        )


def _require_same_tasks(a: Side, b: Side) -> None:
    ids_a, ids_b = set(a.report.task_ids), set(b.report.task_ids)
    if ids_a != ids_b:
        raise ConfigError(
            f"not comparable: A ({a.label}) has {len(ids_a)} tasks and B ({b.label}) {len(ids_b)}; "
            f"only in A: {_some(ids_a - ids_b)}; only in B: {_some(ids_b - ids_a)}. "
            f"--intersection compares the {len(ids_a & ids_b)} that both have"
        )


def _some(ids: set[str]) -> str:
    named = ", ".join(sorted(ids)[:_MAX_NAMED])
    more = len(ids) - _MAX_NAMED
    return (f"{named} and {more} more" if more > 0 else named) or "none"


_Pair = tuple[EvaluationRow, EvaluationRow]


def _pairs(
    a: Side, b: Side, row_a: RowChoice | None, row_b: RowChoice | None, *, intersection: bool
) -> list[_Pair]:
    """Rows to compare, at the same T each.

    Raises:
        ConfigError: there is no such pair.
    """
    if row_a is None or row_b is None:
        found = [
            (left, right)
            for left in a.report.rows
            for right in b.report.rows
            if row_key(left) == row_key(right)
        ]
        if not found:
            raise ConfigError(
                f"no row of A ({a.label}) has a namesake at the same T in B ({b.label}). A has "
                f"{row_names(a.report.rows)}; B has {row_names(b.report.rows)}. Choose rows with "
                "--row-a and --row-b POLICY:WHEN:T"
            )
        return found
    left, right = _chosen_rows(a, row_a), _chosen_rows(b, row_b)
    found = [(x, y) for x in left for y in right if x.tail_calls == y.tail_calls]
    if not found and intersection:
        return [(x, y) for x in left for y in right]
    if not found:
        raise ConfigError(
            f"not comparable: T is {_tails(left)} in A ({a.label}) and {_tails(right)} in B "
            f"({b.label}); evaluate both at the same T (--tail-calls), or pass --intersection to "
            "compare the tasks that were played at the same T on both sides"
        )
    return found


def _chosen_rows(side: Side, wanted: RowChoice) -> list[EvaluationRow]:
    found = [
        row
        for row in side.report.rows
        if (row.policy, row.tag) == (wanted.policy, wanted.tag)
        and wanted.tail_calls in (None, row.tail_calls)
    ]
    if not found:
        raise ConfigError(f"{side.label} has no such row; it has {row_names(side.report.rows)}")
    return found


def _tails(rows: Sequence[EvaluationRow]) -> str:
    return ", ".join(str(row.tail_calls) for row in rows)


def _compared(a: Side, b: Side, pair: _Pair, *, intersection: bool) -> ComparedRow:
    left, right = pair
    name_a, name_b = (f"{r.policy} {r.tag}, T = {r.tail_calls}" for r in pair)
    places_a, places_b = ({(o.task_id, o.tail_calls) for o in row.tasks} for row in pair)
    if not intersection and places_a and places_b and places_a != places_b:
        raise ConfigError(
            f"not comparable: {name_a} of A has {len(places_a)} pairs of task and T, {name_b} of "
            f"B has {len(places_b)}, and {len(places_a & places_b)} are the same; --intersection "
            "compares those"
        )
    if intersection and not places_a & places_b:
        raise ConfigError(
            f"no intersection: {name_a} of A and {name_b} of B have no task at the same T in "
            "common, or were written without outcomes by task by an earlier version"
        )
    null = _null_outcomes(a, left) or _null_outcomes(b, right)
    passes = _paired("all", left.tasks, right.tasks, null, of="pass") or _independent(left, right)
    by_class = []
    for name, ids in (parts_of(a.report) or parts_of(b.report)).items():
        own = (chosen(left, ids, None), chosen(right, ids, None))
        made = _paired(name, *own, null, of="pass")
        if made is not None:
            by_class.append(made)
    return ComparedRow(
        row_a=name_a,
        row_b=name_b,
        passes=passes,
        rewards=(
            None
            if rewards_differ(a.report, b.report)
            else _paired("all", left.tasks, right.tasks, (), of="reward")
        ),
        by_class=tuple(by_class),
        ceiling=ceiling(left, a.report),
        num_faults_a=left.num_faults,
        num_faults_b=right.num_faults,
        notes=(
            *((uncounted(left, right),) if passes is None else ()),
            *(f"differs: {text}" for text in differing(left.settings, right.settings)),
        ),
    )


def _null_outcomes(side: Side, row: EvaluationRow) -> Sequence[TaskOutcome]:
    """Of the null policy at the row's places; empty where it was not measured there."""
    places = {(o.task_id, o.tail_calls) for o in row.tasks}
    for other in side.report.rows:
        if other.policy == "null" and {(o.task_id, o.tail_calls) for o in other.tasks} == places:
            return other.tasks
    return ()


def _paired(
    name: str,
    a: Sequence[TaskOutcome],
    b: Sequence[TaskOutcome],
    null: Sequence[TaskOutcome],
    *,
    of: str,
) -> ComparedRate | None:
    """None where the sides share no task with an episode that counts."""
    found = paired_difference(b, a, of=of)
    if found is None:
        return None
    shared = {(o.task_id, o.tail_calls) for o in a} & {(o.task_id, o.tail_calls) for o in b}
    interval = found.interval
    return ComparedRate(
        name=name,
        num_tasks=found.num_tasks,
        rate_a=found.rate_b,
        rate_b=found.rate_a,
        null_rate=rate_of([o for o in null if (o.task_id, o.tail_calls) in shared]),
        difference=found.value,
        low=None if interval is None else interval.low,
        high=None if interval is None else interval.high,
        is_paired=interval is not None,
    )


def _independent(a: EvaluationRow, b: EvaluationRow) -> ComparedRate | None:
    """For rows of earlier versions, which hold no outcomes by task."""
    found = difference(b, a, "A")
    if found is None or a.pass_rate is None or b.pass_rate is None:
        return None
    return ComparedRate(
        name="all",
        num_tasks=min(a.num_tasks, b.num_tasks),
        rate_a=a.pass_rate,
        rate_b=b.pass_rate,
        null_rate=None,
        difference=found.value,
        low=found.low,
        high=found.high,
        is_paired=False,
    )


_HEAD: Final = ("Tasks", "A", "B", "Null", "B - A", "95 %", "Interval")


def comparison_tables(comparison: Comparison) -> list[EvaluationTable]:
    """Per pair of rows its pass rate, its reward, and its pass rate by class."""
    tables = []
    for row in comparison.rows:
        lines = []
        if row.passes is not None:
            lines.append(("pass rate", *_cells(row.passes)))
        if row.rewards is not None:
            lines.append(("reward", *_cells(row.rewards)))
        lines += [(rate.name, *_cells(rate)) for rate in row.by_class]
        names = row.row_a if row.row_a == row.row_b else f"A {row.row_a}; B {row.row_b}"
        if row.ceiling is not None:
            names += f"; practical ceiling {share(row.ceiling)}"
        if row.num_faults_a or row.num_faults_b:
            names += f"; faults left out: A {row.num_faults_a}, B {row.num_faults_b}"
        names = "; ".join((names, *row.notes))
        tables.append(EvaluationTable(names, ("What", *_HEAD), lines))
    return tables


def _cells(rate: ComparedRate) -> tuple[str, ...]:
    shown = "-"
    if rate.low is not None and rate.high is not None:
        shown = f"{rate.low:+.2f} to {rate.high:+.2f}"
    how = "paired by task" if rate.is_paired else "episodes independent"
    return (
        str(rate.num_tasks),
        share(rate.rate_a),
        share(rate.rate_b),
        share(rate.null_rate),
        f"{rate.difference:+.3f}",
        shown,
        "-" if shown == "-" else how,
    )
