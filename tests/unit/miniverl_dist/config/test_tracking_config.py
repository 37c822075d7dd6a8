from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from miniverl_dist.config.tracking import MlflowConfig, TrackingConfig

ADAPTER: TypeAdapter[TrackingConfig] = TypeAdapter(TrackingConfig)


def read(**fields: Any) -> TrackingConfig:
    return ADAPTER.validate_json(json.dumps(fields), strict=True)


@pytest.mark.parametrize("kind", ["tensorboard", "wandb", "trackio"])
def test_most_need_nothing(kind: str) -> None:
    assert read(kind=kind).kind == kind


@pytest.mark.parametrize(
    ("uri", "stored"),
    [
        ("sqlite:///runs/mlflow.db", "sqlite:///runs/mlflow.db"),
        ("HTTP://Tracker:80/x/", "http://tracker/x"),
    ],
)
def test_mlflow_takes_a_database_file_or_a_server(uri: str, stored: str) -> None:
    found = read(kind="mlflow", uri=uri)
    assert isinstance(found, MlflowConfig)
    assert found.uri == stored


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": "mlflow"},
        {"kind": "mlflow", "uri": "mlruns"},
        {"kind": "mlflow", "uri": "file:mlruns"},
        {"kind": "mlflow", "uri": "postgresql://ada:secret@host/db"},
        {"kind": "mlflow", "uri": "https://ada:secret@host"},
        {"kind": "trackio", "uri": "https://host/?write_token=secret"},
        {"kind": "wandb", "api_key": "secret"},
        {"kind": "wandb", "mode": "disabled"},
        {"kind": "wandb", "project": "a/b"},
        {"kind": "tensorboard", "project": "p"},
        {"kind": "tensorboard", "deadline_s": 0},
        {"kind": "neptune"},
    ],
)
def test_what_a_tracker_does_not_take_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        read(**fields)


@pytest.mark.parametrize("kind", ["mlflow", "trackio"])
def test_credentials_are_not_quoted(kind: str) -> None:
    with pytest.raises(ValidationError, match="credentials: a tracker takes them") as caught:
        read(kind=kind, uri="https://ada:secret@host")
    assert "secret" not in str(caught.value.errors()[0]["msg"])
