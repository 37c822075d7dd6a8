from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from actors.cli import app
from miniverl_dist.errors import ConfigError, RecordError
from miniverl_dist.reporting.eval_compare import (
    RowChoice,
    Side,
    compare,
    comparison_tables,
    read_side,
)
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow, TaskOutcome
from miniverl_dist.training.eval_stats import paired_difference
from tests.support.sample_run import report, row, write_run

CLASSES = {"a": ("Files",), "b": ("Files", "Maths"), "c": ("Maths",), "d": ("Maths",)}
BASE = {"a": 0, "b": 1, "c": 4, "d": 2}
BETTER = {"a": 2, "b": 1, "c": 4, "d": 4}

COMMAND = ["eval", "compare"]


def outcomes(passes: dict[str, int], tail_calls: int = 1) -> tuple[TaskOutcome, ...]:
    return tuple(
        TaskOutcome(
            task_id=task_id,
            tail_calls=tail_calls,
            num_episodes=4,
            num_passed=passed,
            reward_sum=passed + 1.0,
        )
        for task_id, passed in passes.items()
    )


def measured(policy: str, tag: str, passes: dict[str, int], **changes: Any) -> EvaluationRow:
    tail = changes.get("tail_calls", 1)
    rate = sum(passes.values()) / (4 * len(passes))
    return row(policy, tag, rate, **{"tasks": outcomes(passes, tail)} | changes)


def side(name: str, *rows: EvaluationRow, **changes: Any) -> Side:
    ids = tuple(dict.fromkeys(o.task_id for r in rows for o in r.tasks)) or ("a", "b")
    made = report(*rows).model_copy(update={"task_ids": ids, "classes": CLASSES} | changes)
    return Side(name, made)


def test_a_row_beside_its_namesake() -> None:
    a = side("one", measured("student", "after", BASE), measured("null", "before", dict(BASE, c=0)))
    b = side("two", measured("student", "after", BETTER))
    found = compare(a, b)
    [line] = found.rows
    assert (found.scope, found.is_intersection) == ("the same 4 tasks", False)
    passes = line.passes
    assert (passes.rate_a, passes.rate_b, passes.difference) == (7 / 16, 11 / 16, 0.25)
    assert passes.null_rate == 3 / 16
    expected = paired_difference(outcomes(BETTER), outcomes(BASE))
    assert expected is not None
    assert expected.interval is not None
    assert (passes.low, passes.high) == (expected.interval.low, expected.interval.high)
    assert line.rewards is not None
    assert (line.rewards.rate_a, line.rewards.rate_b) == (11 / 16, 15 / 16)
    assert [(c.name, c.num_tasks, c.rate_a, c.rate_b) for c in line.by_class] == [
        ("Files", 2, 1 / 8, 3 / 8),
        ("Maths", 3, 7 / 12, 9 / 12),
    ]


def test_a_swap_turns_the_sign() -> None:
    a, b = (side(n, measured("student", "after", p)) for n, p in (("x", BASE), ("y", BETTER)))
    one, other = compare(a, b).rows[0].passes, compare(b, a).rows[0].passes
    assert one.low is not None
    assert other.high is not None
    assert (one.difference, one.low) == (-other.difference, -other.high)


def test_chosen_rows_of_one_run() -> None:
    both = side("run", measured("student", "warm", BASE), measured("student", "after", BETTER))
    found = compare(
        both, both, row_a=RowChoice("student", "warm"), row_b=RowChoice("student", "after")
    )
    assert [(r.row_a, r.row_b, r.passes.difference) for r in found.rows] == [
        ("student warm, T = 1", "student after, T = 1", 0.25)
    ]
    alone = compare(both, both, row_a=RowChoice("student", "warm"))
    assert [r.row_b for r in alone.rows] == ["student warm, T = 1"]


def test_a_choice_may_name_one_horizon() -> None:
    rows = [measured("student", "after", BASE, tail_calls=tail) for tail in (1, 2)]
    both = side("run", *rows)
    assert len(compare(both, both, row_a=RowChoice("student", "after")).rows) == 2
    [line] = compare(both, both, row_a=RowChoice("student", "after", 2)).rows
    assert line.row_a == "student after, T = 2"


class TestRefusals:
    A = side("one", measured("student", "after", BASE))

    def refused(self, b: Side, **options: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            compare(self.A, b, **options)
        return str(caught.value)

    @pytest.mark.parametrize("intersection", [True, False])
    @pytest.mark.parametrize(
        ("what", "value", "words"),
        [
            (
                "environment",
                "calculator",
                "environment is bfcl in A (one) and calculator in B (two)",
            ),
            ("temperature", 0.0, "temperature is 1.0 in A (one) and 0.0 in B (two)"),
        ],
    )
    def test_other_settings_even_as_an_intersection(
        self, what: str, value: object, words: str, intersection: bool
    ) -> None:
        b = side("two", measured("student", "after", BETTER), **{what: value})
        assert words in self.refused(b, intersection=intersection)

    def test_other_tasks_are_named(self) -> None:
        words = self.refused(side("two", measured("student", "after", {"a": 1, "x": 1})))
        assert "A (one) has 4 tasks and B (two) 2" in words
        assert "only in A: b, c, d; only in B: x" in words
        assert "--intersection compares the 1 " in words

    def test_many_other_tasks_are_counted(self) -> None:
        many = {f"x{i}": 1 for i in range(9)}
        words = self.refused(side("two", measured("student", "after", many)))
        assert "only in B: x0, x1, x2 and 6 more" in words

    def test_another_horizon(self) -> None:
        b = side("two", measured("student", "after", BETTER, tail_calls=2))
        assert "A has student:after:1; B has student:after:2" in self.refused(b)
        words = self.refused(b, row_a=RowChoice("student", "after"))
        assert "T is 1 in A (one) and 2 in B (two)" in words
        words = self.refused(b, row_a=RowChoice("student", "after"), intersection=True)
        assert "have no task at the same T in common" in words

    def test_one_horizon_over_other_tasks(self) -> None:
        """T = 2 of every T, and a job for T = 2 that plays shorter tasks whole."""
        mixed = outcomes({"a": 1, "b": 1}, 2) + outcomes({"c": 1, "d": 1})
        rows = [
            measured("student", "after", {"a": 1, "b": 2}, tail_calls=2),
            row("student", "after", 0.25, tail_calls=2, tasks=mixed),
        ]
        ids = {"task_ids": tuple(BASE)}
        with pytest.raises(ConfigError, match=r"has 2 pairs of task and T, .* has 4, and 2 are"):
            compare(side("x", rows[0], **ids), side("y", rows[1], **ids))
        found = compare(side("x", rows[0], **ids), side("y", rows[1], **ids), intersection=True)
        assert (found.rows[0].passes.num_tasks, found.rows[0].passes.rate_a) == (2, 3 / 8)

    def test_a_row_that_is_not_there(self) -> None:
        words = self.refused(self.A, row_a=RowChoice("teacher", "before"))
        assert words == "one has no such row; it has student:after:1"
        empty = Side("two", report().model_copy(update={"task_ids": tuple(BASE)}))
        assert "B has no rows" in self.refused(empty)


def test_an_intersection_is_named_so_and_keeps_what_both_have() -> None:
    a = side("one", measured("student", "after", BASE))
    b = side("two", measured("student", "after", {"c": 0, "a": 4, "x": 4}))
    found = compare(a, b, intersection=True)
    assert found.scope == "INTERSECTION ONLY: 2 tasks of 4 (A) and 3 (B)"
    passes = found.rows[0].passes
    assert (passes.num_tasks, passes.rate_a, passes.rate_b) == (2, 0.5, 0.5)


def test_rows_of_an_earlier_version_are_compared_as_independent() -> None:
    a, b = side("x", row("student", "after", 0.2)), side("y", row("student", "after", 0.6))
    [line] = compare(a, b).rows
    assert (line.passes.difference, line.passes.is_paired) == (pytest.approx(0.4), False)
    assert (line.passes.low, line.rewards, line.by_class) == (
        pytest.approx(0.2586, abs=1e-3),
        None,
        (),
    )
    with pytest.raises(ConfigError, match="written without outcomes by task"):
        compare(a, b, intersection=True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("student:after", RowChoice("student", "after")),
        ("student:after:3", RowChoice("student", "after", 3)),
        ("student:after:all", RowChoice("student", "after", "all")),
        ("http://host:8000:before", RowChoice("http://host:8000", "before")),
        ("http://host:8000:before:2", RowChoice("http://host:8000", "before", 2)),
    ],
)
def test_how_a_row_is_chosen(text: str, expected: RowChoice) -> None:
    assert RowChoice.parse(text) == expected


@pytest.mark.parametrize("text", ["student", "", ":after", "student:"])
def test_a_choice_that_names_no_row(text: str) -> None:
    with pytest.raises(ConfigError, match="expected POLICY:WHEN or POLICY:WHEN:T"):
        RowChoice.parse(text)


def test_tables_fit_and_name_ceiling_and_faults() -> None:
    classes = dict.fromkeys(BASE, ("GorillaFileSystem", "VehicleControlAPI"))
    doubt = {"classes": classes, "doubtful_ids": ("a",), "doubtful_source": "x"}
    a = side("one", measured("student", "before", BASE, num_faults=2), **doubt)
    b = side("two", measured("student", "before", BETTER))
    [table] = comparison_tables(compare(a, b))
    assert table.title == (
        "student before, T = 1; practical ceiling 0.750; faults left out: A 2, B 0"
    )
    assert [line[0] for line in table.rows] == [
        "pass rate",
        "reward",
        "GorillaFileSystem",
        "VehicleControlAPI",
    ]
    widths = [max(map(len, column)) for column in zip(table.head, *table.rows, strict=True)]
    assert sum(widths) + 2 * (len(widths) - 1) <= 100


class TestCommand:
    def write(self, folder: Path, name: str, made: EvaluationReport) -> Path:
        path = folder / f"{name}.json"
        path.write_text(made.model_dump_json())
        return path

    def test_text_and_json(self, tmp_path: Path) -> None:
        a = self.write(tmp_path, "a", side("a", measured("student", "after", BASE)).report)
        b = self.write(tmp_path, "b", side("b", measured("student", "after", BETTER)).report)
        told = CliRunner().invoke(app, [*COMMAND, str(a), str(b)])
        assert told.exit_code == 0, told.output
        assert f"A  {a}\nB  {b}\nbfcl, temperature 1.0, the same 4 tasks" in told.output
        assert "pass rate  4      0.438  0.688  -     +0.250" in told.output
        as_json = CliRunner().invoke(app, [*COMMAND, str(a), str(b), "--json"])
        result = json.loads(as_json.output)["result"]
        assert result["rows"][0]["passes"]["difference"] == 0.25

    def test_runs_and_chosen_rows(self, tmp_path: Path) -> None:
        run = str(write_run(tmp_path))
        rows = ["--row-a", "student:warm", "--row-b", "student:after"]
        told = CliRunner().invoke(app, [*COMMAND, run, run, *rows])
        assert told.exit_code == 0, told.output
        assert "A student warm, T = 1; B student after, T = 1" in told.output

    def test_what_is_no_evaluation(self, tmp_path: Path) -> None:
        with pytest.raises(RecordError, match=r"eval\.json does not exist"):
            read_side(tmp_path)
        broken = tmp_path / "broken.json"
        broken.write_text("{}")
        with pytest.raises(RecordError, match=r"broken\.json: .*environment"):
            read_side(broken)
