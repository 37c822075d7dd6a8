from __future__ import annotations

from collections import Counter

from miniverl_dist.reporting.run_compare import (
    comparison,
    number_rows,
    pass_rate_rows,
    recipe_rows,
)
from miniverl_dist.reporting.run_data import RunData
from miniverl_dist.reporting.summary import training_head, training_rows
from tests.support.sample_run import report, row


def run(label: str, rate: float, **config: object) -> RunData:
    return RunData(
        label=label,
        metrics=[{"step": step, "pass_rate": rate} for step in range(1, 4)],
        config={"seed": 1, "opd": {"coef": 0.3, "clip": 3.0} | config},
    )


def rising(label: str, num_steps: int) -> RunData:
    metrics = [{"step": step, "reward_mean": float(step)} for step in range(1, num_steps + 1)]
    return RunData(label=label, metrics=metrics)


def test_only_what_differs_in_the_recipes() -> None:
    runs = [run("a", 0.5), run("b", 0.5, coef=0.0, path="/home/ada/x")]
    assert recipe_rows(runs) == [
        ("opd.coef", "0.3", "0.0"),
        ("opd.path", "not there", "…/x"),
    ]
    assert recipe_rows([run("a", 0.5), run("b", 0.9)]) == []


def test_last_means_with_their_difference_to_the_first_run() -> None:
    other = run("b", 0.75)
    other.metrics.append({"step": 4, "pass_rate": 0.25, "grad_norm": 2.0})
    other.losses = {"group dropped: old": Counter({1: 2, 3: 1})}
    assert number_rows([run("a", 0.25), other]) == [
        ("pass_rate (fraction)", "0.25", "0.5 (+0.25)"),
        ("grad_norm (norm)", "not measured", "2"),
        ("group dropped: old", "0", "3"),
    ]


def test_a_run_that_ended_without_a_number_does_not_look_healthy() -> None:
    other = run("b", 0.75)
    other.metrics.append({"step": 4, "pass_rate": None})
    [found] = number_rows([run("a", 0.5), other])
    assert found == ("pass_rate (fraction)", "0.5", "not a number (in 1 of 4 steps)")


def test_both_tables_of_a_page_are_of_the_same_steps_and_say_of_which() -> None:
    """Three steps: one at either end. Twelve: five."""
    for num_steps, size, value in ((3, 1, "3"), (7, 3, "6"), (12, 5, "10")):
        one, other = rising("a", num_steps), rising("b", 3)
        text = f"mean of the last {size} of {num_steps} steps"
        tables = {table.title: table for table in comparison([one, other])}
        compared = tables["Runs compared: last steps"]
        assert list(compared.head) == ["", f"a: {text}", "b: mean of the last 1 of 3 steps"]
        assert training_head(one)[2] == f"M{text[1:]}"
        [[_, of_comparison, _]], [[_, _, of_summary, _]] = compared.rows, training_rows(one)
        assert of_comparison == of_summary == value


def test_a_loss_is_compared_where_it_should_fall() -> None:
    policy, sft = rising("a", 3), rising("b", 3)
    policy.metrics[-1]["loss"] = 0.5
    assert "loss (loss)" not in [name for name, *_ in number_rows([policy])]
    sft.metrics[-1] |= {"loss": 0.25, "divergence_mean": 0.75, "num_target_rows": 4}
    assert number_rows([policy, sft])[1:] == [
        ("loss (loss)", "0.5", "0.25 (-0.25)"),
        ("divergence_mean (nats)", "not measured", "0.75"),
    ]


def test_pass_rates_stand_side_by_side() -> None:
    one, other = run("a", 0.5), run("b", 0.5)
    one.evaluation = report(
        row("null", "before", 0.0), row("student", "after", 0.5), row("student", "after", 0.75)
    )
    other.evaluation = report(
        row("student", "after", 0.25), row("student", "after", 0.125, tail_calls="all")
    )
    assert pass_rate_rows([one, other]) == [
        ("null", "before", "1", "0.000", "not evaluated"),
        ("student", "after", "1", "0.750", "0.250"),
        ("student", "after", "all", "not evaluated", "0.125"),
    ]
    [table, *_] = comparison([one, other])
    assert list(table.head) == ["Policy", "When", "T", "a", "b"]
    assert "eval compare" in table.title


def test_a_run_alone_is_compared_with_nothing() -> None:
    assert comparison([run("a", 0.5)]) == []
