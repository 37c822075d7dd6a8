"""The containers' entrypoint with real nodes: a SIGTERM stops the jobs first, then the node."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.ports import free_ports
from tests.support.ray_head import SMALL, RayHead, end, environment, ray_head
from tests.support.requirements import require_ray

require_ray()
pytestmark = pytest.mark.timeout(300)

ROOT = Path(__file__).resolve().parents[2]
NODE = ("sh", str(ROOT / "docker" / "node.sh"))
IN_IMAGE = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHON": sys.executable,
    "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
}
"""What the Dockerfiles set."""


def submit_slow_job(head: RayHead, folder: Path) -> Path:
    """A job that needs 4 s, one more than Ray's own limit, between SIGTERM and its last write."""
    driver, marker = folder / "driver", folder / "marker"
    driver.write_text(
        "#!/bin/sh\n"
        f"trap 'sleep 4; echo written >{marker}; exit 0' TERM\n"
        f"echo started >{marker}\n"
        "while :; do sleep 0.1; done\n"
    )
    driver.chmod(0o755)
    config = ROOT / "tests" / "fixtures" / "tiny_bfcl.yaml"
    options = ("--address", head.url, "--run-dir", folder / "run", "--python", driver, "--no-wait")
    subprocess.run(
        ["sh", ROOT / "scripts" / "submit.sh", config, *map(str, options)],
        env=environment(PYTHON=sys.executable),
        capture_output=True,
        check=True,
    )
    deadline = time.monotonic() + 120
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline, "the job did not start"
        time.sleep(0.05)
    return marker


def test_a_head_that_is_told_to_end_lets_its_jobs_commit(tmp_path: Path) -> None:
    with ray_head(num_cpus=1, variables=IN_IMAGE, starter=(*NODE, "head")) as head:
        marker = submit_slow_job(head, tmp_path)
        head.process.send_signal(signal.SIGTERM)
        assert head.process.wait(timeout=120) == 0
        assert marker.read_text() == "written\n"
        log = (head.temp / "log").read_text()
        assert not re.search(r"^error", log, re.MULTILINE), log


@pytest.mark.slow
def test_a_worker_that_is_told_to_end_lets_the_jobs_commit_too(tmp_path: Path) -> None:
    """Whichever node of a cluster is asked first, the ranks must outlive the driver's commit."""
    with ray_head(num_cpus=1) as head:
        agent, metrics = free_ports(2)
        ports = ("--node-ip-address", "127.0.0.1", "--dashboard-agent-listen-port", agent)
        ports += ("--metrics-export-port", metrics)
        variables = {**IN_IMAGE, "RAY_API_SERVER_ADDRESS": head.url}
        with (head.temp / "worker.log").open("wb") as log:
            worker = subprocess.Popen(
                [*NODE, "worker", head.gcs, "--num-cpus", "1", *SMALL, *map(str, ports)],
                env=environment(**variables),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            deadline = time.monotonic() + 120
            while "Ray runtime started" not in (head.temp / "worker.log").read_text():
                assert time.monotonic() < deadline, (head.temp / "worker.log").read_text()
                time.sleep(0.1)
            marker = submit_slow_job(head, tmp_path)
            worker.send_signal(signal.SIGTERM)
            assert worker.wait(timeout=120) == 0
            assert marker.read_text() == "written\n"
        finally:
            end(worker)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nobody",), "expected head, or worker"),
        (("worker",), "HOST:PORT"),
        ((), "head, or worker"),
    ],
)
def test_a_wrong_call_says_what_was_expected(arguments: tuple[str, ...], expected: str) -> None:
    result = subprocess.run([*NODE, *arguments], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert expected in result.stderr
