"""What a benchmark reads of a run: the row of the very weights that are asked about."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.arms_results import measure, measure_start
from miniverl_dist.errors import RecordError
from tests.support.sample_run import RECIPE, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Student: 0.1 before, 0.3 warm, 0.7 after, at policy version 3."""
    return write_run(tmp_path_factory.mktemp("runs"))


def without(run: Path, folder: Path, *tags: str) -> Path:
    """A run of which some rows were not measured."""
    made = write_run(folder)
    told = json.loads((run / "eval.json").read_text())
    told["rows"] = [row for row in told["rows"] if row["tag"] not in tags]
    (made / "eval.json").write_text(json.dumps(told))
    return made


def test_an_arm_is_what_it_ended_as_and_began_as(run: Path) -> None:
    found = measure(run)
    assert (found.pass_rate_start, found.pass_rate) == (0.3, 0.7)


@pytest.mark.parametrize(
    ("checkpoint", "pass_rate"), [("step-000000", 0.3), ("step-000003", 0.7), (None, 0.7)]
)
def test_a_cold_start_is_what_the_arms_begin_with(
    checkpoint: str | None, pass_rate: float, run: Path
) -> None:
    assert measure_start(run, checkpoint).pass_rate == pass_rate


@pytest.mark.parametrize(
    ("checkpoint", "left_out", "why"),
    [
        # What comes after a step that is thrown away says nothing of where the arms begin.
        ("step-000000", ("warm", "before"), r"version 0\).*after \(version 3\).*evaluation.warm"),
        ("step-000002", (), r"step-000002 \(policy version 2\)"),
        (None, ("after",), r"last weights \(policy version 3\)"),
        ("step-000009", (), "no step 9 was trained"),
        (None, ("warm", "before", "after"), "at no time"),
    ],
)
def test_other_weights_do_not_stand_for_them(
    checkpoint: str | None, left_out: tuple[str, ...], why: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecordError, match=why):
        measure_start(without(run, tmp_path, *left_out), checkpoint)


def test_without_a_warm_up_the_arms_begin_before_training(run: Path, tmp_path: Path) -> None:
    assert measure_start(without(run, tmp_path, "warm"), "step-000000").pass_rate == 0.1


def test_a_trained_student_that_was_not_evaluated_is_no_result(run: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no row of the trained student"):
        measure(without(run, tmp_path, "after"))


def test_it_says_how_it_was_measured(tmp_path: Path) -> None:
    weights = "environment: {kind: bfcl, reward: {terminal_pass: 0.25}}\n"
    recipe = f"{RECIPE}{weights}evaluation: {{temperature: 0.5, tail_calls: 2}}\n"
    told = measure(write_run(tmp_path, recipe=recipe)).measured_as
    assert told["environment.reward.terminal_pass"] == "0.25"
    assert (told["evaluation.temperature"], told["evaluation.tail_calls"]) == ("0.5", "2")
    assert told["tasks.eval"] == '["multi_turn_base_1"]'
    assert not [name for name in told if "train" in name]
