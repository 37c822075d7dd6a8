"""How often the intervals of an evaluation hold the truth when episodes of a task are alike.

    python -m benchmarks.bench_eval_intervals

Draws tasks whose pass rates differ (a U-shaped beta distribution: most tasks nearly always pass or
nearly never), plays episodes of each, and counts in how many of many evaluations the 95 % interval
holds the mean pass rate over all tasks there could be. The same for a difference of two policies
that differ by the same amount on each task: by task and paired, beside independent episodes.
"""

from __future__ import annotations

import math
import random
import sys

from miniverl_dist.schemas.evaluation import TaskOutcome
from miniverl_dist.training.eval_stats import paired_difference, task_interval, wilson_interval

NUM_EVALUATIONS = 400
ALPHA, BETA = 0.5, 0.5
GAIN = 0.1
CASES = ((5, 16), (10, 4), (10, 16), (30, 1), (30, 4), (30, 16))
"""(tasks, episodes of each)."""


def evaluation(
    rng: random.Random, rates: list[float], num_episodes: int
) -> tuple[TaskOutcome, ...]:
    return tuple(
        TaskOutcome(
            task_id=f"t{index}",
            tail_calls=1,
            num_episodes=num_episodes,
            num_passed=sum(rng.random() < rate for _ in range(num_episodes)),
        )
        for index, rate in enumerate(rates)
    )


def coverage(num_tasks: int, num_episodes: int) -> tuple[float, float]:
    """Shares of evaluations whose (Wilson, by task) interval holds the mean rate."""
    rng = random.Random(num_tasks * 1000 + num_episodes)
    truth = ALPHA / (ALPHA + BETA)
    held = [0, 0]
    for _ in range(NUM_EVALUATIONS):
        rates = [rng.betavariate(ALPHA, BETA) for _ in range(num_tasks)]
        found = evaluation(rng, rates, num_episodes)
        low, high = wilson_interval(sum(o.num_passed for o in found), num_tasks * num_episodes)
        held[0] += low <= truth <= high
        by_task = task_interval(found)
        held[1] += by_task is not None and by_task.low <= truth <= by_task.high
    return held[0] / NUM_EVALUATIONS, held[1] / NUM_EVALUATIONS


def difference(num_tasks: int, num_episodes: int) -> tuple[float, float]:
    """(coverage of the paired interval, its width over that of independent episodes)."""
    rng = random.Random(num_tasks * 1000 + num_episodes + 1)
    held, ratios = 0, []
    for _ in range(NUM_EVALUATIONS):
        rates = [rng.betavariate(ALPHA, BETA) * (1 - GAIN) for _ in range(num_tasks)]
        a = evaluation(rng, [rate + GAIN for rate in rates], num_episodes)
        b = evaluation(rng, rates, num_episodes)
        found = paired_difference(a, b)
        assert found is not None
        assert found.interval is not None
        held += found.interval.low <= GAIN <= found.interval.high
        ratios.append((found.interval.high - found.interval.low) / _newcombe_width(a, b))
    return held / NUM_EVALUATIONS, sum(ratios) / len(ratios)


def _newcombe_width(*sides: tuple[TaskOutcome, ...]) -> float:
    (low_a, rate_a, high_a), (low_b, rate_b, high_b) = (
        _with_ends(sum(o.num_passed for o in side), sum(o.num_episodes for o in side))
        for side in sides
    )
    below = math.hypot(rate_a - low_a, high_b - rate_b)
    return below + math.hypot(high_a - rate_a, rate_b - low_b)


def _with_ends(passed: int, played: int) -> tuple[float, float, float]:
    low, high = wilson_interval(passed, played)
    return low, passed / played, high


def main() -> None:
    print(f"{NUM_EVALUATIONS} evaluations a line; nominal coverage 0.95")
    print("tasks  episodes  Wilson  by task  paired difference  its width / independent")
    found = {}
    for tasks, episodes in CASES:
        wilson, by_task = coverage(tasks, episodes)
        paired, ratio = difference(tasks, episodes)
        found[tasks, episodes] = (wilson, by_task, paired, ratio)
        print(
            f"{tasks:5}  {episodes:8}  {wilson:6.3f}  {by_task:7.3f}  {paired:17.3f}  {ratio:.2f}"
        )
    wilson, by_task, paired, ratio = found[30, 16]
    claims = {
        "30 tasks x 16 episodes: Wilson holds the truth in fewer than 0.75": wilson < 0.75,
        "and the interval by task in more than 0.90": by_task > 0.90,
        "and the paired interval in more than 0.90": paired > 0.90,
        "and it is narrower than that of independent episodes": ratio < 1,
        "5 tasks are too few for the interval by task (below 0.90)": found[5, 16][1] < 0.90,
    }
    for claim, is_true in claims.items():
        print(f"{'yes' if is_true else 'NO ':3}  {claim}")
    if not all(claims.values()):
        sys.exit(1)


if __name__ == "__main__":
    main()
