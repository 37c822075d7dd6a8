from __future__ import annotations

from typing import Any

import pytest

from actors.inspection import evaluation_text
from miniverl_dist.reporting.eval_notes import report_notes
from miniverl_dist.reporting.eval_tables import evaluation_tables
from miniverl_dist.reporting.evaluation import caveats
from miniverl_dist.reporting.figures import evaluation_figure
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.schemas.evaluation import EvaluationRow, TaskOutcome
from tests.support.sample_run import report, row


def measured(policy: str, *passes: int, of: int = 1, **changes: Any) -> EvaluationRow:
    tasks = tuple(
        TaskOutcome(task_id=f"t{i}", tail_calls=1, num_episodes=of, num_passed=passed)
        for i, passed in enumerate(passes)
    )
    return row(policy, "before", sum(passes) / (of * len(passes)), **{"tasks": tasks} | changes)


def test_sound_bounds_need_no_note() -> None:
    rows = [measured("oracle", 1, 1), measured("null", 0, 0), measured("student", 1, 3, of=4)]
    assert report_notes(report(*rows)) == []


def test_an_oracle_that_does_not_reach_one_says_what_the_limits_forbid() -> None:
    ends = {"max_tokens": 2, "max_turns": 1}
    made = report(measured("oracle", 1, 0, 0, 0, tail_calls="all", failed_ends=ends))
    [note] = report_notes(made)
    assert note.startswith(
        "oracle 0.250 at T = all: 3 of 4 tasks cannot be solved within the limits at one T or more "
        "(how they ended: max_tokens 2, max_turns 1): raise rollout.max_context_tokens"
    )
    assert f"note: {note}" in evaluation_text(made)
    assert note in caveats(RunData(label="x", status="finished", evaluation=made))


def test_an_oracle_that_the_verifier_refuses_is_no_matter_of_limits() -> None:
    ends = {"final_answer": 1, "max_tokens": 1}
    [note] = report_notes(report(measured("oracle", 1, 0, 0, failed_ends=ends)))
    assert "2 of 3 tasks are not passed by the expert's own calls" in note
    assert "(how they ended: final_answer 1, max_tokens 1)" in note


def test_rows_of_earlier_versions_tell_what_they_can() -> None:
    old = row("oracle", "before", 0.7, terminations={"final_answer": 28, "max_tokens": 12})
    [note] = report_notes(report(old))
    assert "3 of 10 tasks cannot be solved within the limits" in note
    assert "(how they ended: max_tokens 12)" in note


def test_a_null_policy_that_passes_is_said() -> None:
    [note] = report_notes(report(measured("null", 1, 0, 0, 0)))
    assert note.startswith("null 0.250 at T = 1: the verifier passes doing nothing in 1 of 4 tasks")


def test_parts_of_a_row_for_every_t_are_not_said_again() -> None:
    rows = [measured("null", 1, 0, tail_calls=tail) for tail in (1, 2, "all")]
    [note] = report_notes(report(*rows))
    assert "T = all" in note


def test_a_row_of_which_nothing_is_known_is_said() -> None:
    lost = row(
        *("openai:m", "initial", 0.0),
        num_episodes=0,
        num_faults=26,
        terminations={"engine_error": 26},
    )
    assert report_notes(report(lost)) == [
        "openai:m (initial, T = 1) was not measured: all 26 episodes were lost to the harness "
        "(engine_error 26)."
    ]
    rates = {table.title: table for table in evaluation_tables(report(lost))}["Pass rates"]
    cells = dict(zip(rates.head, rates.rows[0], strict=True))
    assert (cells["Pass"], cells["95 % Wilson"], cells["Eps."]) == ("-", "-", "0")


def test_a_row_of_which_nothing_is_known_is_on_no_chart() -> None:
    lost = row("student", "before", 0.0, num_episodes=0, num_faults=4)
    runs = [
        RunData(label="x", evaluation=report(*rows))
        for rows in ((lost,), (lost, row("student", "after", 0.5)))
    ]
    assert evaluation_figure(runs[:1]) is None
    [curve] = (evaluation_figure(runs[1:]) or {})["data"]
    assert len(curve["x"]) == 1


@pytest.mark.parametrize(
    ("temperature", "of", "is_said"), [(0.0, 4, True), (0.0, 1, False), (0.5, 4, False)]
)
def test_greedy_repeats(temperature: float, of: int, is_said: bool) -> None:
    made = report(measured("student", 0, of, of=of)).model_copy(update={"temperature": temperature})
    assert [note[:14] for note in report_notes(made)] == ["Temperature 0:"] * is_said


def test_only_the_student_has_a_version() -> None:
    rows = [row(policy, "x", 0.5, policy_version=7) for policy in ("student", "null", "openai:m")]
    table = next(t for t in evaluation_tables(report(*rows)) if t.title == "What the policies do")
    column = table.head.index("Version")
    assert [line[column] for line in table.rows] == ["7", "-", "-"]


def test_settings_are_shown() -> None:
    settings = {"temperature": "0.5", "episodes_per_task": "4", "endpoint": "1a2b3c4d"}
    made = report(measured("openai:m", 1, 0, settings=settings)).model_copy(
        update={"settings": {"environment.prompt": "names"}}
    )
    tables = {table.title: table for table in evaluation_tables(made)}
    assert tables["How the policies were asked"].rows == [
        ("openai:m", "before", "0.5", "4", "-", "endpoint 1a2b3c4d")
    ]
    assert tables["Settings of the recipe"].rows == [("environment.prompt", "names")]


class TestBase:
    """What a student's row is read against."""

    def against(self, *rows: EvaluationRow) -> list[str]:
        tables = {table.title: table for table in evaluation_tables(report(*rows))}
        shown = tables["Differences of pass rates"]
        return [f"{line[1]} vs {line[shown.head.index('Against')]}" for line in shown.rows]

    def student(self, tag: str, tail_calls: Any = 2, **changes: Any) -> EvaluationRow:
        return measured("student", 1, 3, of=4, tail_calls=tail_calls, **changes).model_copy(
            update={"tag": tag}
        )

    @pytest.mark.parametrize("tail_calls", [2, "all"])
    def test_without_a_beginning_at_the_same_t_it_is_the_null_policy(self, tail_calls: Any) -> None:
        rows = [
            self.student("warm", 1),
            measured("null", 0, 0, tail_calls=tail_calls),
            self.student("step-000010", tail_calls),
        ]
        assert self.against(*rows) == ["step-000010 vs null"]

    def test_the_initial_weights_are_a_beginning(self) -> None:
        rows = [
            measured("null", 0, 0, tail_calls=2),
            self.student("initial-T2"),
            self.student("step-000010-T2"),
        ]
        assert self.against(*rows) == ["initial-T2 vs null", "step-000010-T2 vs initial-T2"]

    def test_there_is_none_against_what_was_not_measured(self) -> None:
        lost = measured("null", 0, 0, tail_calls=2).model_copy(
            update={"num_episodes": 0, "pass_rate": None, "tasks": ()}
        )
        with pytest.raises(KeyError, match="Differences"):
            self.against(lost, self.student("x"))


class TestPureEvaluation:
    def words(self, *rows: EvaluationRow, **fields: Any) -> str:
        manifest = {"warmup": {"num_steps": 1}, "policy_label": "strictly on-policy"}
        data = RunData(label="x", status="finished", manifest=manifest, evaluation=report(*rows))
        for name, value in fields.items():
            setattr(data, name, value)
        return "\n".join(caveats(data))

    def test_nothing_is_said_of_training(self) -> None:
        trained = self.words(row("student", "after", 0.5))
        assert "warmed up" in trained
        assert "Strictly on-policy" in trained
        alone = self.words(row("openai:m", "initial", 0.5), is_evaluation=True)
        assert "warmed up" not in alone
        assert "on-policy" not in alone

    @pytest.mark.parametrize(
        ("policy", "is_evaluation", "is_said"),
        [("student", False, True), ("student", True, True), ("null", True, False)],
    )
    def test_a_warm_start_is_said_where_the_student_plays(
        self, policy: str, is_evaluation: bool, is_said: bool
    ) -> None:
        found = self.words(
            row(policy, "initial", 0.5),
            is_evaluation=is_evaluation,
            config={"student": {"warm_start": "runs/other"}},
        )
        assert ("started from weights that another run had trained" in found) is is_said

    def test_a_warm_started_run_says_so_by_its_manifest(self) -> None:
        manifest = {"warm_start": {"weights_sha256": "0" * 64}}
        found = self.words(row("student", "after", 0.5), manifest=manifest)
        assert "did not begin untrained" in found
        assert "did not begin untrained" not in self.words(row("student", "after", 0.5))

    def test_memorisation_is_the_trained_policys(self) -> None:
        for policy, is_said in (("null", False), ("student", True)):
            made = report(row(policy, "initial", 0.0), trains_on_eval_tasks=True)
            found = self.words(evaluation=made, is_evaluation=True)
            assert ("Memorisation" in found) is is_said
