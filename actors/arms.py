"""Runs a benchmark: cold starts, then arms, each run in a process of its own with one thread.

    OUT/runs/<arm>-seed-<seed>/    run directories
    OUT/runs/<arm>-seed-<seed>.log what the run printed, all tries
    OUT/runs/<arm>-seed-<seed>.json CPU seconds of all tries, exit status of the last
    OUT/benchmark.json, benchmark.md

May be stopped and started again at any time: finished runs are kept, others go on from their last
commit. An arm that fails costs its own comparison only. No decision depends on a clock.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Final

from actors.arms_notes import Noted, last_error, read_record
from actors.arms_results import measure, measure_start
from miniverl_dist.config.arms import COLD_START, LoadedBenchmark, Overrides, override_texts
from miniverl_dist.errors import ConfigError, MiniverlError
from miniverl_dist.lab.arms import (
    BenchmarkReport,
    Measured,
    PlannedRun,
    RunOutcome,
    check_matched,
    planned,
    summarise,
)
from miniverl_dist.lab.arms_table import markdown
from miniverl_dist.observability.run_dir import (
    CHECKPOINTS,
    MANIFEST,
    RunDirectory,
    disk_errors,
    locked,
    write_atomic,
)

RUNS_FOLDER: Final = "runs"
BENCHMARK_FILE: Final = "benchmark.json"
TABLE_FILE: Final = "benchmark.md"
PLAN_FILE: Final = "plan.json"
POLL_S: Final = 0.2
STOP_GRACE_S: Final = 30.0
"""A run that is told to stop commits first."""
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1"}

Tell = Callable[[str], None]


class Benchmark:
    """One benchmark in its folder.

    Args:
        loaded: The plan.
        output: Folder of all runs; made if needed.
        tell: Takes one line per run that starts or ends.

    Raises:
        ConfigError: an arm's recipe is wrong, arms cannot be compared, or the folder belongs to
            another plan.
    """

    def __init__(self, loaded: LoadedBenchmark, output: Path, tell: Tell) -> None:
        self._loaded, self._config, self._tell = loaded, loaded.config, tell
        self._output, self._runs = output, output / RUNS_FOLDER
        cold = self._config.cold_start
        recipes = {arm: loaded.recipe(c.overrides) for arm, c in self._config.arms.items()}
        check_matched(self._config, {arm: recipe.config for arm, recipe in recipes.items()})
        if cold is not None:
            recipes[COLD_START] = loaded.recipe(cold.overrides)
        digests = {name: recipe.digest for name, recipe in sorted(recipes.items())}
        self._digest = sha256(json.dumps([loaded.digest, digests]).encode()).hexdigest()
        self._stop = threading.Event()
        self._writing = threading.Lock()

    def run(self) -> BenchmarkReport:
        """Run what has not finished yet; returns the report that was written."""
        self._make_folder()
        with locked(self._output, "benchmark"):
            self._claim()
            return self._run_all()

    def _run_all(self) -> BenchmarkReport:
        runs = list(planned(self._config))
        for stage in (
            [r for r in runs if r.arm == COLD_START],
            [r for r in runs if r.arm != COLD_START],
        ):
            with ThreadPoolExecutor(self._config.max_processes) as pool:
                list(pool.map(self._run_one, stage))
        return self.report()

    def request_stop(self) -> None:
        """End running processes in order and start no more. Safe in a signal handler."""
        self._stop.set()

    def report(self) -> BenchmarkReport:
        """Summarise and write what there is so far."""
        outcomes = [self._outcome(run) for run in planned(self._config)]
        report = summarise(self._config, self._digest, outcomes)
        with self._writing:
            write_atomic(
                self._output / BENCHMARK_FILE, (report.model_dump_json(indent=2) + "\n").encode()
            )
            write_atomic(self._output / TABLE_FILE, markdown(report).encode())
        return report

    def report_only(self) -> BenchmarkReport:
        """Summarise what there is of this plan, and run nothing.

        Raises:
            ConfigError: nothing of it has been run, or the folder is another plan's.
        """
        if not (self._output / PLAN_FILE).exists():
            raise ConfigError(
                f"{self._output}: nothing of this benchmark has been run there, expected "
                f"{PLAN_FILE}: leave --report-only out, or name the folder with --output"
            )
        self._check_owner()
        return self.report()

    def _make_folder(self) -> None:
        if (self._output / MANIFEST).exists():
            raise ConfigError(f"{self._output} is a run directory: choose another --output")
        with disk_errors(self._runs, ConfigError):
            self._runs.mkdir(parents=True, exist_ok=True)

    def _claim(self) -> None:
        """Make the folder this plan's own."""
        plan = self._output / PLAN_FILE
        if plan.exists():
            self._check_owner()
            return
        text = json.dumps({"name": self._config.name, "digest": self._digest})
        write_atomic(plan, text.encode())

    def _check_owner(self) -> None:
        found = read_record(self._output / PLAN_FILE).get("digest")
        if found != self._digest:
            raise ConfigError(
                f"{self._output} belongs to plan {str(found)[:12]}, this is "
                f"{self._digest[:12]} (plan, recipe or version differ): choose another "
                "--output, or finish that one"
            )

    def _run_one(self, run: PlannedRun) -> None:
        if not self._await_former(run) or self._is_finished(run):
            return
        cold = PlannedRun(arm=COLD_START, seed=run.seed)
        needs_start = self._config.cold_start is not None and run.arm != COLD_START
        if needs_start and not self._is_finished(cold):
            self._tell(f"{run.name}: left out, its cold start has not finished")
            return
        self._tell(f"{run.name}: started")
        self._open_note(run)
        status, cpu_seconds = self._execute(self._command(run), self._runs / f"{run.name}.log")
        self._note(run, cpu_seconds, status)
        word = "finished" if self._is_finished(run) else f"ended with status {status}"
        self._tell(f"{run.name}: {word}, {cpu_seconds:.0f} CPU s")
        self.report()

    def _await_former(self, run: PlannedRun) -> bool:
        """Wait for a process that a killed benchmark has left alone; False when told to stop."""
        folder, is_told = RunDirectory(self._runs / run.name, None), False
        # Waits for that process, which its own deadlines bound.
        while folder.is_being_written and not self._stop.is_set():
            if not is_told:
                self._tell(f"{run.name}: still being written by a former start, waiting for it")
                is_told = True
            self._stop.wait(POLL_S)
        return not self._stop.is_set()

    def _command(self, run: PlannedRun) -> list[str]:
        """Start the run, or continue it when a former try got far enough."""
        folder = self._runs / run.name
        command = [sys.executable, "-m", "actors.cli"]
        if (folder / MANIFEST).exists():
            return [*command, "resume", str(folder), "--json"]
        shutil.rmtree(folder, ignore_errors=True)  # killed before it was a run
        command += ["train", str(self._loaded.base), "--run-dir", str(folder), "--json"]
        for layer in self._layers(run):
            for text in override_texts(layer):
                command += ["--override", text]
        return command

    def _layers(self, run: PlannedRun) -> list[Overrides]:
        """What is laid over the base for one run, last wins."""
        own: Overrides = {"seed": run.seed, "name": f"{self._config.name}-{run.name}"}
        cold = self._config.cold_start
        if run.arm == COLD_START:
            return [*([cold.overrides] if cold else []), own]
        layers = [self._config.arms[run.arm].overrides, own]
        if cold is not None:
            start = self._runs / PlannedRun(arm=COLD_START, seed=run.seed).name
            weights = start / CHECKPOINTS / cold.checkpoint if cold.checkpoint else start
            layers.append({"student": {"warm_start": str(weights)}})
            if cold.share_teacher and self._has_fitted_teacher(layers):
                layers.append({"teacher": {"fitted": str(start)}})
        return layers

    def _has_fitted_teacher(self, layers: Iterable[Overrides]) -> bool:
        teacher = self._loaded.recipe(*layers).config.teacher
        return teacher is not None and teacher.fit is not None

    def _execute(self, command: Sequence[str], log: Path) -> tuple[int, float]:
        """Exit status and CPU seconds (user and system) of a process and its children."""
        with log.open("ab") as output:
            process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=os.environ | ONE_THREAD,
                start_new_session=True,  # an interrupt at the terminal reaches this process only
            )
        started, is_told = time.monotonic(), False
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                return os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime
            limit, waited = self._config.run_deadline_s, time.monotonic() - started
            if self._stop.is_set() and not is_told:
                is_told, started = True, time.monotonic()
                process.terminate()
            elif waited > (STOP_GRACE_S if is_told else limit or math.inf):
                os.killpg(process.pid, signal.SIGKILL)
            # Waits for the run, which its own deadlines and `run_deadline_s` bound.
            self._stop.wait(POLL_S) if not is_told else time.sleep(POLL_S)

    def _is_finished(self, run: PlannedRun) -> bool:
        return self._status(run) == "finished"

    def _status(self, run: PlannedRun) -> str | None:
        folder = self._runs / run.name
        if not (folder / MANIFEST).exists():
            return None
        return str(RunDirectory.open(folder).read_json(MANIFEST).get("status"))

    def _outcome(self, run: PlannedRun) -> RunOutcome:
        """What there is of a run; one that cannot be read costs itself only."""
        noted = Noted()
        try:
            noted = self._noted(run)
            status = self._status(run)
            if status == "finished":
                return noted.outcome(run, "finished", measured=self._measure(run))
        except MiniverlError as error:
            return noted.outcome(run, "failed", reason=str(error))
        if not noted.exit_status or status == "stopped":
            return noted.outcome(run, "not_run", reason=status or "")
        said = last_error(self._runs / f"{run.name}.log")
        return noted.outcome(run, "failed", reason=f"exit status {noted.exit_status}: {said}")

    def _measure(self, run: PlannedRun) -> Measured:
        folder, cold = self._runs / run.name, self._config.cold_start
        if run.arm == COLD_START and cold is not None:
            return measure_start(folder, cold.checkpoint)
        return measure(folder)

    def _noted(self, run: PlannedRun) -> Noted:
        path = self._runs / f"{run.name}.json"
        return Noted.read(path) if path.exists() else Noted()

    def _open_note(self, run: PlannedRun) -> None:
        """Say that a process is counted from now on; `_note` closes it."""
        former = self._noted(run)
        self._write_note(run, replace(former, is_open=True, is_cpu_known=former.counts_all))

    def _note(self, run: PlannedRun, cpu_seconds: float, exit_status: int) -> None:
        former = self._noted(run)
        total = former.cpu_seconds + cpu_seconds
        note = replace(former, cpu_seconds=total, exit_status=exit_status, is_open=False)
        self._write_note(run, note)

    def _write_note(self, run: PlannedRun, note: Noted) -> None:
        write_atomic(self._runs / f"{run.name}.json", json.dumps(asdict(note)).encode())


def run_benchmark(
    loaded: LoadedBenchmark, output: Path, tell: Tell, *, report_only: bool = False
) -> tuple[str, bool]:
    """Run a benchmark, or report what has finished of it.

    SIGTERM and SIGINT stop it in order.

    Returns:
        The report as Markdown, and whether every run has finished.
    """
    benchmark = Benchmark(loaded, output, tell)
    if report_only:
        report = benchmark.report_only()
    else:
        with _stopped_by_signals(benchmark.request_stop):
            report = benchmark.run()
    return markdown(report), all(o.status == "finished" for o in report.outcomes)


@contextmanager
def _stopped_by_signals(stop: Callable[[], None]) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    former = {number: signal.signal(number, lambda *_: stop()) for number in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
