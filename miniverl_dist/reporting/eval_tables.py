"""All tables of an evaluation, each at most 100 columns wide for names of usual length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Final

from miniverl_dist.reporting.eval_notes import version_text, whole_rows
from miniverl_dist.reporting.evaluation import (
    TABLE_HEAD,
    EvaluationLine,
    evaluation_lines,
    row_name,
    share,
    span,
    table_rows,
)
from miniverl_dist.schemas.evaluation import (
    ErrorKind,
    EvaluationReport,
    EvaluationRow,
    TaskOutcome,
)
from miniverl_dist.training.eval_stats import rate_of, task_interval, wilson_interval

_NAME: Final = ("Policy", "When", "T")
_ERRORS: Final[dict[ErrorKind, str]] = {
    "parse": "Unreadable",
    "unknown_tool": "No such tool",
    "arguments": "Arguments",
    "execution": "Failed",
    "harness_fault": "Faults",
}
_MAX_ENDS_CHARS: Final = 50
_MAX_VALUE_CHARS: Final = 60


@dataclass(frozen=True)
class EvaluationTable:
    """One table as text."""

    title: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    is_setting: bool = False
    """Says how it was measured, not what was found."""


def evaluation_tables(report: EvaluationReport) -> list[EvaluationTable]:
    """The tables that have rows: rates, differences, behaviour, errors, ends, breakdowns."""
    lines = evaluation_lines(report)
    rates_head, rates = _without_empty(TABLE_HEAD, table_rows(report), "Ceiling")
    tables = [
        EvaluationTable("Pass rates", rates_head, rates),
        EvaluationTable("Differences of pass rates", DIFFERENCE_HEAD, _differences(lines)),
        EvaluationTable("What the policies do", _BEHAVIOUR_HEAD, [_behaviour(r) for r in lines]),
        EvaluationTable("Calls that went wrong", _ERROR_HEAD, [*_errors(lines)]),
        EvaluationTable("How episodes end", (*_NAME, "Ends"), [*_ends(lines)]),
        _pass_at_k(lines),
        _by_class(lines, report),
        _by_tail(lines),
        EvaluationTable(
            "How the policies were asked", _ASKED_HEAD, [*_asked(report.rows)], is_setting=True
        ),
        EvaluationTable(
            "Settings of the recipe", ("Field", "Value"), _settings(report), is_setting=True
        ),
    ]
    return [table for table in tables if table.rows]


def _without_empty(
    head: tuple[str, ...], rows: list[tuple[str, ...]], name: str
) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Leave out a column that says nothing in any row."""
    index = head.index(name)
    if any(row[index] != "-" for row in rows):  # the dash of `share`
        return head, rows
    return (
        head[:index] + head[index + 1 :],
        [row[:index] + row[index + 1 :] for row in rows],
    )


DIFFERENCE_HEAD: Final = (*_NAME, "Against", "Difference", "95 %", "Interval")


def _differences(lines: Sequence[EvaluationLine]) -> list[tuple[str, ...]]:
    return [
        (
            *row_name(line.row),
            found.against,
            f"{found.value:+.3f}",
            f"{found.low:+.2f} to {found.high:+.2f}",
            "paired by task" if found.is_paired else "episodes independent",
        )
        for line in lines
        if (found := line.difference) is not None
    ]


_BEHAVIOUR_HEAD: Final = (
    *_NAME,
    "Version",
    "Reward",
    "Per turn",
    "State",
    "Parsed",
    "1st call",
    "Calls",
    "Tokens",
)


def _behaviour(line: EvaluationLine) -> tuple[str, ...]:
    row = line.row
    return (
        *row_name(row),
        version_text(row),
        share(row.reward_mean),
        share(row.official_per_turn_rate),
        share(row.state_only_rate),
        share(row.parsed_call_rate),
        share(row.first_call_match_rate),
        "-" if row.calls_per_episode is None else f"{row.calls_per_episode:.2f}",
        "-" if row.tokens_per_episode is None else f"{row.tokens_per_episode:.0f}",
    )


_ERROR_HEAD: Final = (*_NAME, *_ERRORS.values())


def _errors(lines: Sequence[EvaluationLine]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        counts = line.row.errors or {"harness_fault": line.row.num_faults}
        if any(counts.values()):
            shown = (str(counts[kind]) if kind in counts else "-" for kind in _ERRORS)
            yield (*row_name(line.row), *shown)


def _ends(lines: Sequence[EvaluationLine]) -> Iterator[tuple[str, ...]]:
    for line in lines:
        ends = sorted(line.row.terminations.items(), key=lambda pair: (-pair[1], pair[0]))
        shown: list[str] = []
        while ends and len(", ".join([*shown, _end(ends[0])])) <= _MAX_ENDS_CHARS:
            shown.append(_end(ends.pop(0)))
        if ends:
            shown.append(f"other {sum(count for _, count in ends)}")
        if shown:
            yield (*row_name(line.row), ", ".join(shown))


def _end(end: tuple[str, int]) -> str:
    return f"{end[0]} {end[1]}"


def _pass_at_k(lines: Sequence[EvaluationLine]) -> EvaluationTable:
    """Powers of two, and the most episodes that any task has."""
    most = max((len(line.row.pass_at_k) for line in lines), default=0)
    ks = sorted({2**power for power in range(most.bit_length())} & set(range(1, most)) | {most})
    rows = [
        (
            *row_name(line.row),
            *(share(found[k - 1] if k <= len(found) else None) for k in ks),
        )
        for line in lines
        if len(found := line.row.pass_at_k) > 1
    ]
    head = (*_NAME, *(f"pass@{k}" for k in ks))
    return EvaluationTable("At least one of k episodes passes", head, rows)


_ASKED_HEAD: Final = ("Policy", "When", "Temp.", "Eps. per task", "Tokens a turn", "More")
_ASKED: Final = ("temperature", "episodes_per_task", "max_new_tokens")
_NAMED: Final = ("model", "thinking")
"""Stand in the policy's name."""


def _asked(rows: Sequence[EvaluationRow]) -> Iterator[tuple[str, ...]]:
    """Where a policy has nothing of its own, the recipe's settings hold."""
    for row in whole_rows(rows):
        if row.settings:
            shown = {*_ASKED, *_NAMED}
            more = [f"{k} {v}" for k, v in sorted(row.settings.items()) if k not in shown]
            known = (row.settings.get(name, "-") for name in _ASKED)
            yield (row.policy, row.tag, *known, ", ".join(more) or "-")


def _settings(report: EvaluationReport) -> list[tuple[str, ...]]:
    return [
        (name, shorten(value, _MAX_VALUE_CHARS, placeholder=" ..."))
        for name, value in sorted(report.settings.items())
    ]


_PART_COLUMNS: Final = ("Tasks", "Eps.", "Pass", "95 % Wilson", "95 % by task", "Null")


def _by_class(lines: Sequence[EvaluationLine], report: EvaluationReport) -> EvaluationTable:
    """Where a row is for every T, only that row."""
    rows = []
    parts = parts_of(report)
    whole = whole_rows([line.row for line in lines])
    for line in lines:
        if line.row not in whole or line.row.policy == "null":
            continue
        for name, ids in parts.items():
            if chosen(line.row, ids, None):
                rows.append((*row_name(line.row), name, *_part(line, ids, None)))
    head = (*_NAME, "Class", *_PART_COLUMNS)
    return EvaluationTable("Pass rates by class (a task counts in each it uses)", head, rows)


def parts_of(report: EvaluationReport) -> dict[str, set[str]]:
    """Category or class -> its tasks; a kind of part of which there is only one is left out."""
    parts: dict[str, set[str]] = {}
    by_category = {task_id: (name,) for task_id, name in report.categories.items()}
    for of_task in (by_category, report.classes):
        names = sorted({name for found in of_task.values() for name in found})
        for name in names if len(names) > 1 else ():
            parts[name] = {task_id for task_id, found in of_task.items() if name in found}
    return parts


def _by_tail(lines: Sequence[EvaluationLine]) -> EvaluationTable:
    """For rows whose tasks were played at several T because some have fewer calls."""
    rows = []
    for line in lines:
        tails = sorted({outcome.tail_calls for outcome in line.row.tasks})
        if line.row.tail_calls != "all" and len(tails) > 1:
            rows += [(*row_name(line.row), str(t), *_part(line, None, t)) for t in tails]
    head = (*_NAME, "Played", *_PART_COLUMNS)
    return EvaluationTable("Pass rates by the calls that were left", head, rows)


def _part(line: EvaluationLine, ids: set[str] | None, tail: int | None) -> tuple[str, ...]:
    """Cells of some of a row's outcomes."""
    own = chosen(line.row, ids, tail)
    null = [] if line.null is None else chosen(line.null, ids, tail)
    passed, played = sum(o.num_passed for o in own), sum(o.num_episodes for o in own)
    by_task = task_interval(own)
    return (
        str(len({o.task_id for o in own})),
        str(played),
        share(rate_of(own)),
        span(*wilson_interval(passed, played)),
        "-" if by_task is None else span(by_task.low, by_task.high),
        share(rate_of(null)),
    )


def chosen(row: EvaluationRow, ids: set[str] | None, tail: int | None) -> list[TaskOutcome]:
    """A row's outcomes of some tasks (None: all) at one T (None: all)."""
    return [
        outcome
        for outcome in row.tasks
        if (ids is None or outcome.task_id in ids) and (tail is None or outcome.tail_calls == tail)
    ]
