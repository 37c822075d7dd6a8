"""What a recipe may say about evaluation tasks."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from actors.tasks import resolve_tasks
from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import TaskNotFoundError
from tests.fakes import run_config

TASKS = {"a": TaskInfo(task_id="a", num_calls=1, num_turns=1, classes=())}
DOUBT = {"doubtful_source": "a thread"}


@pytest.mark.parametrize("tail_calls", [1, 7, "all"])
def test_horizons(tail_calls: Any) -> None:
    assert EvaluationConfig(tail_calls=tail_calls).tail_calls == tail_calls


@pytest.mark.parametrize("tail_calls", [0, -1, "every", "3", None])
def test_no_horizons(tail_calls: Any) -> None:
    with pytest.raises(ValidationError, match="tail_calls"):
        EvaluationConfig(tail_calls=tail_calls)


@pytest.mark.parametrize("fields", [{"doubtful_ids": ("a",)}, DOUBT])
def test_doubt_needs_its_source_and_a_source_its_doubt(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="give both or neither"):
        EvaluationConfig(**fields)
    assert EvaluationConfig(doubtful_ids=("a",), **DOUBT).doubtful_ids == ("a",)


def test_a_doubtful_task_that_does_not_exist_is_an_error() -> None:
    known = run_config(evaluation={"doubtful_ids": ["a"]} | DOUBT)
    assert resolve_tasks(known, TASKS) == (("a",), ("a",))
    unknown = run_config(evaluation={"doubtful_ids": ["a", "b"]} | DOUBT)
    with pytest.raises(TaskNotFoundError, match=r"evaluation\.doubtful_ids: there is no task 'b'"):
        resolve_tasks(unknown, TASKS)


def test_all_tasks_that_do_not_exist_are_named() -> None:
    many = ["a", *(f"x{number}" for number in range(7))]
    config = run_config(tasks={"train": many, "eval": ["x0", "y"]})
    with pytest.raises(TaskNotFoundError) as caught:
        resolve_tasks(config, TASKS)
    assert str(caught.value) == (
        "tasks: there is no task 'x0', 'x1', 'x2', 'x3', 'x4' and 3 more among the 1 of bfcl, "
        "which are named 'a', …"
    )
