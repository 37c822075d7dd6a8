from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from miniverl_dist.errors import RecordError
from miniverl_dist.observability.metrics import METRICS, MetricsWriter, metric_line
from miniverl_dist.observability.run_dir import RunDirectory


def test_a_line_per_step_and_null_for_what_is_not_finite(tmp_path: Path) -> None:
    with RunDirectory.create(tmp_path / "run") as run:
        MetricsWriter(run).write({"step": 1, "loss": math.nan, "ratio_max": math.inf, "lr": 1e-4})
        assert run.read_jsonl("metrics.jsonl") == [
            {"step": 1, "loss": None, "ratio_max": None, "lr": 1e-4}
        ]


def test_numpy_numbers_and_missing_ones() -> None:
    line = metric_line(
        {"step": 2, "num_groups": np.int64(3), "loss": np.float32(0.5), "kl_loss": None}
    )
    assert line == {"step": 2, "num_groups": 3, "loss": 0.5, "kl_loss": None}
    assert [type(value) for value in line.values()] == [int, int, float, type(None)]


def test_fields_by_key() -> None:
    line = metric_line({"step": 1, "loss_by_span_type": {"assistant_text": 0.5, "x": math.nan}})
    assert line["loss_by_span_type"] == {"assistant_text": 0.5, "x": None}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"step": 1, "losss": 0.5, "a": 1}, "metric a, losss not declared"),
        ({"loss": 0.5}, "an integer `step`, found None"),
        ({"step": 1.5}, "an integer `step`, found 1.5"),
        ({"step": 1, "loss": "0.5"}, "metric loss: expected a number, found '0.5'"),
        ({"step": 1, "loss": {"a": 1}}, "metric loss: expected a number, found a mapping"),
        ({"step": 1, "loss_by_span_type": 1.0}, "metric loss_by_span_type: expected a mapping"),
    ],
)
def test_undeclared_and_misshapen_fields_are_refused(
    tmp_path: Path, record: dict[str, object], message: str
) -> None:
    with RunDirectory.create(tmp_path / "run") as run:
        with pytest.raises(RecordError, match=message):
            MetricsWriter(run).write(record)  # type: ignore[arg-type]
        assert not (run.path / "metrics.jsonl").exists()


def test_every_field_has_a_unit_and_a_meaning() -> None:
    assert {"teacher_entropy_mean", "loss_by_span_type", "projection_chunk_size"} <= set(METRICS)
    for name, metric in METRICS.items():
        assert metric.unit, name
        assert len(metric.description) > 8, name
        if name.startswith("seconds_"):
            assert metric.unit == "seconds"
        if name.endswith("_fraction"):
            assert metric.unit == "fraction"
