"""A benchmark as Markdown: what was measured, what differs, what could not be made equal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import fmean

from miniverl_dist.config.arms import COLD_START
from miniverl_dist.lab.arms import (
    MIN_SEEDS,
    BenchmarkReport,
    Difference,
    Interval,
    Measured,
    RunOutcome,
)

NO_CLAIM = "no significance claimed"
NOTHING = "-"
VERDICT_NOTE = (
    "The verdict is the pass rate's. No reward where the two weigh otherwise what an episode has "
    "reached."
)
_SAMPLED = {
    "sampled groups": "sampled_groups",
    "sampled tokens": "sampled_tokens",
    "groups without variance": "zero_variance_groups",
    "refilled groups": "refilled_groups",
}
"""Column -> field of `Measured`; they say nothing of an arm that learns stored episodes."""
_ASKED = ("teacher_scored_tokens", "teacher_asked_rows")
_HEAD = (*_SAMPLED, "optimizer steps", "teacher asked: tokens / rows", "zero_variance", "CPU s")


def markdown(report: BenchmarkReport) -> str:
    """All tables of a benchmark."""
    parts = [f"# {report.name}", arms_table(report), differences_table(report)]
    parts += [quantities_table(report), *_failures(report.outcomes)]
    return "\n\n".join(parts) + "\n"


def arms_table(report: BenchmarkReport) -> str:
    """Per arm: pass rate and reward of the trained student."""
    rows = []
    has_start = report.pass_rates[COLD_START] is not None
    for arm in (*([COLD_START] * has_start), *report.arms):
        starts = [m.pass_rate_start for m in _measured(report, arm)]
        known = [value for value in starts if value is not None]
        rows.append(
            [
                arm,
                str(len(starts)),
                f"{fmean(known):.3f}" if known else "",
                shown(report.pass_rates[arm]),
                shown(report.rewards[arm]),
            ]
        )
    head = ["arm", "seeds", "pass at start", "pass", "reward"]
    return markdown_table(head, rows) + (
        "\n\nMeans over seeds with 95 % t intervals, where two seeds differ; every seed's episodes "
        "count as one number."
    )


def differences_table(report: BenchmarkReport) -> str:
    """Paired differences, and what may be said of each."""
    rows = [
        [f"{d.arm} - {d.against}", *difference_cells(d)]
        for d in (*report.differences, *report.gains)
    ]
    if not rows:
        return "No two arms have finished a seed yet: no differences."
    table = markdown_table(["difference", "seeds", "pass", "reward", "verdict"], rows)
    return f"{table}\n\n{VERDICT_NOTE}"


def difference_cells(difference: Difference) -> list[str]:
    """Seeds, pass rate, reward and verdict of one difference."""
    reward = difference.reward
    return [
        str(difference.pass_rate.num_seeds),
        shown(difference.pass_rate, signed=True),
        NOTHING if reward is None else shown(reward, signed=True),
        verdict(difference),
    ]


def verdict(difference: Difference) -> str:
    """What a difference shows."""
    found = difference.pass_rate
    if difference.problems:
        return "not comparable: " + "; ".join(difference.problems)
    if found.num_seeds < MIN_SEEDS:
        number = "one seed" if found.num_seeds == 1 else f"{found.num_seeds} seeds"
        return f"{NO_CLAIM}: {number}, at least {MIN_SEEDS} are needed"
    if found.low is None:
        return f"{NO_CLAIM}: equal in all {found.num_seeds} seeds, so their spread is unknown"
    if not difference.is_clear:
        return "not shown: the interval holds 0"
    return "higher" if found.mean > 0 else "lower"


def quantities_table(report: BenchmarkReport) -> str:
    """What an arm used; equal or not, it is measured."""
    rows = []
    for arm in report.arms:
        found = _measured(report, arm)
        cells = [*_quantities(found), _cpu(report, arm)] if found else [""] * len(_HEAD)
        rows.append([arm, *cells])
    cold = _cpu(report, COLD_START)
    note = f"\n\nCold start: {cold} CPU seconds a seed, shared by its arms."
    return markdown_table(["arm", *_HEAD], rows) + (
        f"\n\nMeans over seeds; {NOTHING} where nothing was sampled, or the teacher was not asked: "
        "tokens of its own that it scored, rows it gave whole distributions for."
        + note
        * bool(_measured(report, COLD_START))
    )


def _cpu(report: BenchmarkReport, arm: str) -> str:
    """Mean over the runs whose time was counted."""
    found = [
        o.cpu_seconds for o in report.outcomes if o.run.arm == arm and o.measured and o.is_cpu_known
    ]
    return f"{fmean(found):.0f}" if found else NOTHING


def _quantities(found: Sequence[Measured]) -> list[str]:
    """Cells of one arm, in the order of the head but for the last."""
    samples = any(m.sampled_tokens for m in found)

    def mean(field: str) -> str:
        return f"{fmean(getattr(m, field) for m in found):,.0f}"

    asked = [mean(f) if any(getattr(m, f) for m in found) else NOTHING for f in _ASKED]
    policies = ", ".join(sorted({m.zero_variance for m in found}))
    return [
        *(mean(field) if samples else NOTHING for field in _SAMPLED.values()),
        mean("optimizer_steps"),
        " / ".join(asked),
        policies if samples else NOTHING,
    ]


def shown(interval: Interval | None, *, signed: bool = False) -> str:
    """``0.123 [0.100, 0.146]``; only the mean where there is no interval."""
    if interval is None:
        return "not run"
    form = "+.3f" if signed else ".3f"
    if interval.low is None or interval.high is None:
        return f"{interval.mean:{form}}"
    return f"{interval.mean:{form}} [{interval.low:{form}}, {interval.high:{form}}]"


def _measured(report: BenchmarkReport, arm: str) -> list[Measured]:
    return [o.measured for o in report.outcomes if o.run.arm == arm and o.measured is not None]


def _failures(outcomes: Iterable[RunOutcome]) -> list[str]:
    failed = [o for o in outcomes if o.status == "failed"]
    return [
        "\n".join(["Failed runs:", "", *(f"* {o.run.name}: {o.reason}" for o in failed)])
    ] * bool(failed)


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells that hold no bar."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
