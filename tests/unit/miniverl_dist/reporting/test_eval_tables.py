from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from actors.inspection import aligned, evaluation_text
from miniverl_dist.reporting.eval_tables import evaluation_tables
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow, TaskOutcome
from tests.support.sample_run import report, row

CLASSES = {
    f"multi_turn_base_{i}": ("TravelAPI", "GorillaFileSystem")[: 1 + i % 2] for i in range(4)
}


def outcomes(*passes: int, tail_calls: int | Sequence[int] = 1) -> tuple[TaskOutcome, ...]:
    tails = [tail_calls] * len(passes) if isinstance(tail_calls, int) else tail_calls
    return tuple(
        TaskOutcome(
            task_id=f"multi_turn_base_{i}", tail_calls=tail, num_episodes=4, num_passed=passed
        )
        for i, (passed, tail) in enumerate(zip(passes, tails, strict=True))
    )


def measured(policy: str, tag: str, *passes: int, **changes: Any) -> EvaluationRow:
    rate = sum(passes) / (4 * len(passes))
    return row(policy, tag, rate, **{"tasks": outcomes(*passes)} | changes)


def cells(made: EvaluationReport, title: str) -> list[dict[str, str]]:
    """Rows of a table by column; none where the table is left out."""
    for table in evaluation_tables(made):
        if table.title.startswith(title):
            return [dict(zip(table.head, line, strict=True)) for line in table.rows]
    return []


def test_classes_beside_the_null_policy_on_the_same_tasks() -> None:
    made = report(
        measured("null", "before", 0, 1, 0, 0), measured("student", "after", 4, 2, 0, 4)
    ).model_copy(update={"classes": CLASSES})
    found = cells(made, "Pass rates by class")
    assert [(c["Class"], c["Tasks"], c["Eps."], c["Pass"], c["Null"]) for c in found] == [
        ("GorillaFileSystem", "2", "8", "0.750", "0.125"),
        ("TravelAPI", "4", "16", "0.625", "0.062"),
    ]
    assert found[0]["95 % by task"] == "0.50 to 1.00"
    assert cells(made.model_copy(update={"classes": {}}), "Pass rates by class") == []


def test_categories_stand_before_classes() -> None:
    made = report(measured("student", "after", 4, 2, 0, 4))
    categories = {f"multi_turn_base_{i}": ("base", "miss_func")[i % 2] for i in range(4)}
    both = made.model_copy(update={"classes": CLASSES, "categories": categories})
    found = cells(both, "Pass rates by class")
    assert [(c["Class"], c["Eps."], c["Pass"]) for c in found] == [
        ("base", "8", "0.500"),
        ("miss_func", "8", "0.750"),
        ("GorillaFileSystem", "8", "0.750"),
        ("TravelAPI", "16", "0.625"),
    ]
    alone = dict.fromkeys(categories, "base")
    one = made.model_copy(update={"classes": {}, "categories": alone})
    assert cells(one, "Pass rates by class") == []


def test_of_every_t_only_the_row_for_all_is_taken_apart_by_class() -> None:
    tails = (1, 2, 1, 2)
    together = measured("student", "x", 4, 2, 0, 4, tail_calls="all").model_copy(
        update={"tasks": outcomes(4, 2, 0, 4, tail_calls=tails)}
    )
    one = measured("student", "x", 4, 0, tail_calls=1)
    made = report(one, together).model_copy(update={"classes": CLASSES})
    assert {c["T"] for c in cells(made, "Pass rates by class")} == {"all"}
    assert cells(made, "Pass rates by the calls") == []
    assert [c["T"] for c in cells(made, "Pass rates")] == ["1", "all"]


def test_shorter_tasks_of_one_horizon_are_shown_apart() -> None:
    made = report(
        row("student", "x", 0.5, tail_calls=3, tasks=outcomes(4, 2, 0, tail_calls=(3, 1, 3)))
    )
    found = cells(made, "Pass rates by the calls")
    assert [(c["T"], c["Played"], c["Tasks"], c["Pass"]) for c in found] == [
        ("3", "1", "1", "0.500"),
        ("3", "3", "2", "0.500"),
    ]


def test_pass_at_k_shows_powers_of_two_and_the_most() -> None:
    made = report(
        row("student", "x", 0.5, pass_at_k=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)),
        row("null", "x", 0.0, pass_at_k=(0.0,)),
    )
    [found] = cells(made, "At least one of k")
    assert {k: v for k, v in found.items() if k.startswith("pass@")} == {
        "pass@1": "0.100",
        "pass@2": "0.200",
        "pass@4": "0.400",
        "pass@6": "0.600",
    }


def test_a_row_with_fewer_episodes_has_a_dash() -> None:
    made = report(
        row("student", "x", 0.5, pass_at_k=(0.1, 0.2, 0.3, 0.4)),
        row("student", "y", 0.5, pass_at_k=(0.1, 0.2)),
    )
    assert [c["pass@4"] for c in cells(made, "At least one of k")] == ["0.400", "-"]


def test_errors_are_shown_where_there_are_any() -> None:
    kinds = {"parse": 3, "unknown_tool": 1, "arguments": 0, "execution": 7, "harness_fault": 2}
    made = report(
        row("student", "x", 0.5, errors=kinds),
        row("oracle", "x", 1.0, errors=dict.fromkeys(kinds, 0)),
        row("student", "old", 0.5, num_faults=4),
    )
    found = [tuple(c.values())[1:] for c in cells(made, "Calls that went wrong")]
    assert found == [("x", "1", "3", "1", "0", "7", "2"), ("old", "1", "-", "-", "-", "-", "4")]


def test_ends_are_the_most_frequent_ones_first() -> None:
    ends = {"max_turns": 1, "final_answer": 9, "deadline": 2, "max_tokens": 1, "engine_error": 1}
    [found] = cells(report(row("student", "x", 0.5, terminations=ends)), "How episodes end")
    assert found["Ends"] == "final_answer 9, deadline 2, engine_error 1, other 2"


def test_differences_say_how_their_interval_was_made() -> None:
    made = report(measured("student", "warm", 0, 2, 1, 1), measured("student", "after", 1, 3, 2, 2))
    assert cells(made, "Differences") == [
        {
            "Policy": "student",
            "When": "after",
            "T": "1",
            "Against": "warm",
            "Difference": "+0.250",
            "95 %": "+0.25 to +0.25",
            "Interval": "paired by task",
        }
    ]
    old = report(row("null", "before", 0.0), row("teacher", "before", 0.5))
    assert cells(old, "Differences")[0]["Interval"] == "episodes independent"


def test_every_table_fits_into_100_columns() -> None:
    ends = {"repeated_call_limit": 300, "parse_error_limit": 200, "environment_error": 100, "x": 1}
    rows = [
        measured(policy, tag, 0, 2, 4, 1).model_copy(
            update={
                "num_tasks": 200,
                "num_episodes": 12800,
                "tasks": tuple(
                    o.model_copy(update={"num_episodes": 3200, "num_passed": 800 * o.num_passed})
                    for o in outcomes(0, 2, 4, 1)
                ),
                "settings": {
                    "endpoint": "1a2b3c4d",
                    "episodes_per_task": "4",
                    "form": "tools",
                    "max_new_tokens": "4096",
                    "temperature": "0.7",
                    "thinking": "None",
                },
                "policy_version": 12345,
                "tail_calls": "all",
                "pass_low_by_task": 0.1,
                "pass_high_by_task": 0.2,
                "pass_at_k": (0.5,) * 64,
                "errors": dict.fromkeys(("parse", "unknown_tool", "execution"), 12345),
                "terminations": ends,
                "tokens_per_episode": 12345.6,
                "parsed_call_rate": 1.0,
                "first_call_match_rate": 1.0,
            }
        )
        for policy in ("null", "student", "teacher")
        for tag in ("before", "warm", "step-000010")
    ]
    made = report(*rows).model_copy(
        update={
            "classes": CLASSES,
            "doubtful_ids": ("multi_turn_base_0",),
            "doubtful_source": "x",
            "settings": {"rollout.max_context_tokens": "15872", "environment.options": "x" * 500},
        }
    )
    tables = evaluation_tables(made)
    assert len(tables) == 9
    for table in tables:
        widest = max(len(line) for line in [table.title, *aligned([table.head, *table.rows])])
        assert widest <= 100, table.title


def test_in_a_terminal_the_settings_do_not_push_the_rates_away() -> None:
    made = report(row("null", "before", 0.1)).model_copy(update={"settings": {"seed": "0"}})
    shown = evaluation_text(made)
    assert shown.index("Settings of the recipe") < shown.index("Pass rates")
