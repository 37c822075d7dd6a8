"""The document of the learning evidence says what the plans' results say, and no more."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from miniverl_dist.config.arms import BenchmarkConfig
from miniverl_dist.lab.arms import Measured, PlannedRun, RunOutcome, summarise
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


def row(text: str, question: str) -> list[str]:
    """The cells of the one row of a table that begins with ``question``."""
    [found] = [line for line in text.splitlines() if line.startswith(f"| {question} |")]
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
    assert (
        "* Why not with calculator: GRPO alone reaches 0.500 and has a signal in 75% of its groups."
        in text
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
