"""Rows that cannot be are refused; rows of earlier versions still read."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from miniverl_dist.errors import RecordError
from miniverl_dist.reporting.run_data import parse_evaluation
from miniverl_dist.schemas.evaluation import EvaluationRow, TaskOutcome
from tests.support.sample_run import report, row


def outcome(num_episodes: int, num_passed: int, task_id: str = "t") -> TaskOutcome:
    return TaskOutcome(
        task_id=task_id, tail_calls=1, num_episodes=num_episodes, num_passed=num_passed
    )


@pytest.mark.parametrize(("num_episodes", "num_passed"), [(2, 9), (0, 1), (-1, -1), (2, -1)])
def test_no_task_passes_more_episodes_than_it_has(num_episodes: int, num_passed: int) -> None:
    with pytest.raises(ValidationError):
        outcome(num_episodes, num_passed)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_episodes": 5}, "found num_episodes 5, expected 4 as its tasks have together"),
        ({"pass_rate": 0.75}, "found pass_rate 0.75, expected 2 of 4"),
        ({"pass_rate": 1.5}, "less than or equal to 1"),
        ({"pass_low": -0.1}, "greater than or equal to 0"),
        ({"num_faults": -1}, "greater than or equal to 0"),
        ({"reward_mean": None}, "4 episodes and a rate or mean that is null"),
    ],
)
def test_a_row_agrees_with_its_tasks(changes: dict[str, Any], words: str) -> None:
    tasks = (outcome(2, 2, "a"), outcome(2, 0, "b"))
    assert row("student", "after", 0.5, tasks=tasks).num_episodes == 4
    with pytest.raises(ValidationError, match=words):
        row("student", "after", 0.5, **{"tasks": tasks} | changes)


def test_the_error_names_the_file_and_the_task() -> None:
    told = json.loads(report(row("null", "before", 0.0, tasks=(outcome(2, 0),))).model_dump_json())
    told["rows"][0]["tasks"][0]["num_passed"] = 9
    with pytest.raises(RecordError, match=r"^x/eval\.json: .*num_passed 9 of num_episodes 2"):
        parse_evaluation(json.dumps(told).encode(), "x/eval.json")


def test_a_row_without_an_episode_claims_nothing() -> None:
    """As earlier versions wrote it: 0 in every column."""
    old = row("openai:m:tools", "initial", 0.0, num_episodes=0, num_faults=26, pass_high=1.0)
    told = json.loads(row("null", "before", 0.0).model_dump_json())
    told |= {"num_episodes": 0, "num_faults": 26, "parsed_call_rate": 0.0, "pass_high": 1.0}
    for found in (old, EvaluationRow.model_validate_json(json.dumps(told), strict=True)):
        assert (found.pass_rate, found.reward_mean, found.pass_interval) == (None, None, None)
        assert (found.official_per_turn_rate, found.parsed_call_rate) == (None, None)
        assert (found.calls_per_episode, found.tokens_per_episode) == (None, None)
        assert found.num_faults == 26
