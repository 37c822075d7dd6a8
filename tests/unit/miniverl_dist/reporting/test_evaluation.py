from __future__ import annotations

import math

import pytest

from miniverl_dist.reporting.evaluation import (
    TABLE_HEAD,
    caveats,
    difference,
    evaluation_lines,
    table_rows,
)
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.schemas.evaluation import EvaluationRow
from tests.support.sample_run import report, row


def comparisons(*rows: EvaluationRow) -> list[str]:
    lines = evaluation_lines(report(*rows))
    return ["" if line.difference is None else str(line.difference) for line in lines]


def test_differences_are_against_where_reinforcement_learning_began() -> None:
    assert comparisons(
        row("student", "before", 0.1),
        row("student", "warm", 0.3),
        row("student", "step-000010", 0.5),
        row("student", "after", 0.7),
    ) == [
        "",
        "+0.20 [+0.06, +0.34] vs before",
        "+0.20 [+0.06, +0.34] vs warm",
        "+0.40 [+0.26, +0.54] vs warm",
    ]


def test_without_a_warm_up_the_base_is_before() -> None:
    assert comparisons(row("student", "before", 0.5), row("student", "after", 0.4))[1].startswith(
        "-0.10 [-0.24, +0.04] vs before"
    )


def test_other_policies_are_against_the_null_policy() -> None:
    found = comparisons(row("null", "before", 0.0), row("teacher", "before", 0.8))
    assert found[0] == ""
    assert found[1].endswith("vs null")


def test_rows_of_another_horizon_are_never_compared() -> None:
    rows = [
        row("student", "warm", 0.3),
        row("null", "before", 0.2, tail_calls=2),
        row("student", "after", 0.7, tail_calls=2),
    ]
    assert comparisons(*rows) == ["", "", ""]
    assert [line.null_rate for line in evaluation_lines(report(*rows))] == [None, 0.2, 0.2]


def test_the_interval_of_a_difference() -> None:
    """Newcombe 1998, table II, example (a), method 10: 56/70 - 48/80."""
    first = row("student", "after", 56 / 70, pass_low=0.6918, pass_high=0.8772)
    second = row("student", "warm", 48 / 80, pass_low=0.4905, pass_high=0.7004)
    found = difference(first, second, "warm")
    assert found.value == pytest.approx(0.2)
    assert found.low == pytest.approx(0.0524, abs=2e-4)
    assert found.high == pytest.approx(0.3339, abs=2e-4)
    assert math.isclose(difference(second, first, "x").low, -found.high)


def test_every_row_has_a_cell_for_every_column() -> None:
    cells = table_rows(report(row("student", "after", 0.5)))[0]
    assert len(cells) == len(TABLE_HEAD)
    assert cells[TABLE_HEAD.index("Null policy")] == "not measured"
    assert cells[TABLE_HEAD.index("95 % interval")] == "0.400 to 0.600"


class TestCaveats:
    def words(self, **fields: object) -> str:
        return "\n".join(caveats(RunData(label="x", status="finished", **fields)))

    def test_memorisation(self) -> None:
        evaluation = report(row("null", "before", 0.0), trains_on_eval_tasks=True)
        assert "Memorisation" in self.words(evaluation=evaluation)
        assert "Memorisation" not in self.words(evaluation=report(row("null", "before", 0.0)))

    def test_restricted_softmax_says_to_how_many_ids(self) -> None:
        roles = {"student": {"restricted_softmax": {"num_ids": 900, "vocab_size": 248077}}}
        assert "student's softmax is restricted to 900 of 248077 ids" in self.words(
            manifest={"roles": roles}
        )
        assert "softmax" not in self.words(
            manifest={"roles": {"student": {"restricted_softmax": None}}}
        )

    def test_a_missing_null_policy_and_faults(self) -> None:
        evaluation = report(row("student", "after", 0.5, num_faults=2))
        words = self.words(evaluation=evaluation)
        assert "does nothing was not measured" in words
        assert "column Faults" in words
        clean = self.words(evaluation=report(row("null", "before", 0.0)))
        assert "Faults" not in clean
        assert "not measured" not in clean

    def test_wrong_sign_and_warm_up(self) -> None:
        assert "wrong sign" in self.words(config={"opd": {"sign": -1}})
        assert "wrong sign" not in self.words(config={"opd": {"sign": 1}})
        assert "warmed up" in self.words(manifest={"warmup": {"num_steps": 1}})
        assert "warmed up" not in self.words(manifest={"warmup": None})

    @pytest.mark.parametrize(
        ("label", "words"),
        [
            ("strictly on-policy", "Strictly on-policy: every batch"),
            ("minibatched", "Minibatched: several optimizer steps"),
            ("off-policy (lag <= 2)", "off-policy (lag <= 2): batches may"),
            ("replayed", "How on-policy: replayed."),
        ],
    )
    def test_policy_labels(self, label: str, words: str) -> None:
        assert self.words(manifest={"policy_label": label}).startswith(words)

    def test_an_unfinished_run_says_so_first(self) -> None:
        assert caveats(RunData(label="x", status="killed"))[0].startswith(
            "This run is not finished (status: killed)"
        )
        assert caveats(RunData(label="x", status="evaluation")) == []
