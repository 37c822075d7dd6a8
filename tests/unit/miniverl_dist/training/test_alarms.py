from __future__ import annotations

from miniverl_dist.training.alarms import alarms


def test_a_healthy_step_and_fields_that_were_not_measured_are_silent() -> None:
    assert list(alarms({})) == []
    assert list(alarms({"calls_per_trajectory": 0.5, "num_target_rows": 1.0})) == []


def test_no_call_and_no_row_are_told() -> None:
    calls, rows = alarms({"calls_per_trajectory": 0.0, "num_target_rows": 0.0})
    assert "made a call" in calls
    assert "selection kept no token" in rows
