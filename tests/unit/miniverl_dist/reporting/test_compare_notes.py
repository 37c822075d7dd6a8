"""What a comparison says beside its numbers, and which numbers it does not give."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from actors.cli import app
from miniverl_dist.reporting.eval_compare import (
    Comparison,
    RowChoice,
    Side,
    compare,
    comparison_tables,
)
from miniverl_dist.schemas.evaluation import EvaluationRow, TaskOutcome
from miniverl_dist.training.eval_stats import paired_difference
from tests.support.sample_run import report, row

SETTINGS = {"seed": "0", "environment.prompt": "full", "environment.reward.passed": "0.5"}


def outcomes(*passes: int, families: tuple[str, ...] = (), of: int = 4) -> tuple[TaskOutcome, ...]:
    return tuple(
        TaskOutcome(
            task_id=f"t{i}",
            tail_calls=1,
            num_episodes=of,
            num_passed=passed,
            reward_sum=float(passed),
            family=families[i] if families else "",
        )
        for i, passed in enumerate(passes)
    )


def measured(policy: str, tasks: tuple[TaskOutcome, ...], **changes: Any) -> EvaluationRow:
    played = sum(o.num_episodes for o in tasks)
    rate = sum(o.num_passed for o in tasks) / played if played else 0.0
    return row(policy, "after", rate, tasks=tasks, num_episodes=played, **changes)


def side(name: str, *rows: EvaluationRow, **settings: str) -> Side:
    made = report(*rows).model_copy(update={"settings": SETTINGS | settings})
    return Side(name, made.model_copy(update={"task_ids": ("t0", "t1", "t2")}))


LOST = measured("student", outcomes(0, 0, 0, of=0), num_faults=12)
PLAYED = measured("student", outcomes(1, 2, 3))


class TestNothingToCompare:
    @pytest.mark.parametrize(("a", "b"), list(permutations([LOST, PLAYED], 2)))
    def test_a_row_without_episodes_gets_no_difference(
        self, a: EvaluationRow, b: EvaluationRow
    ) -> None:
        found = compare(side("one", a), side("two", b))
        [line] = found.rows
        assert (line.passes, line.rewards, line.by_class) == (None, None, ())
        assert line.notes[0].startswith("no task has an episode that counts on both sides: A has ")
        assert "has 0 episodes that count and 12 faults" in line.notes[0]
        [table] = comparison_tables(found)
        assert table.rows == []
        assert line.notes[0] in table.title

    def test_tasks_that_were_lost_on_either_side(self) -> None:
        half_a = (*outcomes(1, 2), *outcomes(0, 0, 0, of=0)[2:])
        half_b = (*outcomes(0, 0, of=0), *outcomes(1, 2, 3)[2:])
        rows = [measured("student", tasks) for tasks in (half_a, half_b)]
        [line] = compare(side("one", rows[0]), side("two", rows[1])).rows
        assert line.passes is None
        assert "A has 8 episodes that count and 0 faults" in line.notes[0]

    def test_a_row_of_an_earlier_version_without_episodes(self) -> None:
        old = row("student", "after", 0.0, num_episodes=0, num_faults=3)
        [line] = compare(side("one", old), side("two", row("student", "after", 0.5))).rows
        assert line.passes is None


class TestFamilies:
    """Two files may group the same tasks otherwise; an interval must not depend on the order."""

    def test_a_family_that_only_one_side_knows(self) -> None:
        named = measured("student", outcomes(1, 2, 3, families=("f", "f", "")))
        [line] = compare(side("one", PLAYED), side("two", named)).rows
        assert line.passes is not None
        assert (line.passes.difference, line.passes.is_paired) == (0.0, True)

    @given(
        families=st.tuples(*[st.lists(st.sampled_from(["", "f", "g"]), min_size=4, max_size=4)] * 2)
    )
    def test_whatever_is_joined_on_either_side_is_drawn_together(
        self, families: tuple[list[str], list[str]]
    ) -> None:
        a, b = (
            outcomes(*passes, families=tuple(found))
            for passes, found in zip(((0, 4, 1, 3), (2, 4, 4, 0)), families, strict=True)
        )
        one, other = paired_difference(a, b), paired_difference(b, a)
        assert one is not None
        assert other is not None
        assert one.value == -other.value
        assert (one.interval is None) == (other.interval is None)
        if one.interval is not None and other.interval is not None:
            assert one.interval.low == pytest.approx(-other.interval.high, abs=1e-9)

    def test_chains_of_families_leave_one_cluster(self) -> None:
        a = outcomes(0, 1, 2, families=("f", "f", "g"))
        b = outcomes(0, 1, 2, families=("x", "y", "y"))
        found = paired_difference(a, b)
        assert found is not None
        assert found.interval is None


class TestSettings:
    def found(self, **settings: str) -> Comparison:
        return compare(side("one", PLAYED), side("two", PLAYED, **settings))

    def test_the_same_settings_need_no_word(self) -> None:
        found = self.found()
        assert (found.notes, found.rows[0].notes) == ((), ())
        assert found.rows[0].rewards is not None

    @pytest.mark.parametrize("name", ["seed", "environment.prompt"])
    def test_what_differs_is_said(self, name: str) -> None:
        found = self.found(**{name: "other"})
        assert found.notes == (f"differs: {name}: {SETTINGS[name]} in A, other in B",)
        assert found.rows[0].rewards is not None

    @pytest.mark.parametrize("name", ["environment.reward.passed", "environment.reward.more"])
    def test_rewards_under_other_weights_are_not_compared(self, name: str) -> None:
        found = self.found(**{name: "0.9"})
        assert found.notes[-1] == "rewards are not compared: their weights differ"
        assert name in found.notes[0]
        assert found.rows[0].rewards is None
        assert found.rows[0].passes is not None

    def test_a_file_that_does_not_tell_is_named(self) -> None:
        silent = Side("old", side("x", PLAYED).report.model_copy(update={"settings": {}}))
        [note] = compare(side("one", PLAYED), silent).notes
        assert note.startswith("B recorded no settings")
        assert compare(silent, silent).notes[0].startswith("A and B recorded no settings")

    def test_how_two_rows_were_asked(self) -> None:
        rows = [
            PLAYED.model_copy(update={"settings": {"max_new_tokens": tokens, "form": "text"}})
            for tokens in ("8", "4096")
        ]
        [line] = compare(side("one", rows[0]), side("two", rows[1])).rows
        assert line.notes == ("differs: max_new_tokens: 8 in A, 4096 in B",)


class TestOneSided:
    A = side("one", PLAYED, measured("null", outcomes(0, 0, 0)))
    B = side("two", PLAYED, measured("openai:m:tools", outcomes(1, 1, 1)))

    def test_rows_without_a_namesake_are_named(self) -> None:
        assert compare(self.A, self.B).notes == (
            "only in A: null:after:1",
            "only in B: openai:m:tools:after:1",
        )

    def test_not_where_the_rows_were_chosen(self) -> None:
        assert compare(self.A, self.B, row_a=RowChoice("student", "after")).notes == ()


def test_the_command_says_it_all(tmp_path: Path) -> None:
    paths = []
    for name, made in (("a", side("one", LOST, seed="1")), ("b", side("two", PLAYED))):
        paths.append(tmp_path / f"{name}.json")
        paths[-1].write_text(made.report.model_dump_json())
    result = CliRunner().invoke(app, ["eval", "compare", *map(str, paths)])
    assert result.exit_code == 0, result.output
    assert "note: differs: seed: 1 in A, 0 in B" in result.stdout
    assert "no task has an episode that counts on both sides" in result.stdout
    assert "pass rate" not in result.stdout
