"""Stand-ins for the trackers' libraries: exactly the calls that the adapters make, recorded.

A call of anything else, or with an argument that the library does not have, is an error here.
"""

from __future__ import annotations

import io
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

Calls = list[tuple[str, Any]]


def install(patch: pytest.MonkeyPatch, **modules: ModuleType) -> None:
    """Put modules where `import` finds them; ``a__b`` is ``a.b``."""
    for name, module in modules.items():
        patch.setitem(sys.modules, name.replace("__", "."), module)


def fake_module(name: str, **members: Any) -> ModuleType:
    module = ModuleType(name)
    vars(module).update(members)
    return module


def fake_wandb(calls: Calls, *, fails_at: int | None = None) -> ModuleType:
    class Run:
        def log(self, data: dict[str, float], step: int) -> None:
            if step == fails_at:
                raise LookupError("lost")
            calls.append(("log", (data, step)))

        def alert(self, title: str, text: str) -> None:
            calls.append(("alert", (title, text)))

        def finish(self, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    def settings(
        *,
        silent: bool,
        console: str,
        save_code: bool,
        disable_git: bool,
        host: str,
        username: str,
        email: str,
        program: str,
        x_disable_meta: bool,
        x_disable_machine_info: bool,
        x_disable_stats: bool,
        x_save_requirements: bool,
    ) -> dict[str, Any]:
        return dict(locals())

    def init(
        *,
        project: str,
        entity: str | None,
        name: str,
        id: str,
        dir: str,
        mode: str,
        resume: str | None,
        config: dict[str, Any],
        settings: dict[str, Any],
    ) -> Run:
        calls.append(("init", dict(locals())))
        return Run()

    return fake_module("wandb", init=init, Settings=settings)


def fake_mlflow(calls: Calls, experiments: dict[str, str]) -> dict[str, ModuleType]:
    class MlflowClient:
        def __init__(self, tracking_uri: str) -> None:
            calls.append(("client", tracking_uri))

        def get_experiment_by_name(self, name: str) -> Any:
            found = experiments.get(name)
            return SimpleNamespace(experiment_id=found) if found else None

        def create_experiment(self, name: str) -> str:
            experiments[name] = f"made-{name}"
            return experiments[name]

        def create_run(self, experiment_id: str, *, run_name: str, tags: dict[str, str]) -> Any:
            calls.append(("create_run", (experiment_id, run_name, tags)))
            return SimpleNamespace(info=SimpleNamespace(run_id="run-7"))

        def update_run(self, run_id: str, *, status: str) -> None:
            calls.append(("update_run", (run_id, status)))

        def log_batch(self, run_id: str, *, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100
            calls.append(("metrics" if metrics else "params", (run_id, list(metrics or params))))

        def set_tag(self, run_id: str, key: str, value: str) -> None:
            calls.append(("set_tag", (run_id, key, value)))

        def set_terminated(self, run_id: str, status: str) -> None:
            calls.append(("set_terminated", (run_id, status)))

    def metric(key: str, value: float, timestamp: int, step: int) -> tuple[str, float, int]:
        assert timestamp > 1_600_000_000_000  # milliseconds
        return key, value, step

    def param(key: str, value: str) -> tuple[str, str]:
        assert len(value) <= 500
        return key, value

    return {
        "mlflow": fake_module("mlflow", MlflowClient=MlflowClient),
        "mlflow__entities": fake_module("mlflow.entities", Metric=metric, Param=param),
    }


def fake_trackio(calls: Calls) -> ModuleType:
    class Run:
        def __init__(self, config: dict[str, Any]) -> None:
            self.config = {**config, "_Username": "ada"}

        def log(self, metrics: dict[str, float], step: int) -> None:
            calls.append(("log", (metrics, step, self.config["_Username"])))

        def alert(self, title: str, text: str, level: str, step: int) -> None:
            calls.append(("alert", (title, text, level, step)))

        def finish(self) -> None:
            print("finishing")
            calls.append(("finish", None))

    def init(
        *,
        project: str,
        name: str,
        server_url: str | None,
        config: dict[str, Any],
        resume: str,
        embed: bool,
        auto_log_gpu: bool,
        auto_log_cpu: bool,
    ) -> Run:
        print("* initialized")
        calls.append(("init", dict(locals())))
        return Run(config)

    return fake_module("trackio", init=init, AlertLevel=SimpleNamespace(WARN="warn"))


def fake_tensorboard(calls: Calls) -> dict[str, ModuleType]:
    """Messages are dictionaries, and a record is the message itself."""

    class Event(dict[str, Any]):
        def SerializeToString(self) -> Event:  # noqa: N802 - protobuf's name
            return self

    class RecordWriter:
        def __init__(self, file: io.BufferedWriter) -> None:
            calls.append(("file", file.name))

        def write(self, data: Event) -> None:
            calls.append(("write", {key: data[key] for key in data if key != "wall_time"}))

        def flush(self) -> None:
            pass

    class Summary(dict[str, Any]):
        Value = dict

    class SummaryMetadata(dict[str, Any]):
        PluginData = dict

    proto = "tensorboard__compat__proto__"
    return {
        f"{proto}event_pb2": fake_module("event_pb2", Event=Event),
        f"{proto}summary_pb2": fake_module(
            "summary_pb2", Summary=Summary, SummaryMetadata=SummaryMetadata
        ),
        f"{proto}tensor_pb2": fake_module("tensor_pb2", TensorProto=dict),
        f"{proto}types_pb2": fake_module("types_pb2", DT_STRING=7),
        "tensorboard__summary__writer__record_writer": fake_module(
            "record_writer", RecordWriter=RecordWriter
        ),
    }
