from __future__ import annotations

from collections import Counter

from miniverl_dist.reporting.run_compare import compare_head, number_rows, recipe_rows
from miniverl_dist.reporting.run_data import RunData


def run(label: str, rate: float, **config: object) -> RunData:
    return RunData(
        label=label,
        metrics=[{"step": step, "pass_rate": rate} for step in range(1, 4)],
        config={"seed": 1, "opd": {"coef": 0.3, "clip": 3.0} | config},
    )


def test_only_what_differs_in_the_recipes() -> None:
    runs = [run("a", 0.5), run("b", 0.5, coef=0.0, path="/home/ada/x")]
    assert compare_head(runs) == ("", "a", "b")
    assert recipe_rows(runs) == [
        ("opd.coef", "0.3", "0.0"),
        ("opd.path", "not there", "…/x"),
    ]
    assert recipe_rows([run("a", 0.5), run("b", 0.9)]) == []


def test_last_means_with_their_difference_to_the_first_run() -> None:
    other = run("b", 0.75)
    other.metrics.append({"step": 4, "pass_rate": None, "grad_norm": 2.0})
    other.losses = {"group dropped: old": Counter({1: 2, 3: 1})}
    assert number_rows([run("a", 0.5), other]) == [
        ("steps", "3", "4"),
        ("pass_rate (fraction)", "0.5", "0.75 (+0.25)"),
        ("grad_norm (norm)", "not measured", "2"),
        ("group dropped: old", "0", "3"),
    ]
