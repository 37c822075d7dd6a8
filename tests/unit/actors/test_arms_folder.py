"""A benchmark's folder: whose it is, who writes it, and what damage costs."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from actors.arms import BENCHMARK_FILE, PLAN_FILE, Benchmark
from actors.arms_notes import last_error
from miniverl_dist.config.arms import load_benchmark
from miniverl_dist.errors import ConfigError, MiniverlError
from miniverl_dist.observability.run_dir import locked
from tests.support.sample_run import RECIPE, write_run

PLAN = """\
kind: benchmark
name: two
base: base.yaml
seeds: [3]
reference: a
arms: {a: {}, b: {overrides: {optim: {lr: 1.0e-3}}}}
"""
LOCKED_S = 0.6


class Recorded(Benchmark):
    """Starts no process: each run ends with status 2 after half a CPU second."""

    started: list[str]

    def _execute(self, command: Sequence[str], log: Path) -> tuple[int, float]:
        self.started = [*getattr(self, "started", []), log.stem]
        return 2, 0.5


def made(folder: Path, output: Path, told: list[str] | None = None, text: str = PLAN) -> Recorded:
    folder.mkdir(exist_ok=True)
    (folder / "base.yaml").write_text(RECIPE)
    (folder / "plan.yaml").write_text(text)
    lines: list[str] = [] if told is None else told
    return Recorded(load_benchmark(folder / "plan.yaml"), output, lines.append)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """Both runs were tried and failed."""
    output = tmp_path / "out"
    assert {o.status for o in made(tmp_path, output).run().outcomes} == {"failed"}
    return output


def test_nothing_was_run_yet(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing of this benchmark.*leave --report-only out"):
        made(tmp_path, tmp_path / "out").report_only()
    assert not (tmp_path / "out").exists()


def test_the_report_of_another_plan_is_not_overwritten(output: Path, tmp_path: Path) -> None:
    before = (output / BENCHMARK_FILE).read_bytes()
    other = made(tmp_path, output, text=PLAN.replace("1.0e-3", "1.0e-1"))
    for act in (other.report_only, other.run):
        with pytest.raises(ConfigError, match="belongs to plan"):
            act()
    assert (output / BENCHMARK_FILE).read_bytes() == before


def test_a_run_directory_or_a_file_is_no_folder_for_it(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    with pytest.raises(ConfigError, match="is a run directory: choose another --output"):
        made(tmp_path, run).run()
    assert not (run / PLAN_FILE).exists()
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(ConfigError, match=r"cannot write .*file"):
        made(tmp_path, file).run()


def test_two_at_once_do_not_share_a_folder(output: Path, tmp_path: Path) -> None:
    second = made(tmp_path, output)
    with (
        locked(output, "benchmark"),
        pytest.raises(ConfigError, match=r"benchmark .* is being written by another process"),
    ):
        second.run()
    assert not hasattr(second, "started")


def test_a_process_that_was_left_alone_is_waited_for(output: Path, tmp_path: Path) -> None:
    told: list[str] = []
    again, run = made(tmp_path, output, told), output / "runs" / "a-seed-3"
    run.mkdir()
    held = threading.Event()
    started_early: list[str] = []

    def hold() -> None:
        with locked(run, "run directory"):
            held.set()
            ends_at = time.monotonic() + 60
            while not told and time.monotonic() < ends_at:
                time.sleep(0.01)
            time.sleep(LOCKED_S)
            started_early.extend(getattr(again, "started", []))

    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(10)
    again.run()
    thread.join()
    assert "a-seed-3" not in started_early
    assert told[0] == "a-seed-3: still being written by a former start, waiting for it"
    assert again.started == ["a-seed-3", "b-seed-3"]


def test_cpu_time_that_nobody_counted_is_said_to_be_unknown(output: Path, tmp_path: Path) -> None:
    note = output / "runs" / "a-seed-3.json"
    assert json.loads(note.read_text())["cpu_seconds"] == 0.5
    note.write_text(json.dumps(json.loads(note.read_text()) | {"is_open": True}))  # killed then
    again = made(tmp_path, output)
    known = {o.run.arm: (o.cpu_seconds, o.is_cpu_known) for o in again.run().outcomes}
    assert known == {"a": (1.0, False), "b": (1.0, True)}


def test_notes_of_earlier_versions_are_read(output: Path, tmp_path: Path) -> None:
    (output / "runs" / "a-seed-3.json").write_text('{"cpu_seconds": 7.5, "exit_status": 1}')
    found = made(tmp_path, output).report_only().outcomes[0]
    assert (found.cpu_seconds, found.is_cpu_known, found.status) == (7.5, True, "failed")


@pytest.mark.parametrize("damage", ["", "[]", '{"cpu', '{"cpu": 1}'])
def test_a_damaged_note_costs_its_own_run(damage: str, output: Path, tmp_path: Path) -> None:
    (output / "runs" / "a-seed-3.json").write_text(damage)
    first, second = made(tmp_path, output).report_only().outcomes
    assert (first.status, second.status) == ("failed", "failed")
    assert "a-seed-3.json is damaged" in first.reason
    assert "exit status 2" in second.reason


def test_a_damaged_manifest_costs_its_own_run(output: Path, tmp_path: Path) -> None:
    run = output / "runs" / "a-seed-3"
    run.mkdir()
    (run / "manifest.json").write_text('{"status": "fin')
    first, second = made(tmp_path, output).report_only().outcomes
    assert "manifest.json" in first.reason
    assert "exit status 2" in second.reason


@pytest.mark.parametrize("damage", ["", "{", "[1]"])
def test_a_damaged_plan_is_one_clear_error(damage: str, output: Path, tmp_path: Path) -> None:
    (output / PLAN_FILE).write_text(damage)
    with pytest.raises(MiniverlError, match=r"plan.json is damaged"):
        made(tmp_path, output).run()


def test_the_reason_of_a_failure_is_its_error_and_no_line_of_progress(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"step": 1}\nerror: no such task\n{"step": 2}\n\n')
    assert last_error(log) == "error: no such task"
    log.write_text("Traceback\nKilled\n")
    assert last_error(log) == "Killed"
    assert last_error(tmp_path / "none") == ""


@pytest.mark.parametrize(
    ("arms", "why"),
    [
        ("{a: {}, cold-start: {}}", "arms.cold-start: this name"),
        ("{a: {}, b: {overrides: {seed: 5}}}", "arms.b.overrides: found seed"),
        ("{a: {}, b: {overrides: {name: mine}}}", "arms.b.overrides: found name"),
        (
            "{a: {}, b: {overrides: {student: {warm_start: runs/x}}}}\ncold_start: {}",
            "arms.b.overrides: found student.warm_start",
        ),
    ],
)
def test_an_arm_does_not_decide_what_the_plan_decides(arms: str, why: str, tmp_path: Path) -> None:
    text = PLAN.partition("arms:")[0] + f"arms: {arms}\n"
    with pytest.raises(ConfigError, match=why):
        made(tmp_path, tmp_path / "out", text=text)


def test_without_a_cold_start_an_arm_may_start_from_weights(tmp_path: Path) -> None:
    arms = "{a: {}, b: {overrides: {student: {warm_start: runs/x}}}}"
    made(tmp_path, tmp_path / "out", text=PLAN.partition("arms:")[0] + f"arms: {arms}\n")
