"""Comparison of arms: intervals, pairs, what must be equal, and what the table claims."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.arms import (
    BenchmarkConfig,
    load_benchmark,
    override_texts,
)
from miniverl_dist.config.load import load_config
from miniverl_dist.config.yaml_text import parse_yaml
from miniverl_dist.errors import ConfigError
from miniverl_dist.lab.arms import (
    COLD_START,
    BenchmarkReport,
    PlannedRun,
    RunOutcome,
    check_matched,
    mean_interval,
    paired_difference,
    planned,
    summarise,
    t_probability,
    t_quantile,
)
from miniverl_dist.lab.arms_table import NO_CLAIM, markdown, verdict
from tests.support.arms import MEASURED

RECIPE = Path(__file__).resolve().parents[3] / "fixtures" / "tiny_bfcl.yaml"
PLANS = Path(__file__).resolve().parents[4] / "configs" / "benchmarks"
SEEDS = (4, 9, 12)


def plan(**fields: object) -> BenchmarkConfig:
    made: dict[str, object] = {
        "kind": "benchmark",
        "name": "b",
        "base": Path("base.yaml"),
        "cold_start": {},
        "arms": {"grpo": {}, "mixed": {}},
        "reference": "grpo",
        "seeds": SEEDS,
    }
    return BenchmarkConfig.model_validate(made | fields)


def finished(arm: str, seed: int, **fields: object) -> RunOutcome:
    return RunOutcome(
        run=PlannedRun(arm=arm, seed=seed),
        status="finished",
        cpu_seconds=10.0,
        measured=MEASURED.model_copy(update=fields),
    )


def two_arms(*pass_rates: tuple[float, float]) -> BenchmarkReport:
    outcomes = [
        finished(arm, seed, pass_rate=rate)
        for seed, pair in zip(SEEDS, pass_rates, strict=False)
        for arm, rate in zip(("grpo", "mixed"), pair, strict=True)
    ]
    return summarise(plan(), "0" * 64, outcomes)


@pytest.mark.parametrize(
    ("degrees", "expected"), [(1, 12.7062), (2, 4.3027), (4, 2.7764), (9, 2.2622), (30, 2.0423)]
)
def test_quantiles_are_those_of_the_tables(degrees: int, expected: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(expected, abs=5e-5)


@settings(deadline=None)
@given(st.floats(0, 20), st.integers(1, 40))
def test_probability_is_the_integral_of_the_density(value: float, degrees: int) -> None:
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)
    grid = np.linspace(0, value, 4001)
    density = (1 + grid**2 / degrees) ** (-(degrees + 1) / 2)
    area = np.trapezoid(density, grid) * math.exp(log_scale) / math.sqrt(degrees * math.pi)
    assert t_probability(value, degrees) == pytest.approx(0.5 + area, abs=1e-5)


def test_the_interval_holds_the_truth_as_often_as_it_says() -> None:
    draws = np.random.default_rng(0).normal(0.3, 0.1, (2000, 5))
    found = [mean_interval(row.tolist()) for row in draws]
    hits = [i is not None and i.low is not None and i.low <= 0.3 <= (i.high or 0) for i in found]
    assert 0.935 < np.mean(hits) < 0.965


def test_one_seed_has_a_mean_and_no_interval_and_no_seed_has_nothing() -> None:
    one = mean_interval([0.25])
    assert one is not None
    assert (one.mean, one.low, one.high) == (0.25, None, None)
    assert mean_interval([]) is None


@settings(deadline=None)
@given(st.lists(st.floats(0, 1), min_size=2, max_size=8), st.floats(-0.5, 0.5))
def test_pairing_takes_out_what_the_seeds_share(shared: list[float], shift: float) -> None:
    ours = {s: MEASURED.model_copy(update={"pass_rate": v + shift}) for s, v in enumerate(shared)}
    theirs = {s: MEASURED.model_copy(update={"pass_rate": v}) for s, v in enumerate(shared)}
    found = paired_difference("a", ours, "b", theirs)
    assert found is not None
    assert found.pass_rate.mean == pytest.approx(shift, abs=1e-9)
    assert (found.pass_rate.low, found.pass_rate.high) == (None, None)  # the seeds agree


def test_only_seeds_that_both_have_finished_are_compared() -> None:
    ours = {1: MEASURED, 2: MEASURED.model_copy(update={"pass_rate": 0.9})}
    found = paired_difference("a", ours, "b", {2: MEASURED, 3: MEASURED})
    assert found is not None
    assert found.pass_rate.num_seeds == 1
    assert found.pass_rate.mean == pytest.approx(0.4)
    assert paired_difference("a", {1: MEASURED}, "b", {2: MEASURED}) is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("sampled_episodes", 1535), ("zero_variance", "drop"), ("start_sha256", "b")],
)
def test_what_was_not_equal_makes_a_difference_worthless(field: str, value: object) -> None:
    outcomes = [
        finished("grpo", 4, pass_rate=0.1),
        finished("grpo", 9, pass_rate=0.1),
        finished("mixed", 4, pass_rate=0.8),
        finished("mixed", 9, **{"pass_rate": 0.9, field: value}),
    ]
    (found,) = summarise(plan(), "", outcomes).differences
    assert not found.is_clear
    assert f"seed 9: {field}" in verdict(found)


def test_verdicts_follow_the_interval() -> None:
    clear, open_, lower = (
        two_arms(*rates).differences[0]
        for rates in (
            ((0.5, 0.8), (0.5, 0.81), (0.5, 0.82)),
            ((0.5, 0.8), (0.5, 0.4), (0.5, 0.5)),
            ((0.8, 0.5), (0.81, 0.5), (0.82, 0.5)),
        )
    )
    assert [verdict(d) for d in (clear, open_, lower)] == [
        "higher",
        "not shown: the interval holds 0",
        "lower",
    ]


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ([(0.1, 0.9)], "one seed, at least 3 are needed"),
        ([(0.1, 0.9), (0.1, 0.91)], "2 seeds, at least 3 are needed"),
        ([(0.1, 0.9)] * 2, "2 seeds, at least 3 are needed"),
        ([(0.1, 0.9)] * 3, "equal in all 3 seeds, so their spread is unknown"),
        ([(0.1, 0.2), (0.2, 0.3), (0.3, 0.4)], "equal in all 3 seeds"),  # but for rounding
    ],
)
def test_few_seeds_or_seeds_without_spread_claim_nothing(
    rates: list[tuple[float, float]], why: str
) -> None:
    report = two_arms(*rates)
    assert f"{NO_CLAIM}: {why}" in verdict(report.differences[0])
    assert f"{NO_CLAIM}: {why}" in markdown(report)
    assert not report.differences[0].is_clear


def quantities(**fields: object) -> dict[str, str]:
    text = markdown(summarise(plan(), "", [finished("grpo", seed, **fields) for seed in SEEDS]))
    head = next(line for line in text.splitlines() if "optimizer steps" in line)
    row = [line for line in text.splitlines() if line.startswith("| grpo |")][-1]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in (head, row)]
    return dict(zip(*cells, strict=True))


def test_quantities_are_of_what_was_sampled_and_asked() -> None:
    both = quantities(teacher_scored_tokens=1234, teacher_asked_rows=56)
    assert both["teacher asked: tokens / rows"] == "1,234 / 56"
    assert (both["sampled groups"], both["refilled groups"]) == ("192", "0")
    assert quantities(teacher_asked_rows=56)["teacher asked: tokens / rows"] == "- / 56"
    assert quantities()["teacher asked: tokens / rows"] == "- / -"


def test_an_arm_that_samples_nothing_shows_no_numbers_of_samples() -> None:
    """It trains on stored groups, which the records count as any other."""
    found = quantities(sampled_tokens=0)
    sampled = ("sampled groups", "sampled tokens", "groups without variance", "refilled groups")
    assert {found[name] for name in (*sampled, "zero_variance")} == {"-"}
    assert found["optimizer steps"] == "96"


def test_the_table_shows_what_failed_and_what_was_not_run() -> None:
    failed = RunOutcome(
        run=PlannedRun(arm="mixed", seed=4), status="failed", reason="exit status 2: no memory"
    )
    report = summarise(plan(), "", [finished("grpo", 4), failed])
    text = markdown(report)
    assert "* mixed-seed-4: exit status 2: no memory" in text
    assert "| mixed | 0 |  | not run | not run |" in text
    assert report.differences == ()


def test_gains_are_over_the_cold_start_of_the_same_seed() -> None:
    outcomes = [
        finished(COLD_START, 4, pass_rate=0.2, sampled_episodes=1),
        finished("grpo", 4, pass_rate=0.7),
    ]
    (gain,) = summarise(plan(), "", outcomes).gains
    assert (gain.arm, gain.against) == ("grpo", COLD_START)
    assert gain.pass_rate.mean == pytest.approx(0.5)
    assert gain.problems == ()


def test_cold_starts_come_first_then_each_arm_over_all_seeds() -> None:
    assert [run.name for run in planned(plan())] == [
        "cold-start-seed-4",
        "cold-start-seed-9",
        "cold-start-seed-12",
        "grpo-seed-4",
        "grpo-seed-9",
        "grpo-seed-12",
        "mixed-seed-4",
        "mixed-seed-9",
        "mixed-seed-12",
    ]
    assert next(planned(plan(cold_start=None))).arm == "grpo"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("grpo.zero_variance=drop", "zero_variance"),
        ("loop.group_size=2", "sampled_episodes"),
        ("loop.num_steps=2", "sampled_episodes"),
        ("loop.num_minibatches=3", "optimizer_steps"),
    ],
)
def test_arms_that_differ_in_what_must_be_equal_are_refused(change: str, named: str) -> None:
    base = load_config(RECIPE, ["objective=grpo", "opd=null"]).config
    other = load_config(RECIPE, ["objective=grpo", "opd=null", change]).config
    check_matched(plan(), {"grpo": base, "mixed": base})
    with pytest.raises(ConfigError, match=f"arm mixed has {named}"):
        check_matched(plan(), {"grpo": base, "mixed": other})
    if named != "zero_variance":
        tolerant = plan(tolerate_unequal_samples=True, tolerate_unequal_updates=True)
        check_matched(tolerant, {"grpo": base, "mixed": other})


@pytest.mark.parametrize(
    "change",
    [
        "evaluation.tail_calls=2",
        "evaluation.temperature=0",
        "evaluation.episodes_per_task=1",
        "tasks.eval=[multi_turn_base_11]",
    ],
)
def test_arms_that_are_measured_otherwise_are_refused(change: str) -> None:
    base, other = load_config(RECIPE).config, load_config(RECIPE, [change]).config
    with pytest.raises(ConfigError, match=rf"{change.partition('=')[0]}: .* against "):
        check_matched(plan(), {"grpo": base, "mixed": other})


@pytest.mark.parametrize(
    "change",
    [
        "tasks.train=[multi_turn_base_11]",
        "environment.reward={exec_score: 0.05}",
        "environment.max_observation_chars=81",
        "rollout.max_new_tokens=9",
    ],
)
def test_arms_may_be_about_training_tasks_rewards_prompts_and_limits(change: str) -> None:
    base = load_config(RECIPE).config
    check_matched(plan(), {"grpo": base, "mixed": load_config(RECIPE, [change]).config})


WEIGHTS = "environment.reward.terminal_pass"


def test_rewards_of_other_weights_are_not_subtracted() -> None:
    outcomes = [
        finished(arm, seed, measured_as={WEIGHTS: weight}, pass_rate=0.1 * seed)
        for arm, weight in (("grpo", "1.0"), ("mixed", "0.5"))
        for seed in SEEDS
    ]
    report = summarise(plan(), "", outcomes)
    (found,) = report.differences
    assert found.reward is None
    assert found.problems == ()
    assert "| mixed - grpo | 3 | +0.000 | - |" in markdown(report)


def test_a_difference_between_other_measurements_is_worthless() -> None:
    outcomes = [
        finished(arm, seed, measured_as={"evaluation.tail_calls": calls}, pass_rate=0.01 * seed)
        for arm, calls in (("grpo", "1"), ("mixed", "2"))
        for seed in SEEDS
    ]
    (found,) = summarise(plan(), "", outcomes).differences
    assert verdict(found) == "not comparable: evaluation.tail_calls: 2 against 1"


def test_equal_episodes_in_other_groups_are_equal_samples() -> None:
    base, regrouped = (
        load_config(RECIPE, [f"loop.num_groups={groups}", f"loop.group_size={size}"]).config
        for groups, size in ((2, 6), (4, 3))
    )
    check_matched(plan(), {"grpo": base, "mixed": regrouped})


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.text(max_size=8)
    | st.floats(allow_nan=False, allow_infinity=False, width=32),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text("abc_", min_size=1, max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc_", min_size=1, max_size=4), JSON, max_size=3))
def test_overrides_read_back_as_they_were_written(overrides: dict[str, object]) -> None:
    found = {}
    for text in override_texts(overrides):  # type: ignore[arg-type]
        key, _, value = text.partition("=")
        found[key] = parse_yaml(value, "override").data
    assert found == overrides


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


def test_a_plan_names_its_base_relative_to_itself(tmp_path: Path) -> None:
    folder = tmp_path / "plans"
    folder.mkdir()
    loaded = load_benchmark(
        write(
            folder,
            "kind: benchmark\nname: b\nbase: ../r.yaml\nreference: a\nseeds: [1]\narms: {a: {}}\n",
        )
    )
    assert loaded.base == tmp_path / "r.yaml"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("reference: c\nseeds: [1]", "there is no arm 'c', only a, b"),
        ("reference: a\nseeds: [1, 1]", "repeat one"),
        ("reference: a\nseeds: []", "seeds"),
        ("reference: a\nseeds: [1]\nmax_processes: 0", "max_processes"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(
    tmp_path: Path, lines: str, message: str
) -> None:
    path = write(
        tmp_path, f"kind: benchmark\nname: n\nbase: r.yaml\narms: {{a: {{}}, b: {{}}}}\n{lines}\n"
    )
    with pytest.raises(ConfigError, match=message):
        load_benchmark(path)


def test_a_recipe_is_no_plan() -> None:
    with pytest.raises(ConfigError, match="expected a benchmark"):
        load_benchmark(RECIPE)


def test_the_digest_of_a_plan_does_not_depend_on_how_it_is_run(tmp_path: Path) -> None:
    text = "kind: benchmark\nname: b\nbase: r.yaml\nreference: a\narms: {a: {}}\n"
    one, two, other = (
        load_benchmark(write(tmp_path, text + more)).digest
        for more in ("seeds: [1]\n", "seeds: [1]\nmax_processes: 3\n", "seeds: [2]\n")
    )
    assert one == two != other


@pytest.mark.parametrize("path", sorted(PLANS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_plan_of_the_repository_holds_what_it_promises(path: Path) -> None:
    loaded = load_benchmark(path)
    plan_ = loaded.config
    recipes = {name: loaded.recipe(arm.overrides).config for name, arm in plan_.arms.items()}
    check_matched(plan_, recipes)
    loops = [recipe.loop for recipe in recipes.values()]
    assert len({loop.num_steps * loop.num_groups * loop.group_size for loop in loops}) == 1
    assert len(plan_.seeds) >= 5
    assert not {0, 1, 2} & set(plan_.seeds)
    for name, recipe in recipes.items():
        assert recipe.objective == name.partition("-")[0]
        assert (recipe.loop.group_size == 4) == name.endswith("g4")
        if recipe.opd is not None:
            assert recipe.opd.lookahead == (0 if name.endswith("lookahead-0") else 1)
    assert plan_.cold_start is not None
    assert loaded.recipe(plan_.cold_start.overrides).config.student.warmup is not None
