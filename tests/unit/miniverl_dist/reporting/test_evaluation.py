from __future__ import annotations

import json
import math

import pytest

from miniverl_dist.reporting.eval_tables import evaluation_tables
from miniverl_dist.reporting.evaluation import (
    TABLE_HEAD,
    Difference,
    caveats,
    difference,
    evaluation_lines,
    table_rows,
)
from miniverl_dist.reporting.run_data import RunData, parse_evaluation
from miniverl_dist.schemas.evaluation import EvaluationRow, TaskOutcome
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
    assert comparisons(*rows) == ["", "", "+0.50 [+0.36, +0.64] vs null"]
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
    cells = dict(zip(TABLE_HEAD, table_rows(report(row("student", "after", 0.5)))[0], strict=True))
    assert cells == {
        "Policy": "student",
        "When": "after",
        "T": "1",
        "Tasks": "10",
        "Eps.": "40",
        "Pass": "0.500",
        "95 % Wilson": "0.40 to 0.60",
        "95 % by task": "-",
        "Null": "-",
        "Ceiling": "-",
    }


def outcomes(*passes: int, tail_calls: int = 1) -> tuple[TaskOutcome, ...]:
    """Of four episodes for each of the tasks ``t0``, ``t1``, ..."""
    return tuple(
        TaskOutcome(task_id=f"t{i}", tail_calls=tail_calls, num_episodes=4, num_passed=passed)
        for i, passed in enumerate(passes)
    )


def test_differences_are_paired_by_task_where_the_rows_hold_outcomes() -> None:
    rows = [
        row("student", "warm", 0.25, tasks=outcomes(0, 2, 1)),
        row("student", "after", 0.5, tasks=outcomes(1, 3, 2)),
    ]
    found = evaluation_lines(report(*rows))[1].difference
    assert found == Difference("warm", 0.25, 0.25, 0.25, is_paired=True)
    alone = [
        row("student", "warm", 0.0, tasks=outcomes(0)),
        row("student", "after", 0.25, tasks=outcomes(1)),
    ]
    unpaired = evaluation_lines(report(*alone))[1].difference
    assert unpaired is not None
    assert not unpaired.is_paired
    assert unpaired.low < 0.25 < unpaired.high


def test_rows_over_other_tasks_are_never_compared() -> None:
    """T = 2 of every T leaves out tasks with one call; a job for T = 2 plays those whole."""
    rows = [
        row("null", "before", 0.0, tail_calls=2, tasks=outcomes(0, tail_calls=2)),
        row("student", "x", 0.5, tail_calls=2, tasks=outcomes(2, 2, tail_calls=2)),
    ]
    assert comparisons(*rows) == ["", ""]
    assert evaluation_lines(report(*rows))[1].null_rate is None


def test_the_ceiling_is_the_share_of_tasks_without_doubt() -> None:
    rows = [row("null", "before", 0.0, tasks=outcomes(0, 0, 0, 0)), row("null", "old", 0.0)]
    doubtful = report(*rows).model_copy(
        update={"doubtful_ids": ("t1", "elsewhere"), "doubtful_source": "a thread"}
    )
    assert [line.ceiling for line in evaluation_lines(doubtful)] == [0.75, 1.0]
    assert [cells[-1] for cells in table_rows(doubtful)] == ["0.750", "1.000"]
    assert [line.ceiling for line in evaluation_lines(report(*rows))] == [None, None]
    words = "\n".join(caveats(RunData(label="x", status="finished", evaluation=doubtful)))
    assert "2 have an answer key in doubt (a thread)" in words


@pytest.mark.parametrize(
    ("split", "words"), [("tail", "(split tail)"), ("stratified", "(split stratified)"), ("", "")]
)
def test_the_split_is_named(split: str, words: str) -> None:
    evaluation = report(row("null", "before", 0.0)).model_copy(update={"split": split})
    found = "\n".join(caveats(RunData(label="x", status="finished", evaluation=evaluation)))
    assert words in found
    assert ("Evaluation tasks: 1" in found) is bool(split)


def test_a_file_of_an_earlier_version_still_reads() -> None:
    old = json.loads(report(row("student", "after", 0.5)).model_dump_json())
    for name in ("split", "classes", "doubtful_ids", "doubtful_source"):
        del old[name]
    for name in (
        "pass_low_by_task",
        "pass_high_by_task",
        "pass_at_k",
        "parsed_call_rate",
        "first_call_match_rate",
        "errors",
        "tasks",
    ):
        del old["rows"][0][name]
    read = parse_evaluation(json.dumps(old).encode(), "eval.json")
    assert read == report(row("student", "after", 0.5))
    assert [table.title for table in evaluation_tables(read)] == [
        "Pass rates",
        "What the policies do",
    ]


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
        assert caveats(RunData(label="x", status="finished", is_evaluation=True)) == []
        cut_off = caveats(RunData(label="x", status="killed", is_evaluation=True))
        assert cut_off == [
            "This evaluation is not finished (status: killed); its numbers may change."
        ]
