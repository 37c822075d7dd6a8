"""Claims: a run with `loop.accumulate` takes at most 1.05 times its on-policy bound.

And one step off policy with slot refill it takes at most 1.2 times the bound of staleness 1.

The real loop, buffer, workers and records run in simulated time: only engines, teacher, student and
clock are fakes (`tests.support.simulated_run`). 16 groups of 8 episodes a step, lognormal
durations on 128 slots, the slowest about six times the mean. "Slot refill": workers for two
batches, so that the next batch's episodes take the slots that the short ones leave.

The bounds come from the durations alone, by formulas written here, and nothing that keeps to the
rule can beat them: a batch needs its slowest group, that group's own gradients, the optimizer step
and the publish; the trainer cannot compute gradients before the weights they belong to; engines
have so many slots. On policy a step's groups start at the publish before it, under staleness 1 at
the one before that. Waits for the teacher's queue are left out of the bounds.

`in FIFO order` is the on-policy bound if gradients were computed strictly in FIFO order: what
comes behind a slow group waits for it, which no loop can make up for.

Exit status 1 when a claim does not hold. No torch, no network; about a minute.

    python -m benchmarks.bench_loop_overlap
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.simulated_run import Simulated, Timing, simulate

NUM_GROUPS, GROUP_SIZE, NUM_STEPS = 16, 8, 10
SEEDS = (0, 1, 2, 3, 4)
MAX_ON_POLICY, MAX_STALENESS_1 = 1.05, 1.2
REFILL = {"max_policy_lag": 1, "num_workers": 2 * NUM_GROUPS}
MODES: dict[str, dict[str, object]] = {
    "whole batches": {},
    "accumulate": {"accumulate": True},
    "one step off": {"max_policy_lag": 1},
    "one step off, refill": REFILL,
    "one step off, refill, accumulate": REFILL | {"accumulate": True},
}


@dataclass(frozen=True)
class Group:
    """What the formulas know of a group."""

    arrives_s: float
    """After its start, scored."""
    gradients_s: float
    slot_s: float
    """Of all its episodes together."""


def group(timing: Timing, seed: int, ticket: int) -> Group:
    episodes = [timing.episode_s(seed, ticket, member) for member in range(GROUP_SIZE)]
    num_tokens = sum(timing.num_tokens(seconds) for seconds in episodes)
    return Group(
        max(episodes) + timing.score_s,
        timing.gradient_s * num_tokens / (timing.mean_episode_s * timing.tokens_per_s),
        sum(episodes),
    )


def whole_bound(timing: Timing, batches: Sequence[Sequence[Group]], staleness: int) -> float:
    """Least seconds of a run; see the module's text."""
    published = [0.0] * (staleness + 1)
    slot_s = 0.0
    for batch in batches:
        slot_s += sum(one.slot_s for one in batch)
        start = published[-1 - staleness]
        gradients = max(
            max(start + one.arrives_s + one.gradients_s for one in batch),
            published[-1] + sum(one.gradients_s for one in batch),
        )
        published.append(gradients + timing.step_s + timing.publish_s)
    return max(published[-1], slot_s / timing.num_slots)


def fifo_bound(timing: Timing, batches: Sequence[Sequence[Group]]) -> float:
    """On policy, when a group's gradients wait for those of every group before it."""
    total = 0.0
    for batch in batches:
        behind = [sum(one.gradients_s for one in batch[place:]) for place in range(len(batch))]
        waits = [one.arrives_s + rest for one, rest in zip(batch, behind, strict=True)]
        total += max(waits) + timing.step_s + timing.publish_s
    return total


def run(timing: Timing, seed: int, mode: dict[str, object]) -> Simulated:
    sizes = {"num_steps": NUM_STEPS, "num_groups": NUM_GROUPS, "group_size": GROUP_SIZE}
    with tempfile.TemporaryDirectory() as folder:
        options = {"num_workers": NUM_GROUPS} | sizes | mode
        return simulate(Path(folder) / "run", timing, seed, **options)


def measure(timing: Timing, seed: int) -> dict[str, float]:
    """Seconds of a step by mode and bound."""
    batches = [
        [group(timing, seed, step * NUM_GROUPS + place) for place in range(NUM_GROUPS)]
        for step in range(NUM_STEPS)
    ]
    found = {}
    for name, mode in MODES.items():
        result = run(timing, seed, mode)
        assert result.max_lag <= int(str(mode.get("max_policy_lag", 0)))
        found[name] = result.step_s
    bounds = {
        "on-policy bound": whole_bound(timing, batches, 0),
        "in FIFO order": fifo_bound(timing, batches),
        "staleness-1 bound": whole_bound(timing, batches, 1),
    }
    return found | {name: seconds / NUM_STEPS for name, seconds in bounds.items()}


def report(rows: Sequence[dict[str, float]]) -> bool:
    """Print the table; whether the claims hold for every seed."""
    print(f"{'seconds per step, seed':34}" + "".join(f"{seed:9}" for seed in SEEDS))
    for name in rows[0]:
        print(f"{name:34}" + "".join(f"{row[name]:9.1f}" for row in rows))
    ratios: list[tuple[str, str, float | None]] = [
        ("whole batches", "on-policy bound", None),
        ("in FIFO order", "on-policy bound", None),
        ("accumulate", "on-policy bound", MAX_ON_POLICY),
        ("one step off", "staleness-1 bound", None),
        ("one step off, refill", "staleness-1 bound", MAX_STALENESS_1),
        ("one step off, refill, accumulate", "staleness-1 bound", MAX_STALENESS_1),
    ]
    holds = True
    for name, bound, limit in ratios:
        found = [row[name] / row[bound] for row in rows]
        claim = "" if limit is None else f"  (claim: at most {limit})"
        print(f"{name} / {bound}: at most {max(found):.3f}{claim}")
        holds &= min(found) > 1 - 1e-9  # a bound that can be beaten is none
        holds &= limit is None or max(found) <= limit
    return holds


def main() -> None:
    timing = Timing()
    holds = report([measure(timing, seed) for seed in SEEDS])
    print("holds" if holds else "DOES NOT HOLD")
    sys.exit(0 if holds else 1)


if __name__ == "__main__":
    main()
