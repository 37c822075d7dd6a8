"""The document of the learning evidence says what the plans' results say, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from miniverl_dist.config.arms import BenchmarkConfig
from miniverl_dist.lab.arms import (
    BenchmarkReport,
    Measured,
    PlannedRun,
    RunOutcome,
    mean_interval,
    summarise,
)
from scripts import evidence
from tests.support.arms import MEASURED

SEEDS = (11, 12, 13)


def store(
    output: Path,
    plan: str,
    arms: Mapping[str, tuple[float, float, float]],
    measured: Measured = MEASURED,
) -> None:
    """A plan's results: pass rates of each arm over the seeds."""
    config = BenchmarkConfig.model_validate(
        {
            "kind": "benchmark",
            "name": plan,
            "base": Path("base.yaml"),
            "arms": {arm: {} for arm in arms},
            "reference": next(iter(arms)),
            "seeds": SEEDS,
        }
    )
    outcomes = [
        RunOutcome(
            run=PlannedRun(arm=arm, seed=seed),
            status="finished",
            measured=measured.model_copy(update={"pass_rate": rate}),
        )
        for arm, rates in arms.items()
        for seed, rate in zip(SEEDS, rates, strict=True)
    ]
    folder = output / plan
    folder.mkdir(parents=True)
    report = summarise(config, "d", outcomes)
    (folder / "benchmark.json").write_text(report.model_dump_json())


def reports(output: Path) -> dict[str, BenchmarkReport]:
    found = {plan: evidence.read_report(output / plan) for plan in evidence.PLANS}
    return {plan: report for plan, report in found.items() if report is not None}


def row(text: str, question: str) -> list[str]:
    """The cells of the one row of a table that begins with ``question``."""
    found = next(line for line in text.splitlines() if line.startswith(f"| {question} |"))
    return [cell.strip() for cell in found.strip("|").split("|")]


def test_nothing_run_claims_nothing(tmp_path: Path) -> None:
    text = evidence.document(tmp_path)
    for question in (*evidence.QUESTIONS, *evidence.FURTHER, *evidence.DEMONSTRATIONS):
        assert row(text, question.text)[1:4] == ["0", "not run", "not run"]
    assert "GRPO + OPD is" not in text


def test_a_difference_is_paired_by_seed_and_named_by_its_interval(tmp_path: Path) -> None:
    store(tmp_path, evidence.CALCULATOR, {"grpo": (0.1, 0.4, 0.7), "grpo_opd": (0.3, 0.61, 0.89)})
    text = evidence.document(tmp_path)
    found = row(text, "calculator")
    assert found[1] == "3"
    # Apart, the two arms' intervals overlap widely: only pairs show it.
    assert found[2].startswith("+0.200 [")
    assert found[4] == "higher"
    assert "* GRPO + OPD is higher than GRPO with: calculator." in text
    assert "Why not with calculator" not in text


def test_what_does_not_win_is_said_with_what_grpo_alone_reaches(tmp_path: Path) -> None:
    store(tmp_path, evidence.CALCULATOR, {"grpo": (0.4, 0.5, 0.6), "grpo_opd": (0.5, 0.4, 0.6)})
    text = evidence.document(tmp_path)
    assert row(text, "calculator")[4].startswith("not shown")
    assert "* No difference is shown with: calculator." in text
    beside = [line for line in text.splitlines() if line.startswith("| calculator | 0.500 |")]
    assert beside == ["| calculator | 0.500 | 75% | - | - | not shown |"]


def test_p_values_are_those_of_the_t_test() -> None:
    # Three differences of 1, 2 and 6: t = 3 / (sqrt(7) / sqrt(3)) = 1.964, two degrees of freedom.
    interval = mean_interval([1.0, 2.0, 6.0])
    assert interval is not None
    t = 3 / (7 / 3) ** 0.5
    closed = 1 - t / (2 + t * t) ** 0.5  # the distribution's closed form for two degrees
    assert evidence.p_value(interval) == pytest.approx(closed, abs=1e-6)
    assert evidence.p_value(interval.model_copy(update={"low": None})) is None


def test_holm_stops_at_the_first_that_fails(tmp_path: Path) -> None:
    """Alone each is below 5 %; of three questions the smallest has to be below 5 / 3 %."""
    store(
        tmp_path,
        evidence.CROSS,
        {
            "grpo": (0.1, 0.1, 0.1),
            "grpo_opd": (0.3, 0.301, 0.3),  # p = 0.000003
            "grpo-dense-g4": (0.1, 0.1, 0.1),
            "grpo_opd-dense-g4": (0.2, 0.25, 0.3),  # p = 0.036, above 0.05 / 2
        },
    )
    store(tmp_path, evidence.CALCULATOR, {"grpo": (0.1, 0.1, 0.1), "grpo_opd": (0.2, 0.25, 0.3)})
    line = evidence.holm(evidence.QUESTIONS, reports(tmp_path))
    assert line.startswith("Holm's correction over the 3 questions of this table leaves: dense")
    assert line.count("(p = ") == 1
    assert "groups of 8" in line


def test_gains_are_compared_by_seed(tmp_path: Path) -> None:
    store(
        tmp_path,
        evidence.CROSS,
        {
            "grpo": (0.1, 0.3, 0.5),
            "grpo_opd": (0.3, 0.51, 0.7),
            "grpo-terminal-g8": (0.5, 0.1, 0.3),
            "grpo_opd-terminal-g8": (0.6, 0.21, 0.4),
        },
    )
    table = evidence.gains_table(reports(tmp_path))
    assert "groups of 8 beside terminal reward, groups of 8 | +0.100" in table
    assert "groups of 4 beside terminal reward, groups of 4 | not run" in table


def test_it_says_what_a_pass_is(tmp_path: Path) -> None:
    told = {
        "evaluation.tail_calls": "2",
        "evaluation.episodes_per_task": "8",
        "evaluation.temperature": "1.0",
        "tasks.eval": '["a", "b"]',
    }
    asked = MEASURED.model_copy(update={"measured_as": told})
    store(tmp_path, evidence.CALCULATOR, {"grpo": RATES}, asked)
    assert "T = 2 (calls left to the student), 8 episodes of each of 2 tasks" in evidence.document(
        tmp_path
    )


RATES = (0.1, 0.2, 0.4)
BETTER = (0.8, 0.9, 0.95)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"sampled_episodes": 0, "zero_variance": "-"}, "higher"),
        ({"optimizer_steps": 95}, "not comparable"),
        ({"start_sha256": "b"}, "not comparable"),
        ({"num_eval_episodes": 104}, "not comparable"),
    ],
)
def test_demonstrations_match_in_all_but_what_is_sampled(
    changed: dict[str, object], verdict: str, tmp_path: Path
) -> None:
    store(tmp_path, evidence.CALCULATOR, {"grpo": RATES, "grpo_opd": RATES})
    store(tmp_path, evidence.CALCULATOR_SFT, {"sft": BETTER}, MEASURED.model_copy(update=changed))
    text = evidence.document(tmp_path)
    assert row(text, "calculator: SFT beside GRPO alone")[4].startswith(verdict)


def test_arms_that_sample_must_sample_equally_much(tmp_path: Path) -> None:
    store(tmp_path, evidence.CROSS, {"grpo": RATES})
    fewer = MEASURED.model_copy(update={"sampled_episodes": 768})
    store(tmp_path, evidence.SAME, {"grpo_opd": BETTER}, fewer)
    text = evidence.document(tmp_path)
    assert row(text, "same tokenizer, dense, groups of 8")[4].startswith("not comparable")


def test_the_committed_document_is_of_these_plans() -> None:
    text = evidence.DOCUMENT.read_text()
    for plan in evidence.PLANS:
        assert f"## `configs/benchmarks/{plan}.yaml`" in text
        assert (evidence.ROOT / "configs" / "benchmarks" / f"{plan}.yaml").is_file()
    for question in (*evidence.QUESTIONS, *evidence.FURTHER, *evidence.DEMONSTRATIONS):
        row(text, question.text)
