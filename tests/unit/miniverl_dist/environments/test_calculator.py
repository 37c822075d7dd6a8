from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.environments import CalculatorConfig
from miniverl_dist.environments.calculator import calculator
from miniverl_dist.environments.question import QuestionEnvironment
from miniverl_dist.environments.question_tasks import canonical
from miniverl_dist.schemas.messages import ParsedCall
from tests.support.question_audit import (
    DIFFICULTIES,
    answer_of,
    audit,
    play_messages,
    random_calls,
    refused,
    told,
)

ENV = calculator(CalculatorConfig(num_tasks=30))
TASK_IDS = tuple(ENV.tasks())


@pytest.mark.parametrize("seed", range(3))
def test_audit(seed: int) -> None:
    audit(calculator(CalculatorConfig(num_tasks=90, seed=seed)))


@settings(max_examples=40)
@given(
    task_id=st.sampled_from(TASK_IDS),
    messages=st.lists(
        st.lists(random_calls(tuple(ENV.schemas), ("a", "b", "answer")), max_size=3), max_size=3
    ),
)
def test_no_call_breaks_it(task_id: str, messages: Sequence[Sequence[ParsedCall]]) -> None:
    play_messages(ENV.start(task_id, prefix_calls=0), messages)


def reference(formula: str) -> Fraction:
    """The formula by Python's own parser, every number a fraction."""
    exact = re.sub(r"\d+", lambda digits: f"Fraction({digits[0]})", formula)
    return Fraction(eval(exact, {"Fraction": Fraction}))


@pytest.mark.parametrize("difficulty", DIFFICULTIES)
def test_the_answer_is_that_of_the_formula(difficulty: str) -> None:
    config = CalculatorConfig.model_validate({"difficulty": difficulty, "num_tasks": 200})
    env = calculator(config)
    sizes = set()
    for task_id, task in env.questions.items():
        formula = task.question.text.removeprefix("What is ").removesuffix("?")
        value = reference(formula)
        assert task.question.answer == value
        assert canonical(answer_of(env, task_id)) == canonical(value)
        sizes.add(len(task.expert_calls))
        assert ("(" in formula) == (difficulty != "easy")
        largest = max(map(int, re.findall(r"\d+", formula)))
        assert largest < (10_000 if difficulty == "hard" else 100)
    assert sizes == {"easy": {2}, "medium": {3, 4}, "hard": {6, 7}}[difficulty]


@pytest.mark.parametrize(
    ("name", "a", "b", "result"),
    [
        ("add", 0.1, 0.2, "0.3"),
        ("add", "0.1", "0.2", "0.3"),
        ("subtract", 1.1, 1, "0.1"),
        ("multiply", 1.1, 1.1, "1.21"),
        ("multiply", 10**14, 10**15, "1" + "0" * 29),
        ("divide", 1, 8, "0.125"),
        ("divide", -7, 2, "-3.5"),
        ("divide", 10**29, 10**15, "1" + "0" * 14),
        ("subtract", 2, 2.0, "0"),
        ("add", "-5", " 12 ", "7"),
        ("add", 1e20, 0, "1" + "0" * 20),
    ],
)
def test_results_are_exact(name: str, a: object, b: object, result: str) -> None:
    session = ENV.start(TASK_IDS[0], prefix_calls=0)
    assert told(session, name, a=a, b=b) == result


@pytest.mark.parametrize(
    ("name", "a", "b", "problem"),
    [
        ("divide", 1, 0, "division by zero"),
        ("divide", 0, 0.0, "division by zero"),
        ("divide", 1, 3, "no finite decimal form"),
        ("multiply", 10**29, 10, "more than 30 digits"),
        ("add", 10**30, 0, "more than 30 digits"),
        ("divide", 123456789, 2**20, "more than 15 digits"),
        ("add", True, 1, "a must be a number in plain digits, found 'True'"),
        ("add", None, 1, "found 'None'"),
        ("add", 1, "1e5", "b must be a number in plain digits, found '1e5'"),
        ("add", 1, "1/3", "found '1/3'"),
        ("add", 1, "١", "plain digits"),
        ("add", 1, "__import__('os')", "plain digits"),
        ("add", float("nan"), 1, "found 'nan'"),
        ("add", 1, float("inf"), "found 'inf'"),
        ("add", [1], 1, "found '[1]'"),
        ("add", 1, 5e-324, "more than 15 digits"),
        ("add", "9" * 61, 1, "plain digits"),
        ("add", 2**1024, 1, "more than 1024 bits"),
    ],
)
def test_what_it_refuses(name: str, a: object, b: object, problem: str) -> None:
    session = ENV.start(TASK_IDS[0], prefix_calls=0)
    assert problem in refused(session, name, a=a, b=b)


@given(a=st.decimals(-999, 999, places=3), b=st.decimals(-999, 999, places=3))
def test_a_result_can_be_carried_on_in_json(a: object, b: object) -> None:
    """What the model reads, written as a JSON number, is the very value that was computed."""
    session = ENV.start(TASK_IDS[0], prefix_calls=0)
    shown = told(session, "multiply", a=str(a), b=str(b))
    as_json = float(shown) if "." in shown else int(shown)
    assert told(session, "add", a=as_json, b=0) == shown


def test_environments_do_not_share_tasks() -> None:
    other: QuestionEnvironment = calculator(CalculatorConfig(num_tasks=30, seed=1))
    assert other.questions[TASK_IDS[0]] != ENV.questions[TASK_IDS[0]]
