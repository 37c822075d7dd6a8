"""What each adapter asks of its library, against stand-ins that know these calls only."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist.observability.tracking.adapters import (
    MlflowTracker,
    TensorBoardTracker,
    TrackioTracker,
    WandbTracker,
)
from miniverl_dist.observability.tracking.base import TrackedRun, Tracker, flat
from tests.support.fake_trackers import (
    Calls,
    fake_mlflow,
    fake_tensorboard,
    fake_trackio,
    fake_wandb,
    install,
)

CONFIG = {"seed": 3, "student": {"model": {"kind": "toy"}, "tokenizer": "x" * 600}}


@pytest.fixture
def tracked(tmp_path: Path) -> TrackedRun:
    return TrackedRun("lab-2", tmp_path, CONFIG, "d" * 64, None)


def play(tracker: Tracker, run: TrackedRun, end: Any = "finished") -> str:
    run_id = tracker.open(run)
    tracker.log({"reward_mean": 0.5, "eval/student/pass_rate": 1.0}, 3)
    tracker.alarm("no call", 3)
    tracker.close(end)
    return run_id


def test_leaves_of_a_config() -> None:
    assert dict(flat({"a": {"b": {"c": 1}, "d": []}, "e": None})) == {
        "a.b.c": 1,
        "a.d": [],
        "e": None,
    }


class TestWandb:
    def test_a_run(self, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: Calls = []
        install(monkeypatch, wandb=fake_wandb(calls))
        run_id = play(WandbTracker("p", None, "offline", None), tracked)
        (_, init), *others = calls
        assert (init["project"], init["name"], init["id"]) == ("p", "lab-2", run_id)
        assert (init["dir"], init["mode"], init["resume"]) == (
            str(tracked.folder),
            "offline",
            None,
        )
        assert init["config"] == {**CONFIG, "config_digest": "d" * 64}
        assert others == [
            ("log", ({"reward_mean": 0.5, "eval/student/pass_rate": 1.0}, 3)),
            ("alert", ("alarm in step 3", "no call")),
            ("finish", 0),
        ]

    def test_nothing_about_the_machine(
        self, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: Calls = []
        install(monkeypatch, wandb=fake_wandb(calls))
        play(WandbTracker("p", None, "offline", None), tracked)
        settings = calls[0][1]["settings"]
        assert [settings[name] for name in ("host", "username", "email", "program")] == [""] * 4
        assert settings["x_disable_machine_info"]
        assert settings["x_disable_meta"]
        assert settings["x_disable_stats"]
        assert settings["disable_git"]
        assert not settings["save_code"]

    def test_online_goes_on_with_the_same_run(
        self, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls: Calls = []
        install(monkeypatch, wandb=fake_wandb(calls))
        tracker = WandbTracker("p", "team", "online", tmp_path / "place")
        assert play(tracker, replace(tracked, known_id="abcd"), "failed") == "abcd"
        init = calls[0][1]
        assert (init["id"], init["resume"], init["entity"]) == ("abcd", "allow", "team")
        assert init["dir"] == str(tmp_path / "place")
        assert calls[-1] == ("finish", 1)


class TestMlflow:
    def test_a_run(self, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: Calls = []
        install(monkeypatch, **fake_mlflow(calls, {}))
        tracked = replace(tracked, config={**CONFIG, "many": {str(i): i for i in range(150)}})
        assert play(MlflowTracker("sqlite:///x.db", "p"), tracked) == "run-7"
        assert calls[:2] == [
            ("client", "sqlite:///x.db"),
            ("create_run", ("made-p", "lab-2", {"config_digest": "d" * 64})),
        ]
        params = [one for name, (_, batch) in calls[2:4] for one in batch if name == "params"]
        assert params[:2] == [("seed", "3"), ("student.model.kind", "toy")]
        assert len(params) == 153
        assert calls[4:] == [
            ("metrics", ("run-7", [("reward_mean", 0.5, 3), ("eval/student/pass_rate", 1.0, 3)])),
            ("set_tag", ("run-7", "alarm.step-000003", "no call")),
            ("set_terminated", ("run-7", "FINISHED")),
        ]

    @pytest.mark.parametrize(("end", "status"), [("stopped", "KILLED"), ("failed", "FAILED")])
    def test_it_goes_on_with_the_same_run(
        self, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch, end: str, status: str
    ) -> None:
        calls: Calls = []
        install(monkeypatch, **fake_mlflow(calls, {"p": "5"}))
        assert play(MlflowTracker("http://h", "p"), replace(tracked, known_id="r"), end) == "r"
        assert [name for name, _ in calls] == [
            "client",
            "update_run",
            "metrics",
            "set_tag",
            "set_terminated",
        ]
        assert calls[1] == ("update_run", ("r", "RUNNING"))
        assert calls[-1] == ("set_terminated", ("r", status))


class TestTrackio:
    def test_a_run(
        self,
        tracked: TrackedRun,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        calls: Calls = []
        install(monkeypatch, trackio=fake_trackio(calls))
        name = play(TrackioTracker("p", None), tracked)
        assert name.startswith("lab-2-")
        (_, init), *others = calls
        assert (init["name"], init["resume"], init["server_url"]) == (name, "never", None)
        assert (init["auto_log_gpu"], init["auto_log_cpu"]) == (False, False)
        assert others == [
            ("log", ({"reward_mean": 0.5, "eval/student/pass_rate": 1.0}, 3, None)),
            ("alert", ("alarm in step 3", "no call", "warn", 3)),
            ("finish", None),
        ]
        assert capsys.readouterr().out == ""  # a program may read it

    def test_it_goes_on_with_the_same_run(
        self, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        calls: Calls = []
        install(monkeypatch, trackio=fake_trackio(calls))
        run = replace(tracked, known_id="lab-2-abc")
        assert play(TrackioTracker("p", "http://h"), run) == "lab-2-abc"
        assert (calls[0][1]["name"], calls[0][1]["resume"]) == ("lab-2-abc", "allow")


class TestTensorBoard:
    def test_a_run(self, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: Calls = []
        install(monkeypatch, **fake_tensorboard(calls))
        run_id = play(TensorBoardTracker(None), tracked)
        (_, path), version, config, numbers, alarm = calls
        assert Path(path).parent == tracked.folder / "tensorboard"
        assert Path(path).name.startswith("events.out.tfevents.")
        assert Path(path).name.endswith(run_id)
        assert version == ("write", {"file_version": "brain.Event:2"})
        [text] = config[1]["summary"]["value"]
        assert b"d" * 64 in text["tensor"]["string_val"][0]
        assert numbers[1]["step"] == 3
        assert numbers[1]["summary"]["value"] == [
            {"tag": "reward_mean", "simple_value": 0.5},
            {"tag": "eval/student/pass_rate", "simple_value": 1.0},
        ]
        assert alarm[1]["summary"]["value"][0]["tensor"]["string_val"] == [b"no call"]

    def test_each_start_has_a_file_of_its_own(
        self, tracked: TrackedRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        calls: Calls = []
        install(monkeypatch, **fake_tensorboard(calls))
        run_id = play(TensorBoardTracker(tmp_path / "all"), tracked)
        again = play(TensorBoardTracker(tmp_path / "all"), replace(tracked, known_id=run_id))
        assert again == run_id
        files = sorted((tmp_path / "all" / "lab-2").iterdir())
        assert [str(path) for path in files] == [p for name, p in calls if name == "file"]
        assert len(files) == 2
