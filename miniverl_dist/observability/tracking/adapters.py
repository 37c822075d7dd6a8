"""One adapter per tracker. Each imports its library when a run opens it, in the follower's thread.

The libraries are told neither host nor user, and what they would find out by themselves is turned
off where they let us.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, Final

from miniverl_dist.observability.step_names import step_name
from miniverl_dist.observability.tracking.base import RunEnd, TrackedRun, flat

MLFLOW_BATCH: Final = 100
"""Most params that MLflow takes in one request."""
MLFLOW_VALUE_CHARS: Final = 500
"""Longest value of a param in every version of its server."""
MLFLOW_STATUS: Final[Mapping[RunEnd, str]] = {
    "finished": "FINISHED",
    "stopped": "KILLED",
    "failed": "FAILED",
}


class TensorBoardTracker:
    """Event files for TensorBoard.

    Written with its record writer: `EventFileWriter` would put the host's name into theirs.

    Args:
        folder: In which the run gets one of its name; None: ``tensorboard/`` in the run directory.
    """

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._file: BinaryIO | None = None

    def open(self, run: TrackedRun) -> str:
        """See `Tracker.open`; each start of a run has a file of its own."""
        self._events = import_module("tensorboard.compat.proto.event_pb2")
        self._summaries = import_module("tensorboard.compat.proto.summary_pb2")
        self._tensors = import_module("tensorboard.compat.proto.tensor_pb2")
        self._types = import_module("tensorboard.compat.proto.types_pb2")
        records = import_module("tensorboard.summary.writer.record_writer")
        folder = self._folder or run.folder / "tensorboard"
        if self._folder is not None:
            folder = folder / run.name
        folder.mkdir(parents=True, exist_ok=True)
        run_id = run.known_id or secrets.token_hex(4)
        # TensorBoard reads the files of a folder in the order of their names.
        path = folder / f"events.out.tfevents.{time.time_ns():020d}.{run_id}"
        self._file = path.open("xb")
        self._writer: Any = records.RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if run.known_id is None:
            config = json.dumps(dict(run.config), indent=2)
            self._text("config", f"digest `{run.config_digest}`\n\n```json\n{config}\n```", 0)
        return run_id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`."""
        value = self._summaries.Summary.Value
        values = [value(tag=name, simple_value=number) for name, number in numbers.items()]
        self._write(step=step, summary=self._summaries.Summary(value=values))

    def alarm(self, text: str, step: int) -> None:
        """See `Tracker.alarm`: a text."""
        self._text("alarm", text, step)

    def close(self, end: RunEnd) -> None:
        """See `Tracker.close`."""
        del end
        if self._file is not None:
            self._file.close()

    def _text(self, tag: str, text: str, step: int) -> None:
        kind = self._summaries.SummaryMetadata(
            plugin_data=self._summaries.SummaryMetadata.PluginData(plugin_name="text")
        )
        tensor = self._tensors.TensorProto(dtype=self._types.DT_STRING, string_val=[text.encode()])
        value = self._summaries.Summary.Value(tag=tag, metadata=kind, tensor=tensor)
        self._write(step=step, summary=self._summaries.Summary(value=[value]))

    def _write(self, **fields: Any) -> None:  # noqa: ANN401 - fields of TensorBoard's message
        event = self._events.Event(wall_time=time.time(), **fields)
        self._writer.write(event.SerializeToString())
        self._writer.flush()


class WandbTracker:
    """Weights & Biases.

    Args:
        project: As W&B shows it.
        entity: Team or user; None: the one that wandb is logged in with.
        mode: ``offline`` or ``online``.
        folder: In which ``wandb/`` is made; None: the run directory.
    """

    def __init__(self, project: str, entity: str | None, mode: str, folder: Path | None) -> None:
        self._project, self._entity = project, entity
        self._mode, self._folder = mode, folder
        self._run: Any = None

    def open(self, run: TrackedRun) -> str:
        """See `Tracker.open`."""
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # read when wandb is imported
        wandb = import_module("wandb")
        folder = self._folder or run.folder
        folder.mkdir(parents=True, exist_ok=True)
        run_id = run.known_id or secrets.token_hex(4)
        self._run = wandb.init(
            project=self._project,
            entity=self._entity,
            name=run.name,
            id=run_id,
            dir=os.fspath(folder),
            mode=self._mode,
            # Offline, wandb cannot know what its server has: `wandb sync` joins files of one id.
            resume="allow" if self._mode == "online" else None,
            config={**run.config, "config_digest": run.config_digest},
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                host="",
                username="",
                email="",
                program="",
                x_disable_meta=True,
                x_disable_machine_info=True,
                x_disable_stats=True,
                x_save_requirements=False,
            ),
        )
        return run_id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(numbers), step=step)

    def alarm(self, text: str, step: int) -> None:
        """See `Tracker.alarm`: an alert."""
        self._run.alert(title=f"alarm in step {step}", text=text)

    def close(self, end: RunEnd) -> None:
        """See `Tracker.close`."""
        self._run.finish(exit_code=1 if end == "failed" else 0)


class MlflowTracker:
    """MLflow, by its client: the fluent functions would add user, script and commit as tags.

    Args:
        uri: ``sqlite:///FILE`` or a server.
        project: The experiment; made where it does not exist.
    """

    def __init__(self, uri: str, project: str) -> None:
        self._uri, self._project = uri, project
        self._client: Any = None
        self._run_id = ""

    def open(self, run: TrackedRun) -> str:
        """See `Tracker.open`."""
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when mlflow is imported
        client = import_module("mlflow").MlflowClient(tracking_uri=self._uri)
        self._client = client
        if run.known_id is not None:
            self._run_id = run.known_id
            client.update_run(self._run_id, status="RUNNING")
            return self._run_id
        found = client.get_experiment_by_name(self._project)
        experiment = found.experiment_id if found else client.create_experiment(self._project)
        made = client.create_run(
            experiment, run_name=run.name, tags={"config_digest": run.config_digest}
        )
        self._run_id = str(made.info.run_id)
        param = import_module("mlflow.entities").Param
        params = [param(key, str(value)[:MLFLOW_VALUE_CHARS]) for key, value in flat(run.config)]
        for start in range(0, len(params), MLFLOW_BATCH):
            client.log_batch(self._run_id, params=params[start : start + MLFLOW_BATCH])
        return self._run_id

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`."""
        metric, now_ms = import_module("mlflow.entities").Metric, int(time.time() * 1000)
        metrics = [metric(name, number, now_ms, step) for name, number in numbers.items()]
        self._client.log_batch(self._run_id, metrics=metrics)

    def alarm(self, text: str, step: int) -> None:
        """See `Tracker.alarm`: a tag."""
        self._client.set_tag(self._run_id, f"alarm.{step_name(step)}", text)

    def close(self, end: RunEnd) -> None:
        """See `Tracker.close`."""
        self._client.set_terminated(self._run_id, MLFLOW_STATUS[end])


class TrackioTracker:
    """Trackio. It finds a run again by its name only, which therefore gets a part of the id.

    Args:
        project: As Trackio shows it.
        uri: A server; None: files, where TRACKIO_DIR says.
    """

    def __init__(self, project: str, uri: str | None) -> None:
        self._project, self._uri = project, uri
        self._module: Any = None
        self._run: Any = None

    def open(self, run: TrackedRun) -> str:
        """See `Tracker.open`."""
        self._module = import_module("trackio")
        name = run.known_id or f"{run.name}-{secrets.token_hex(3)}"
        with contextlib.redirect_stdout(sys.stderr):  # standard output may be read by a program
            self._run = self._module.init(
                project=self._project,
                name=name,
                server_url=self._uri,
                config={**run.config, "config_digest": run.config_digest},
                resume="never" if run.known_id is None else "allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self._run.config["_Username"] = None
        return name

    def log(self, numbers: Mapping[str, float], step: int) -> None:
        """See `Tracker.log`."""
        self._run.log(dict(numbers), step=step)

    def alarm(self, text: str, step: int) -> None:
        """See `Tracker.alarm`: an alert."""
        level = self._module.AlertLevel.WARN
        self._run.alert(title=f"alarm in step {step}", text=text, level=level, step=step)

    def close(self, end: RunEnd) -> None:
        """See `Tracker.close`."""
        del end
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()
