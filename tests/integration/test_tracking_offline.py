"""A run that fails and goes on, in the trackers' own libraries, without a network.

Each tracker has to hold what metrics.jsonl holds: every step once, under one id.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sqlite3
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.tracked_run import IDENTITY

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("tensorboard", "wandb", "mlflow", "sqlalchemy", "alembic", "trackio")
MISSING = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
pytestmark = pytest.mark.skipif(
    bool(MISSING), reason=f"not installed: {', '.join(MISSING)} (pip install '.[tracking]')"
)
STEPS = [1, 2, 3, 4, 5]
BLOCK_BYTES, HEADER_BYTES = 32_768, 7
LAST_PART_TYPES = (1, 4)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Run directory ``tracked``; beside it what lies outside of it."""
    folder = tmp_path_factory.mktemp("trackers")
    trackers = (
        "[{kind: tensorboard}, {kind: wandb, project: offline-test},"
        f" {{kind: mlflow, uri: 'sqlite:///{folder}/mlflow.db', project: offline-test}},"
        " {kind: trackio, project: offline-test}]"
    )
    subprocess.run(
        [sys.executable, "-m", "tests.support.tracked_run", folder / "tracked", trackers],
        cwd=ROOT,
        check=True,
        env=os.environ | IDENTITY | {"TRACKIO_DIR": str(folder / "trackio"), "HF_HUB_OFFLINE": "1"},
    )
    return folder / "tracked"


@pytest.fixture(scope="module")
def rewards(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["entropy_mean"] for line in lines]


def run_id(run: Path, name: str) -> str:
    state = json.loads((run / "tracking" / f"{name}.json").read_text())
    assert state["sent_step"] == STEPS[-1]
    return str(state["id"])


def test_nothing_failed(run: Path, rewards: list[float]) -> None:
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event for event in events if event["event"] == "tracking_failed"] == []
    assert "resumed" in {event["event"] for event in events}
    assert len(set(rewards)) == len(STEPS)


def test_tensorboard(run: Path, rewards: list[float]) -> None:
    module = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = module.EventAccumulator(str(run / "tensorboard"))
    found.Reload()
    scalars = found.Scalars("entropy_mean")
    assert [scalar.step for scalar in scalars] == STEPS
    assert [scalar.value for scalar in scalars] == pytest.approx(rewards, rel=1e-6)
    assert found.Scalars("eval_before/null/pass_rate")[0].value == 0
    texts = [event.tensor_proto.string_val[0] for event in found.Tensors("config")]
    assert len(texts) == 1
    assert json.loads((run / "manifest.json").read_text())["config_digest"].encode() in texts[0]
    assert len(list((run / "tensorboard").iterdir())) == 2


def test_wandb(run: Path, rewards: list[float]) -> None:
    """Two offline files of one id, which `wandb sync` joins."""
    files = sorted((run / "wandb").glob("offline-run-*/*.wandb"))
    assert {path.name for path in files} == {f"run-{run_id(run, '1-wandb')}.wandb"}
    assert len(files) == 2
    records = [record for path in files for record in wandb_records(path)]
    history = [
        {(item.nested_key[0] if item.nested_key else item.key): item.value_json for item in items}
        for items in (record.history.item for record in records)
        if items
    ]
    values = {
        int(row["_step"]): float(row["entropy_mean"]) for row in history if "entropy_mean" in row
    }
    assert list(values) == STEPS
    assert list(values.values()) == pytest.approx(rewards)
    assert any(record.HasField("exit") and record.exit.exit_code == 1 for record in records)


def wandb_records(path: Path) -> Iterator[Any]:
    """Records of a file in blocks, as LevelDB's log has them, behind seven bytes of its own."""
    record = importlib.import_module("wandb.proto.wandb_internal_pb2").Record
    data, position, parts = path.read_bytes(), HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += HEADER_BYTES
        parts += data[position : position + length]
        position += length
        if kind in LAST_PART_TYPES:
            found = record()
            found.ParseFromString(parts)
            parts = b""
            yield found


def test_mlflow(run: Path, rewards: list[float]) -> None:
    client = importlib.import_module("mlflow").MlflowClient(
        tracking_uri=f"sqlite:///{run.parent}/mlflow.db"
    )
    experiment = client.get_experiment_by_name("offline-test")
    [found] = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == run_id(run, "2-mlflow")
    assert (found.info.run_name, found.info.status) == ("tracked", "FINISHED")
    history = client.get_metric_history(found.info.run_id, "entropy_mean")
    assert [metric.step for metric in history] == STEPS
    assert [metric.value for metric in history] == pytest.approx(rewards)
    assert found.data.params["student.model.kind"] == "toy"


def test_trackio(run: Path, rewards: list[float]) -> None:
    with sqlite3.connect(run.parent / "trackio" / "offline-test.db") as database:
        rows = database.execute(
            "SELECT run_name, step, metrics FROM metrics ORDER BY id"
        ).fetchall()
    assert {name for name, _, _ in rows} == {run_id(run, "3-trackio")}
    found = [(step, json.loads(metrics).get("entropy_mean")) for _, step, metrics in rows]
    values = [(step, value) for step, value in found if value is not None]
    assert [step for step, _ in values] == STEPS
    assert [value for _, value in values] == pytest.approx(rewards)


def test_what_is_kept_names_nobody(run: Path) -> None:
    """Logs that wandb writes for itself hold paths; what it would upload does not."""
    private = [*IDENTITY.values(), str(run), str(ROOT)]
    kept = [*run.glob("tensorboard/*"), *run.glob("wandb/offline-*/*.wandb")]
    kept += run.glob("wandb/offline-*/files/*")
    kept += [*run.parent.glob("trackio/*.db")]
    assert len(kept) >= 5
    for path in kept:
        text = path.name + path.read_bytes().decode("utf-8", "replace")
        assert [name for name in private if name in text] == [], path.name
