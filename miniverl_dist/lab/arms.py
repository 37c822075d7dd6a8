"""Comparing arms over seeds: what is run, what must be equal, what may be concluded.

Pure: nothing here starts a process or reads a clock. Seeds are the unit of every interval: the
episodes of one run share its weights and are not independent of each other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal

from pydantic import Field

from miniverl_dist.config.arms import COLD_START, BenchmarkConfig
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError
from miniverl_dist.schemas.eval_settings import measuring_settings, reward_weights
from miniverl_dist.schemas.evaluation import Settings
from miniverl_dist.schemas.messages import FrozenModel

LEVEL: Final = 0.95
MIN_SEEDS: Final = 3
"""Fewer say next to nothing of how much seeds differ."""
_ASKED: Final = ("evaluation.", "tasks.")
_NO_SPREAD: Final = 1e-12
"""Rates are fractions of small integers: their differences are equal but for rounding."""
MATCHED: Final = ("sampled_episodes", "zero_variance", "start_sha256")
"""Must be equal between an arm and the one it is compared with."""


class PlannedRun(FrozenModel):
    """One run of a benchmark; ``arm`` is `COLD_START` for what the arms of a seed start from."""

    arm: str
    seed: int

    @property
    def name(self) -> str:
        """Its folder below the benchmark's."""
        return f"{self.arm}-seed-{self.seed}"


class Measured(FrozenModel):
    """What a finished run has come to."""

    pass_rate_start: float | None
    """Of the student before training; None where it was not measured."""
    reward_start: float | None
    pass_rate: float
    """Of the trained student, on the evaluation's episodes."""
    reward: float
    num_eval_episodes: int
    sampled_groups: int
    sampled_episodes: int
    zero_variance: str
    zero_variance_groups: int
    """Trained groups whose rewards were all equal: no group advantage came of them."""
    refilled_groups: int
    sampled_tokens: int
    optimizer_steps: int
    teacher_scored_tokens: int
    """Tokens, of the teacher's own, that it gave log-probabilities for."""
    teacher_asked_rows: int = 0
    """Positions that it gave whole distributions for."""
    start_sha256: str | None
    """Of the weights that the run was started from; None where they were drawn from the seed."""
    measured_as: Settings = Field(default_factory=dict)
    """All that decides what the two rates are about; empty where not recorded."""


class RunOutcome(FrozenModel):
    """One run: measured, failed, or not run yet."""

    run: PlannedRun
    status: Literal["finished", "failed", "not_run"]
    reason: str = ""
    """Why there is no measurement."""
    cpu_seconds: float = 0.0
    """User and system time of the run's processes, former tries included."""
    is_cpu_known: bool = True
    """False where a process was left alone by a benchmark that was killed: nobody counted it."""
    measured: Measured | None = None


class Interval(FrozenModel):
    """A mean over seeds, with a t interval at the 95 % level.

    There is none of one seed, and none of seeds that all agree: their spread cannot be estimated.
    """

    num_seeds: int
    mean: float
    low: float | None
    high: float | None


class Difference(FrozenModel):
    """An arm minus its reference, paired by seed."""

    arm: str
    against: str
    pass_rate: Interval
    reward: Interval | None
    """None where the two give other weights to what an episode has reached."""
    problems: tuple[str, ...] = ()
    """What was not equal between the two although it had to be."""

    @property
    def is_clear(self) -> bool:
        """Whether the pass rate's interval lies on one side of 0, between runs that match."""
        low, high = self.pass_rate.low, self.pass_rate.high
        is_enough = self.pass_rate.num_seeds >= MIN_SEEDS and not self.problems
        return is_enough and low is not None and high is not None and low * high > 0


class BenchmarkReport(FrozenModel):
    """``benchmark.json``."""

    name: str
    digest: str
    arms: tuple[str, ...]
    seeds: tuple[int, ...]
    outcomes: tuple[RunOutcome, ...]
    pass_rates: dict[str, Interval | None]
    """By arm; None where no run of it has finished."""
    rewards: dict[str, Interval | None]
    differences: tuple[Difference, ...]
    gains: tuple[Difference, ...]
    """Each arm minus the cold start that it began from."""


def planned(config: BenchmarkConfig) -> Iterator[PlannedRun]:
    """All runs in the order in which they start: cold starts, then each arm over all seeds."""
    if config.cold_start is not None:
        yield from (PlannedRun(arm=COLD_START, seed=seed) for seed in config.seeds)
    for arm in config.arms:
        yield from (PlannedRun(arm=arm, seed=seed) for seed in config.seeds)


def check_matched(config: BenchmarkConfig, recipes: Mapping[str, RunConfig]) -> None:
    """Refuse a comparison of arms that differ in what must be equal.

    Raises:
        ConfigError: names the arm, its reference and both values.
    """
    tolerated = {"sampled_episodes"} if config.tolerate_unequal_samples else set()
    tolerated |= {"optimizer_steps"} if config.tolerate_unequal_updates else set()
    for arm in config.arms:
        other = config.reference_of(arm)
        ours, theirs = _matched(recipes[arm]), _matched(recipes[other])
        for name, found in ours.items():
            is_tolerated = name in tolerated
            if found != theirs[name] and not is_tolerated:
                raise ConfigError(
                    f"benchmark {config.name}: arm {arm} has {name} {found}, {other} has "
                    f"{theirs[name]}: a difference between them would mean nothing. Make them "
                    "equal, or compare with another arm (`against`)"
                )
        for text in _measured_otherwise(_measuring(recipes[arm]), _measuring(recipes[other])):
            raise ConfigError(
                f"benchmark {config.name}: arm {arm} is not measured as {other} is ({text}): a "
                "difference between them would mean nothing"
            )


def _matched(recipe: RunConfig) -> dict[str, object]:
    loop = recipe.loop
    return {
        "sampled_episodes": loop.num_steps * loop.num_groups * loop.group_size,
        "optimizer_steps": loop.num_steps * loop.num_minibatches,
        "zero_variance": recipe.grpo.zero_variance,
    }


def _measuring(recipe: RunConfig) -> Settings:
    return measuring_settings(recipe.model_dump(mode="json"))


def _measured_otherwise(ours: Settings, theirs: Settings) -> list[str]:
    """What the evaluation asks that both tell, and tell differently.

    Prompt and limits are not among it: an arm may be about them.
    """
    return [
        f"{name}: {ours[name]} against {theirs[name]}"
        for name in sorted(ours.keys() & theirs.keys())
        if ours[name] != theirs[name] and name.startswith(_ASKED)
    ]


def _names_to_match(config: BenchmarkConfig) -> list[str]:
    skipped = ["sampled_episodes"] if config.tolerate_unequal_samples else []
    return [name for name in MATCHED if name not in skipped]


def summarise(
    config: BenchmarkConfig, digest: str, outcomes: Sequence[RunOutcome]
) -> BenchmarkReport:
    """Means, intervals and differences of what has been run so far."""
    found = {
        arm: {o.run.seed: o.measured for o in outcomes if o.run.arm == arm and o.measured}
        for arm in (COLD_START, *config.arms)
    }
    pairs = [(arm, config.reference_of(arm)) for arm in config.arms]
    return BenchmarkReport(
        name=config.name,
        digest=digest,
        arms=tuple(config.arms),
        seeds=config.seeds,
        outcomes=tuple(outcomes),
        pass_rates={a: mean_interval([m.pass_rate for m in found[a].values()]) for a in found},
        rewards={a: mean_interval([m.reward for m in found[a].values()]) for a in found},
        differences=tuple(
            difference
            for arm, other in pairs
            if arm != other
            and (
                difference := paired_difference(
                    arm, found[arm], other, found[other], matched=_names_to_match(config)
                )
            )
        ),
        gains=tuple(
            gain
            for arm in config.arms
            if (gain := paired_difference(arm, found[arm], COLD_START, found[COLD_START]))
        ),
    )


def paired_difference(
    arm: str,
    ours: Mapping[int, Measured],
    other: str,
    theirs: Mapping[int, Measured],
    matched: Sequence[str] = (),
) -> Difference | None:
    """Over the seeds that both have finished; None where there is none.

    Args:
        arm: Whose difference it is.
        ours: Seed -> what was measured.
        other: The arm that it is compared with.
        theirs: Seed -> what was measured.
        matched: Fields of `Measured` that must be equal.
    """
    seeds = sorted(ours.keys() & theirs.keys())
    pass_rate = mean_interval([ours[s].pass_rate - theirs[s].pass_rate for s in seeds])
    if pass_rate is None:
        return None
    reward = mean_interval([ours[s].reward - theirs[s].reward for s in seeds])
    if any(_weights(ours[s]) != _weights(theirs[s]) for s in seeds):
        reward = None
    problems = [
        f"seed {seed}: {name} {getattr(ours[seed], name)} against {getattr(theirs[seed], name)}"
        for seed in seeds
        for name in matched
        if getattr(ours[seed], name) != getattr(theirs[seed], name)
    ]
    problems += {
        text: None  # once for all seeds
        for seed in seeds
        for text in _measured_otherwise(ours[seed].measured_as, theirs[seed].measured_as)
    }
    return Difference(
        arm=arm, against=other, pass_rate=pass_rate, reward=reward, problems=tuple(problems)
    )


def _weights(measured: Measured) -> Settings:
    return reward_weights(measured.measured_as)


def mean_interval(values: Sequence[float]) -> Interval | None:
    """Mean and two-sided t interval; None of no values, no interval of one or of equal ones."""
    if not values:
        return None
    count, mean = len(values), math.fsum(values) / len(values)
    if max(values) - min(values) <= _NO_SPREAD:
        return Interval(num_seeds=count, mean=mean, low=None, high=None)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    half = t_quantile((1 + LEVEL) / 2, count - 1) * math.sqrt(variance / count)
    return Interval(num_seeds=count, mean=mean, low=mean - half, high=mean + half)


def t_quantile(probability: float, degrees: int) -> float:
    """Where Student's distribution with ``degrees`` of freedom reaches ``probability`` (> 0.5)."""
    low, high = 0.0, 1.0
    while t_probability(high, degrees) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if t_probability(middle, degrees) < probability:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_probability(value: float, degrees: int) -> float:
    """P(T <= value) for value >= 0; the finite sums over powers of a cosine.

    Source:
        Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan(value / math.sqrt(degrees))
    cosine, is_odd = math.cos(angle), degrees % 2
    term = cosine if is_odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + is_odd, degrees - 1, 2):
        term *= cosine**2 * (k - 1) / k
        total += term
    inside = math.sin(angle) * total
    central = 2 / math.pi * (angle + inside) if is_odd else inside
    return (1 + central) / 2
