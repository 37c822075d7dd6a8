"""What two evaluations do not have in common, in words that stand beside their differences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from miniverl_dist.schemas.eval_settings import reward_weights
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow, TailCalls

_ABSENT: Final = "nothing"


def setting_notes(a: EvaluationReport, b: EvaluationReport) -> Iterator[str]:
    """Settings of the two recipes that differ, or that one side does not tell."""
    silent = [name for name, side in (("A", a), ("B", b)) if not side.settings]
    if silent:
        yield (
            f"{' and '.join(silent)} recorded no settings (an earlier version): whether prompt, "
            "limits, seed and reward weights are the same cannot be told"
        )
        return
    for text in differing(a.settings, b.settings):
        yield f"differs: {text}"
    if rewards_differ(a, b):
        yield "rewards are not compared: their weights differ"


def rewards_differ(a: EvaluationReport, b: EvaluationReport) -> bool:
    """Whether the same episodes would get other rewards; False where one side does not tell."""
    weights = [reward_weights(side.settings) for side in (a, b)]
    return bool(a.settings and b.settings) and weights[0] != weights[1]


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> list[str]:
    """``name: VALUE in A, VALUE in B``; none where one side tells nothing at all."""
    if not a or not b:
        return []
    return [
        f"{name}: {a.get(name, _ABSENT)} in A, {b.get(name, _ABSENT)} in B"
        for name in sorted({*a, *b})
        if a.get(name) != b.get(name)
    ]


def one_sided(a: EvaluationReport, b: EvaluationReport) -> Iterator[str]:
    """Rows without a namesake on the other side."""
    for name, side, other in (("A", a, b), ("B", b, a)):
        known = {row_key(row) for row in other.rows}
        alone = [row for row in side.rows if row_key(row) not in known]
        if alone:
            yield f"only in {name}: {row_names(alone)}"


def row_key(row: EvaluationRow) -> tuple[str, str, TailCalls]:
    """What tells the rows of a report apart."""
    return row.policy, row.tag, row.tail_calls


def row_names(rows: Sequence[EvaluationRow]) -> str:
    """``POLICY:WHEN:T``, as ``--row-a`` takes them."""
    names = (":".join(str(part) for part in row_key(row)) for row in rows)
    return ", ".join(names) or "no rows"


def uncounted(left: EvaluationRow, right: EvaluationRow) -> str:
    """Why there is nothing to compare in two rows."""
    told = [
        f"{name} has {row.num_episodes} episodes that count and {row.num_faults} faults"
        for name, row in (("A", left), ("B", right))
    ]
    return f"no task has an episode that counts on both sides: {', '.join(told)}"
