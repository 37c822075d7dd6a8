"""Statistics of an evaluation: rows, intervals, pass@k, and differences between policies.

Episodes of one task share its difficulty and are not independent, so what is resampled are tasks:
a task is drawn with all its episodes, at every horizon and in every variant (BFCL's categories).
N counts tasks, B resamples.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.evaluation import ErrorKind, EvaluationRow, TailCalls, TaskOutcome
from miniverl_dist.schemas.messages import ParseStatus
from miniverl_dist.schemas.trajectory import HARNESS_TERMINATIONS, Trajectory

if TYPE_CHECKING:
    from miniverl_dist.training.evaluate import EvaluationJob

STUDENT: Final = "student"
"""The policy that is trained: the only one whose weights have versions."""
_Z_95: Final = 1.959963984540054
NUM_RESAMPLES: Final = 10_000
BOOTSTRAP_SEED: Final = 20_260_101
_TAILS: Final = (0.025, 0.975)
_DIGITS: Final = 12
"""Ends of bootstrap intervals are rounded to it: the order in which a machine adds floats must not
show in a file."""


def wilson_interval(num_passed: int, num_episodes: int) -> tuple[float, float]:
    """95 % Wilson score interval of a pass rate; (0, 1) without episodes.

    Source: Wilson 1927. Unlike the normal interval it stays within [0, 1] and does not collapse
    at 0 or all passes.
    """
    if num_episodes == 0:
        return 0.0, 1.0
    rate, z2 = num_passed / num_episodes, _Z_95**2
    denominator = 1 + z2 / num_episodes
    center = (rate + z2 / (2 * num_episodes)) / denominator
    half = (
        _Z_95
        * math.sqrt(rate * (1 - rate) / num_episodes + z2 / (4 * num_episodes**2))
        / denominator
    )
    # At 0 or all passes an end is the rate itself, but for rounding.
    return max(0.0, min(rate, center - half)), min(1.0, max(rate, center + half))


def pass_at_k(num_episodes: int, num_passed: int, k: int) -> float:
    """Chance that at least one of ``k`` episodes drawn without replacement passes.

    Args:
        num_episodes: n, at least ``k``.
        num_passed: c, 0 to n.
        k: at least 1.

    Source: Chen et al. 2021, arXiv:2107.03374, equation 1: 1 - C(n - c, k) / C(n, k). It is an
    unbiased estimate of 1 - (1 - p)^k, which 1 - (1 - c/n)^k is not.
    """
    return 1.0 - math.comb(num_episodes - num_passed, k) / math.comb(num_episodes, k)


def mean_pass_at_k(outcomes: Sequence[TaskOutcome]) -> tuple[float, ...]:
    """``pass_at_k`` for k = 1, 2, ... as a mean over tasks, up to the most episodes of a task.

    A task with fewer than k episodes that count (the rest were harness faults) does not enter
    entry k.
    """
    most = max((outcome.num_episodes for outcome in outcomes), default=0)
    means = []
    for k in range(1, most + 1):
        usable = [o for o in outcomes if o.num_episodes >= k]
        total = math.fsum(pass_at_k(o.num_episodes, o.num_passed, k) for o in usable)
        means.append(total / len(usable))
    return tuple(means)


@lru_cache(maxsize=4)
def resample_counts(num_tasks: int) -> NDArray[np.float64]:
    """[B, N] how often each task is drawn in each resample; the same on every machine.

    Drawn from PCG64's raw stream, whose values numpy guarantees for good; its generator methods
    may change between versions.
    """
    raw = np.random.PCG64(BOOTSTRAP_SEED).random_raw(NUM_RESAMPLES * num_tasks)
    drawn = ((raw >> np.uint64(32)) * np.uint64(num_tasks)) >> np.uint64(32)
    row_starts = np.repeat(np.arange(NUM_RESAMPLES) * num_tasks, num_tasks)
    counts = np.bincount(
        row_starts + drawn.astype(np.int64), minlength=NUM_RESAMPLES * num_tasks
    ).reshape(NUM_RESAMPLES, num_tasks)
    found = counts.astype(np.float64)
    found.setflags(write=False)  # the cache hands the same array to everyone
    return found


@dataclass(frozen=True)
class Interval:
    """A 95 % percentile bootstrap interval over tasks."""

    low: float
    high: float


@dataclass(frozen=True)
class PairedDifference:
    """Rate of A minus rate of B over the tasks that both have played, with its interval."""

    rate_a: float
    rate_b: float
    interval: Interval | None
    """None with fewer than two tasks: nothing can be resampled."""
    num_tasks: int

    @property
    def value(self) -> float:
        """A minus B."""
        return self.rate_a - self.rate_b


def rate_of(outcomes: Sequence[TaskOutcome]) -> float | None:
    """Passes per episode; None without an episode that counts."""
    played = sum(o.num_episodes for o in outcomes)
    return sum(o.num_passed for o in outcomes) / played if played else None


def task_interval(outcomes: Sequence[TaskOutcome]) -> Interval | None:
    """Interval of the pass rate that resamples tasks; None with fewer than two.

    It collapses to a point where all tasks agree (all passed, none passed): then the Wilson
    interval is the one to read.
    """
    sums = np.array([*_sums_by_cluster(outcomes, _clusters(outcomes)).values()], dtype=np.float64)
    if len(sums) < 2:
        return None
    counts = resample_counts(len(sums))
    return _percentiles((counts @ sums[:, 0]) / (counts @ sums[:, 1]))


def paired_difference(
    a: Sequence[TaskOutcome], b: Sequence[TaskOutcome], *, of: str = "pass"
) -> PairedDifference | None:
    """A minus B, both on the same resampled tasks: what tasks have in common cancels.

    Args:
        a: Outcomes of one policy or moment.
        b: Of the other. Tasks and horizons that only one of them has do not enter.
        of: ``pass`` or ``reward``.

    Returns:
        None where no task has an episode that counts on both sides.
    """
    shared = {(o.task_id, o.tail_calls) for o in a if o.num_episodes} & {
        (o.task_id, o.tail_calls) for o in b if o.num_episodes
    }
    if not shared:
        return None
    sides = [[o for o in side if (o.task_id, o.tail_calls) in shared] for side in (a, b)]
    clusters = _clusters([*sides[0], *sides[1]])
    by_cluster = [_sums_by_cluster(side, clusters) for side in sides]
    column = 0 if of == "pass" else 2
    left, right = (np.array([*sums.values()], dtype=np.float64) for sums in by_cluster)
    rates = [float(side[:, column].sum() / side[:, 1].sum()) for side in (left, right)]
    interval = None
    if len(left) > 1:
        counts = resample_counts(len(left))
        interval = _percentiles(
            (counts @ left[:, column]) / (counts @ left[:, 1])
            - (counts @ right[:, column]) / (counts @ right[:, 1])
        )
    return PairedDifference(rates[0], rates[1], interval, len({task_id for task_id, _ in shared}))


def _clusters(outcomes: Sequence[TaskOutcome]) -> dict[str, str]:
    """Task -> what is drawn together with it: its family, or itself.

    Where two evaluations declare other families, what either of them joins is drawn together.
    """
    heads: dict[str, str] = {}

    def head(name: str) -> str:
        while (above := heads.setdefault(name, name)) != name:
            name = above
        return name

    by_task: dict[str, str] = {}
    for o in outcomes:
        name = o.family or o.task_id
        first, second = sorted((head(by_task.setdefault(o.task_id, name)), head(name)))
        heads[second] = first
    return {task_id: head(name) for task_id, name in by_task.items()}


def _sums_by_cluster(
    outcomes: Sequence[TaskOutcome], clusters: Mapping[str, str]
) -> dict[str, tuple[float, float, float]]:
    """Cluster -> (passes, episodes, reward) at all T; without an episode, left out.

    Sorted by name: the order in which a row lists its tasks must not change an interval.
    """
    sums: dict[str, tuple[float, float, float]] = {}
    for o in outcomes:
        if o.num_episodes:
            key = clusters[o.task_id]
            passed, played, reward = sums.get(key, (0.0, 0.0, 0.0))
            sums[key] = (
                passed + o.num_passed,
                played + o.num_episodes,
                reward + o.reward_sum,
            )
    return dict(sorted(sums.items()))


def _percentiles(values: NDArray[np.float64]) -> Interval:
    low, high = np.quantile(values, _TAILS)
    return Interval(round(float(low), _DIGITS), round(float(high), _DIGITS))


def summaries(
    job: EvaluationJob, trajectories: Sequence[Trajectory], places: Sequence[Assignment]
) -> tuple[EvaluationRow, ...]:
    """The rows of one job: one, or for every T one row per T and then one for all together."""
    if job.tail_calls != "all":
        return (summarize(job, job.tail_calls, trajectories, places),)
    rows = [
        summarize(
            job,
            tail,
            [t for t in trajectories if t.tail_calls == tail],
            [place for place in places if place.tail_calls == tail],
        )
        for tail in sorted({place.tail_calls for place in places})
    ]
    return (*rows, summarize(job, "all", trajectories, places))


def summarize(
    job: EvaluationJob,
    tail_calls: TailCalls,
    trajectories: Sequence[Trajectory],
    places: Sequence[Assignment],
) -> EvaluationRow:
    """Rates and means over the episodes that count; harness faults are counted apart."""
    counted = [t for t in trajectories if t.termination not in HARNESS_TERMINATIONS]
    failed = [t for t in counted if not t.passed]
    low, high = wilson_interval(len(counted) - len(failed), len(counted))
    outcomes = task_outcomes(counted, places, job.families)
    by_task = task_interval(outcomes)
    parts = sorted({name for t in counted for name in t.reward_parts})
    return EvaluationRow(
        policy=job.policy,
        tag=job.tag,
        policy_version=job.policy_version if job.policy == STUDENT else None,
        tail_calls=tail_calls,
        num_tasks=len({place.task_id for place in places}),
        num_episodes=len(counted),
        num_faults=len(trajectories) - len(counted),
        pass_rate=_mean([float(t.passed) for t in counted]),
        pass_low=low if counted else None,
        pass_high=high if counted else None,
        official_per_turn_rate=_check_rate(counted, "official_per_turn"),
        state_only_rate=_check_rate(counted, "state_only"),
        reward_mean=_mean([t.reward for t in counted]),
        reward_parts={
            name: float(np.mean([t.reward_parts.get(name, 0.0) for t in counted])) for name in parts
        },
        calls_per_episode=_mean([float(len(t.tool_calls)) for t in counted]),
        tokens_per_episode=_mean(
            [float(sum(s.end - s.start for s in t.spans if s.sampled)) for t in counted]
        ),
        terminations=_ends(trajectories),
        failed_ends=_ends(failed),
        pass_low_by_task=None if by_task is None else by_task.low,
        pass_high_by_task=None if by_task is None else by_task.high,
        pass_at_k=mean_pass_at_k(outcomes),
        parsed_call_rate=_mean([float(_has_readable_call(t)) for t in counted]),
        first_call_match_rate=_check_rate(counted, "first_call_match"),
        errors=_errors(trajectories),
        tasks=outcomes,
        job=job.digest or "",
        settings=dict(job.settings),
    )


def _ends(trajectories: Sequence[Trajectory]) -> dict[str, int]:
    return dict(sorted(Counter(t.termination.value for t in trajectories).items()))


def task_outcomes(
    counted: Sequence[Trajectory], places: Sequence[Assignment], families: Mapping[str, str]
) -> tuple[TaskOutcome, ...]:
    """What the episodes that count have come to, by task and T, in the order of ``places``."""
    played: dict[tuple[str, int], list[Trajectory]] = {
        (place.task_id, place.tail_calls): [] for place in places
    }
    for t in counted:
        played[t.task_id, t.tail_calls].append(t)
    return tuple(
        TaskOutcome(
            task_id=task_id,
            tail_calls=tail_calls,
            num_episodes=len(episodes),
            num_passed=sum(t.passed for t in episodes),
            reward_sum=math.fsum(t.reward for t in episodes),
            family=families.get(task_id, ""),
        )
        for (task_id, tail_calls), episodes in played.items()
    )


def _errors(trajectories: Sequence[Trajectory]) -> dict[ErrorKind, int]:
    """Failed calls of the episodes that count by kind, and the episodes that do not count."""
    found: dict[ErrorKind, int] = {
        "parse": 0,
        "unknown_tool": 0,
        "arguments": 0,
        "execution": 0,
        "harness_fault": 0,
    }
    for t in trajectories:
        if t.termination in HARNESS_TERMINATIONS:
            found["harness_fault"] += 1
            continue
        kinds = t.call_errors or (None,) * len(t.tool_calls)
        for call, succeeded, kind in zip(t.tool_calls, t.exec_successes, kinds, strict=True):
            if call.status is not ParseStatus.OK:
                found["parse"] += 1
            elif not succeeded:
                found["execution" if kind is None else kind.value] += 1
    return found


def _has_readable_call(trajectory: Trajectory) -> bool:
    return any(call.status is ParseStatus.OK for call in trajectory.tool_calls)


def _check_rate(trajectories: Sequence[Trajectory], check: str) -> float | None:
    """Share of verdicts that hold a check and found it true; None where none holds it."""
    if not any(check in trajectory.verdict for trajectory in trajectories):
        return None
    return _mean([float(bool(trajectory.verdict.get(check))) for trajectory in trajectories])


def _mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if values else None
