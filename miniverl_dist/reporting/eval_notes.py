"""What an evaluation's own rows say against quoting them: broken bounds, lost or repeated plays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from miniverl_dist.schemas.trajectory import Termination
from miniverl_dist.training.eval_stats import STUDENT

_LIMITS: Final = frozenset({Termination.MAX_TOKENS.value, Termination.MAX_TURNS.value})
"""Ends that limits bring about, and not what was answered."""


def report_notes(report: EvaluationReport) -> list[str]:
    """One sentence each, none where all is as it should be."""
    rows = whole_rows(report.rows)
    found = [
        *_unmeasured(rows),
        *(_oracle(row) for row in rows if row.policy == "oracle" and _rate(row) < 1),
        *(_null(row) for row in rows if row.policy == "null" and _rate(row, 0.0) > 0),
        *_repeats(rows, report.temperature),
    ]
    return list(dict.fromkeys(found))


def whole_rows(rows: Sequence[EvaluationRow]) -> list[EvaluationRow]:
    """Rows that are no part of another: of every T together, only that one."""
    together = {(row.policy, row.tag) for row in rows if row.tail_calls == "all"}
    return [row for row in rows if row.tail_calls == "all" or (row.policy, row.tag) not in together]


def version_text(row: EvaluationRow) -> str:
    """The student's policy version; other policies have none, whatever earlier files say."""
    return "-" if row.policy != STUDENT or row.policy_version is None else str(row.policy_version)


def _rate(row: EvaluationRow, otherwise: float = 1.0) -> float:
    return otherwise if row.pass_rate is None else row.pass_rate


def _unmeasured(rows: Sequence[EvaluationRow]) -> Iterator[str]:
    for row in rows:
        if not row.num_episodes:
            yield (
                f"{row.policy} ({row.tag}, T = {row.tail_calls}) was not measured: all "
                f"{row.num_faults} episodes were lost to the harness ({_ends(row.terminations)})."
            )


def _oracle(row: EvaluationRow) -> str:
    """The expert's own calls do not pass: within these limits nobody can."""
    num_failed, num_tasks = _tasks(row, fails=True)
    ends = row.failed_ends or {
        name: count
        for name, count in row.terminations.items()
        if name != Termination.FINAL_ANSWER.value
    }
    told = f"oracle {row.pass_rate:.3f} at T = {row.tail_calls}: {num_failed} of {num_tasks} tasks"
    how = f"{'at one T or more ' if row.tail_calls == 'all' else ''}(how they ended: {_ends(ends)})"
    if ends and set(ends) <= _LIMITS:
        return (
            f"{told} cannot be solved within the limits {how}: raise rollout.max_context_tokens or "
            "max_new_tokens, or read every rate against this one."
        )
    return (
        f"{told} are not passed by the expert's own calls {how}: read every rate against this one, "
        "and look at what the verifier says of them."
    )


def _null(row: EvaluationRow) -> str:
    num_passed, num_tasks = _tasks(row, fails=False)
    return (
        f"null {row.pass_rate:.3f} at T = {row.tail_calls}: the verifier passes doing nothing in "
        f"{num_passed} of {num_tasks} tasks; only what a rate has above this was done by a policy."
    )


def _tasks(row: EvaluationRow, *, fails: bool) -> tuple[int, int]:
    """Tasks with an episode that failed, or passed, and all that were played."""
    played = [o for o in row.tasks if o.num_episodes]
    hits = {o.task_id for o in played if (o.num_passed < o.num_episodes if fails else o.num_passed)}
    if not played:  # rows of earlier versions: the share of episodes
        share = _rate(row) if not fails else 1 - _rate(row)
        return round(share * row.num_tasks), row.num_tasks
    return len(hits), len({o.task_id for o in played})


def _repeats(rows: Sequence[EvaluationRow], temperature: float) -> Iterator[str]:
    """Greedy decoding says the same each time."""
    most = max((o.num_episodes for row in rows for o in row.tasks), default=0)
    if temperature == 0 and most > 1:
        yield (
            f"Temperature 0: the {most} episodes of a task are plays of the same text, not "
            "independent ones. Intervals over episodes and pass@k say nothing then; one episode "
            "per task (evaluation.episodes_per_task=1) is enough."
        )


def _ends(ends: dict[str, int]) -> str:
    ordered = sorted(ends.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{name} {count}" for name, count in ordered) or "not recorded"
