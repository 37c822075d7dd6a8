"""A recipe's trackers between recorder and adapters; the library is a stand-in."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from actors import launch
from actors.tracking import Tracking, evaluation_numbers, require_trackers
from miniverl_dist.config.load import LoadedConfig, load_config
from miniverl_dist.errors import MissingDependencyError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.progress import SilentProgress
from miniverl_dist.observability.run_dir import RecordFile, RunDirectory
from miniverl_dist.training.recorder import Recorder
from tests.fakes import FakeClock
from tests.support.fake_trackers import Calls, fake_module, fake_wandb, install
from tests.support.sample_run import RECIPE

ROW = {
    "policy": "student",
    "tag": "step-000004",
    "policy_version": 4,
    "pass_rate": 0.5,
    "official_per_turn_rate": None,
    "reward_parts": {"terminal_pass": 0.25},
    "terminations": {},
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    made: Calls = []
    install(monkeypatch, wandb=fake_wandb(made))
    return made


@pytest.fixture
def loaded(tmp_path: Path) -> LoadedConfig:
    return recipe(tmp_path, "[{kind: wandb, deadline_s: 20}]")


def recipe(folder: Path, tracking: str) -> LoadedConfig:
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    return load_config(path, [f"tracking={tracking}"])


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Recorder]]:
    """Opens the run's directory, as each start of the run does."""
    opened: list[RunDirectory] = []

    def start() -> Recorder:
        for run in opened:
            run.close()
        path = tmp_path / "run-3"
        is_new = not path.exists()
        run = RunDirectory.create(path) if is_new else RunDirectory.open(path, writable=True)
        opened.append(run)
        return Recorder(run, SilentProgress(), FakeClock())

    yield start
    for run in opened:
        run.close()


def steps(calls: Calls) -> list[int]:
    return [record[1] for name, record in calls if name == "log"]


def failures(recorder: Recorder) -> list[dict[str, Any]]:
    events = recorder.run.read_jsonl(RecordFile.EVENTS)
    return [event for event in events if event["event"] == "tracking_failed"]


def test_a_recipe_without_trackers_adds_nothing(
    tmp_path: Path, start: Callable[[], Recorder]
) -> None:
    recorder = start()
    Tracking(recipe(tmp_path, "[]"), recorder)
    assert (recorder.sinks, recorder.listeners) == ([], [])
    assert not (recorder.run.path / "tracking").exists()


async def test_steps_evaluations_and_alarms_arrive(
    calls: Calls, loaded: LoadedConfig, start: Callable[[], Recorder]
) -> None:
    recorder = start()
    tracking = Tracking(loaded, recorder)
    recorder.event(Event.BASELINE_EVALUATED, **(ROW | {"policy": "null", "tag": "before"}))
    recorder.step({"step": 4, "reward_mean": 0.5, "loss_by_span_type:tool_call": 0.2})
    recorder.event(Event.STEP_FINISHED, step=4)
    recorder.event(Event.ALARM, what="no trajectory of this step made a call", step=4)
    recorder.event(Event.EVALUATION_FINISHED, **ROW)
    await tracking.close("finished")
    (_, init), baseline, step, alarm, evaluation, end = calls
    assert init["name"] == "run-3"
    assert init["config"]["config_digest"] == loaded.digest
    assert init["config"]["seed"] == loaded.config.seed
    assert baseline[1] == (evaluation_numbers(ROW | {"policy": "null", "tag": "before"}), 0)
    assert set(step[1][0]) == {"reward_mean", "peak_rss_bytes"}
    assert step[1][1] == 4
    assert alarm == ("alert", ("alarm in step 4", "no trajectory of this step made a call"))
    assert evaluation[1] == (
        {
            "eval/student/policy_version": 4.0,
            "eval/student/pass_rate": 0.5,
            "eval/student/reward_parts/terminal_pass": 0.25,
        },
        4,
    )
    assert end == ("finish", 0)
    assert failures(recorder) == []


@pytest.mark.parametrize(
    ("policy", "tag", "prefix"),
    [
        ("student", "warm", "eval/student/"),
        ("student", "step-000010", "eval/student/"),
        ("student", "before", "eval_before/student/"),
        ("student", "after", "eval_after/student/"),
        ("null", "before", "eval_before/null/"),
    ],
)
def test_only_one_series_is_drawn_over_steps(policy: str, tag: str, prefix: str) -> None:
    numbers = evaluation_numbers({"policy": policy, "tag": tag, "pass_rate": 0.5, "ok": True})
    assert numbers == {f"{prefix}pass_rate": 0.5}


async def test_a_resumed_run_fills_gaps_and_repeats_nothing(
    calls: Calls, loaded: LoadedConfig, start: Callable[[], Recorder]
) -> None:
    """Four steps, the tracker had two of them; the commit is behind step 3."""
    recorder = start()
    tracking = Tracking(loaded, recorder)
    for step in (1, 2):
        recorder.step({"step": step})
    await tracking.close("failed")
    for step in (3, 4):
        Recorder(recorder.run, SilentProgress(), FakeClock()).step({"step": step})

    recorder = start()
    lines = recorder.run.path / RecordFile.METRICS
    lines.write_bytes(b"".join(lines.read_bytes().splitlines(keepends=True)[:3]))
    tracking = Tracking(loaded, recorder)
    recorder.event(Event.RESUMED, step=3)
    recorder.step({"step": 4})
    await tracking.close("finished")
    inits = [record for name, record in calls if name == "init"]
    assert steps(calls) == [1, 2, 3, 4]
    assert inits[0]["id"] == inits[1]["id"]


async def test_a_step_that_is_done_again_is_not_sent_again(
    calls: Calls, loaded: LoadedConfig, start: Callable[[], Recorder]
) -> None:
    recorder = start()
    tracking = Tracking(loaded, recorder)
    for step in (1, 2, 3):
        recorder.step({"step": step})
    await tracking.close("failed")
    recorder = start()
    (recorder.run.path / RecordFile.METRICS).write_bytes(b"")
    tracking = Tracking(loaded, recorder)
    recorder.event(Event.RESUMED, step=0)
    for step in (1, 2, 3, 4):
        recorder.step({"step": step})
        recorder.event(Event.ALARM, what="w", step=step)
    await tracking.close("finished")
    assert steps(calls) == [1, 2, 3, 4]
    assert [record[0] for name, record in calls if name == "alert"] == ["alarm in step 4"]


async def test_a_tracker_that_fails_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, loaded: LoadedConfig, start: Callable[[], Recorder]
) -> None:
    calls: Calls = []
    install(monkeypatch, wandb=fake_wandb(calls, fails_at=2))
    recorder = start()
    tracking = Tracking(loaded, recorder)
    for step in range(1, 6):
        recorder.step({"step": step})
    await tracking.close("finished")
    assert steps(calls) == [1]
    [failure] = failures(recorder)
    assert failure["tracker"] == "0-wandb"
    assert failure["reason"] == "LookupError: lost"


async def test_one_that_fails_leaves_the_others_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, start: Callable[[], Recorder]
) -> None:
    calls: Calls = []
    install(monkeypatch, wandb=fake_wandb(calls), trackio=fake_module("trackio"))
    recorder = start()
    tracking = Tracking(recipe(tmp_path, "[{kind: trackio}, {kind: wandb}]"), recorder)
    recorder.step({"step": 1})
    await tracking.close("stopped")
    assert [failure["tracker"] for failure in failures(recorder)] == ["0-trackio"]
    assert (steps(calls), calls[-1]) == ([1], ("finish", 0))


class TestBeforeTheRun:
    def test_what_is_not_installed_is_named(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        for name in ("wandb", "alembic"):
            monkeypatch.setitem(sys.modules, name, None)
        with pytest.raises(MissingDependencyError, match=r"pip install '\.\[tracking"):
            require_trackers(recipe(tmp_path, "[{kind: wandb}]").config)
        with pytest.raises(MissingDependencyError, match="alembic"):
            require_trackers(recipe(tmp_path, "[{kind: mlflow, uri: 'sqlite:///x.db'}]").config)
        require_trackers(recipe(tmp_path, "[]").config)

    def test_a_folder_of_data_is_no_package(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """wandb makes a folder of its name, and ours may be the one that Python searches first."""
        modules = sys.modules
        for name in [name for name in modules if name.partition(".")[0] == "trackio"]:
            monkeypatch.delitem(modules, name)
        (tmp_path / "trackio").mkdir()
        monkeypatch.setattr("sys.path", [str(tmp_path)])
        with pytest.raises(MissingDependencyError, match="lacks trackio"):
            require_trackers(recipe(tmp_path, "[{kind: trackio}]").config)

    def test_no_run_directory_is_made(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setitem(sys.modules, "wandb", None)
        source = Path(__file__).parents[2] / "fixtures" / "tiny_lab.yaml"
        loaded = load_config(source, ["tracking=[{kind: wandb}]"])
        with pytest.raises(MissingDependencyError):
            launch.train(loaded, run_dir=tmp_path / "run", progress=SilentProgress())
        assert not (tmp_path / "run").exists()


async def test_the_state_holds_an_id_and_a_step(
    calls: Calls, loaded: LoadedConfig, start: Callable[[], Recorder]
) -> None:
    recorder = start()
    await Tracking(loaded, recorder).close("finished")
    state = json.loads((recorder.run.path / "tracking" / "0-wandb.json").read_text())
    assert state == {"id": calls[0][1]["id"], "sent_step": 0}
