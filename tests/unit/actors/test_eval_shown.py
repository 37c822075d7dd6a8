"""A command shows what it has measured, beside what that is compared with."""

from __future__ import annotations

import json

from actors.eval_commands import _of_this_job
from miniverl_dist.schemas.evaluation import EvaluationReport
from tests.support.eval_rows import row


def report(*rows: tuple[str, str]) -> EvaluationReport:
    described = {
        "environment": "calculator",
        "task_ids": ["t0"],
        "trains_on_eval_tasks": False,
        "temperature": 1.0,
        "rows": [row(tag, 1, policy=policy) for policy, tag in rows],
    }
    return EvaluationReport.model_validate_json(json.dumps(described))


def test_the_history_of_a_run_is_left_to_its_summary() -> None:
    history = [("null", "before"), ("oracle", "before"), ("student", "warm")]
    history += [("student", "step-000010"), ("teacher", "before")]
    found = report(*history, ("student", "step-000020"))
    shown = _of_this_job(found, found.rows[:-1])
    assert [(each.policy, each.tag) for each in shown.rows] == [
        ("null", "before"),
        ("oracle", "before"),
        ("student", "warm"),
        ("student", "step-000020"),
    ]
    # Nothing new: everything is shown.
    assert _of_this_job(found, found.rows) == found
