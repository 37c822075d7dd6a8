"""`scripts/submit.sh` against a real Ray head: upload, run, failure, stop with a checkpoint."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from miniverl_dist import __version__
from miniverl_dist.config.load import load_config
from tests.support.ray_head import RayHead, environment, ray_head
from tests.support.requirements import require_ray

require_ray()
pytestmark = [pytest.mark.bfcl, pytest.mark.tokenizers, pytest.mark.timeout(600)]

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "tests/fixtures/tiny_bfcl.yaml"
LONG = ("loop.num_steps=80", "evaluation.before=false", "evaluation.after=false")
LONG += ("evaluation.every_n_steps=1000", "checkpoint.every_n_steps=1000")


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    with ray_head() as running:
        yield running


def submit(head: RayHead, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the script from a folder that is not the checkout."""
    return subprocess.run(
        ["sh", ROOT / "scripts" / "submit.sh", "--address", head.url, *map(str, arguments)],
        cwd=head.temp,
        env=environment(PYTHON=sys.executable),
        capture_output=True,
        text=True,
        check=False,
    )


def submission_id(result: subprocess.CompletedProcess[str]) -> str:
    found = re.search(r"^submission id: (\S+)$", result.stdout, re.MULTILINE)
    assert found, result.stdout + result.stderr
    return found[1]


def stop(head: RayHead, job: str) -> None:
    subprocess.run(
        [sys.executable, "-m", "ray.scripts.scripts", "job", "stop", job, "--address", head.url],
        env=environment(),
        capture_output=True,
        check=True,
    )


def records(run: Path, name: str) -> list[dict[str, Any]]:
    path = run / name
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.splitlines() if line.endswith("}")]


def wait_for(what: str, ready: Any, within_s: float = 120) -> None:
    deadline = time.monotonic() + within_s
    while not ready():
        assert time.monotonic() < deadline, f"no {what} within {within_s} s"
        time.sleep(0.05)


def train_options(run: Path) -> tuple[object, ...]:
    return (ROOT / CONFIG, "--run-dir", run, "--python", sys.executable)


def test_a_submitted_run_succeeds_and_a_second_one_into_its_folder_fails(
    head: RayHead, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    result = submit(head, *train_options(run), "--env", "MINIVERL_MARK=a b")
    assert result.returncode == 0, result.stdout + result.stderr
    job = submission_id(result)
    found = head.job(job)
    assert (found["status"], found["driver_exit_code"]) == ("SUCCEEDED", 0)
    assert found["runtime_env"]["env_vars"]["MINIVERL_MARK"] == "a b"
    metadata = found["metadata"]
    assert metadata["name"] == "tiny_bfcl"
    assert metadata["version"] == __version__
    assert metadata["config"] == CONFIG
    assert metadata["config_digest"] == load_config(ROOT / CONFIG).digest
    assert [line["step"] for line in records(run, "metrics.jsonl")] == [1, 2, 3]
    assert json.loads((run / "manifest.json").read_text())["status"] == "finished"
    assert "finished after step 3" in head.log(job)
    assert "finished after step 3" in result.stdout, "the log is followed"

    again = submit(head, *train_options(run))
    assert again.returncode == 1
    failed = submission_id(again)
    assert head.job(failed)["status"] == "FAILED"
    errors = [line for line in head.log(failed).splitlines() if "error" in line.lower()]
    assert len(errors) == 1
    assert errors[0].startswith("error: run directory ")
    assert "Traceback" not in head.log(failed)


def test_a_job_runs_on_the_uploaded_checkout_alone(head: RayHead, tmp_path: Path) -> None:
    """Its driver is a script that lists its working directory instead of training."""
    driver, listing = tmp_path / "driver", tmp_path / "listing"
    driver.write_text(f'#!/bin/sh\nfind . -type f >{listing}\necho "$PWD $*"\n')
    driver.chmod(0o755)
    result = submit(head, ROOT / CONFIG, "--run-dir", tmp_path / "run", "--python", driver)
    assert result.returncode == 0, result.stdout + result.stderr
    found = set(listing.read_text().split())
    assert {"./actors/launch.py", "./pyproject.toml", f"./{CONFIG}"} <= found
    assert not [path for path in found if "/." in path[1:] or "__pycache__" in path]
    # Ray's own line about the entrypoint may stand behind those of a driver as quick as this one.
    log = head.log(submission_id(result))
    written = [line for line in log.splitlines() if line.startswith("/")]
    assert len(written) == 1, log
    where, *arguments = written[0].split()
    assert Path(where) != ROOT
    assert Path(where).is_relative_to(head.temp)
    assert arguments == ["-m", "actors.launch", "train", CONFIG, "--run-dir", f"{tmp_path}/run"]


def test_a_stop_waits_longer_for_the_driver_than_ray_would(head: RayHead, tmp_path: Path) -> None:
    """Ray's own limit is 3 s; a driver that needs 5 to write its checkpoint must get them."""
    driver, marker = tmp_path / "driver", tmp_path / "marker"
    driver.write_text(
        "#!/bin/sh\n"
        f"trap 'sleep 5; echo written >{marker}; exit 0' TERM\n"
        f"echo started >{marker}\n"
        "while :; do sleep 0.1; done\n"
    )
    driver.chmod(0o755)
    options = (ROOT / CONFIG, "--run-dir", tmp_path / "run", "--python", driver, "--no-wait")
    patient = submission_id(submit(head, *options))
    wait_for("start of the driver", marker.exists)
    stop(head, patient)
    assert head.job(patient)["status"] == "STOPPED"
    assert marker.read_text() == "written\n"

    marker.unlink()
    driver.write_text(driver.read_text().replace("sleep 5", "sleep 60"))
    hasty = submission_id(submit(head, *options, "--stop-wait", 1))
    wait_for("start of the driver", lambda: marker.exists() and marker.read_text())
    stop(head, hasty)
    assert marker.read_text() == "started\n", "--stop-wait reaches Ray"


def test_a_stopped_run_commits_and_is_resumed_by_another_job(head: RayHead, tmp_path: Path) -> None:
    run = tmp_path / "run"
    overrides = [word for override in LONG for word in ("-o", override)]
    started = submit(head, *train_options(run), "--no-wait", "--", *overrides)
    assert started.returncode == 0, started.stdout + started.stderr
    job = submission_id(started)
    wait_for("trained step", lambda: records(run, "metrics.jsonl"))
    stop(head, job)
    assert head.job(job)["status"] == "STOPPED"
    events = [event["event"] for event in records(run, "events.jsonl")]
    assert events[-1] == "stopped"
    assert events.count("stop_requested") == 1
    steps = [line["step"] for line in records(run, "metrics.jsonl")]
    assert 1 <= steps[-1] < 80, "stopped too late to show anything"
    assert (run / "checkpoints" / f"step-{steps[-1]:06d}" / "checkpoint.json").exists()
    assert json.loads((run / "manifest.json").read_text())["status"] == "stopped"

    resumed = submit(head, "--resume", run, "--python", sys.executable)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert head.job(submission_id(resumed))["metadata"]["resumes"] == "true"
    assert [line["step"] for line in records(run, "metrics.jsonl")] == list(range(1, 81))
    assert json.loads((run / "manifest.json").read_text())["status"] == "finished"


@pytest.mark.slow
def test_nothing_of_a_head_is_left_when_it_ends(tmp_path: Path) -> None:
    with ray_head(num_cpus=1) as head:
        folder = head.temp
        marker = tmp_path / "pid"
        driver = tmp_path / "driver"
        driver.write_text(f"#!/bin/sh\necho $$ >{marker}\nexec sleep 600\n")
        driver.chmod(0o755)
        submit(head, ROOT / CONFIG, "--run-dir", tmp_path / "run", "--python", driver, "--no-wait")
        wait_for("driver", lambda: marker.exists() and marker.read_text().strip())
        pid = int(marker.read_text())
    assert not folder.exists()
    wait_for("end of the driver", lambda: not Path(f"/proc/{pid}").exists(), within_s=10)
    running = [
        path
        for path in Path("/proc").glob("[0-9]*/cmdline")
        if os.fsencode(folder) in _content(path)
    ]
    assert running == []


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""
