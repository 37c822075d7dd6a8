"""A Ray head of a test's own: job server included, own ports, temp folder and process group."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.ports import free_ports

OBJECT_STORE_BYTES = 100 * 1024 * 1024
START = (sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block")
SMALL = ("--num-gpus", "0", "--object-store-memory", str(OBJECT_STORE_BYTES))
SMALL += ("--min-worker-port", "0", "--max-worker-port", "0")
"""Options of a node that shares a machine with others."""
READY_WITHIN_S = 180.0
TRIES = 2
"""Ray gives up on a raylet that needs more than 30 s, which no option of its own changes."""
WORKER_NICENESS = "RAY_worker_niceness"
"""Set for every Ray of these tests (``tests/conftest.py``)."""


@dataclass(frozen=True)
class RayHead:
    """A running head."""

    url: str
    """Of its job server."""
    gcs: str
    """``host:port`` that other nodes join."""
    temp: Path
    process: subprocess.Popen[bytes]

    def job(self, submission_id: str) -> dict[str, Any]:
        """What the job server knows about a job."""
        found: dict[str, Any] = json.loads(_get(f"{self.url}/api/jobs/{submission_id}"))
        return found

    def log(self, submission_id: str) -> str:
        """What the job's driver printed."""
        text: str = json.loads(_get(f"{self.url}/api/jobs/{submission_id}/logs"))["logs"]
        return text


def environment(**more: str) -> dict[str, str]:
    """This process's environment, other Ray settings of its own taken out, with ``more``."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("RAY_") or name == WORKER_NICENESS
    }
    return {**kept, "RAY_AUTH_MODE": "disabled", **more}


@contextmanager
def ray_head(
    *, num_cpus: int = 2, variables: Mapping[str, str] | None = None, starter: Sequence[str] = START
) -> Iterator[RayHead]:
    """Start a head and end it, with every process that came of it and nothing else.

    Args:
        num_cpus: CPUs that it offers.
        variables: Environment variables of the head.
        starter: Command that takes the options of ``ray start --head``.
    """
    head = _ready_head(num_cpus, variables or {}, starter)
    try:
        yield head
    finally:
        _remove(head)


def _ready_head(num_cpus: int, variables: Mapping[str, str], starter: Sequence[str]) -> RayHead:
    for tries_left in reversed(range(TRIES)):
        head = _started(num_cpus, variables, starter)
        try:
            _wait_until_ready(head)
        except BaseException as error:
            _remove(head)
            if not (isinstance(error, RuntimeError) and tries_left):
                raise
        else:
            return head
    raise AssertionError("the last try returns or raises")


def _started(num_cpus: int, variables: Mapping[str, str], starter: Sequence[str]) -> RayHead:
    temp = Path(tempfile.mkdtemp(prefix="rh", dir="/tmp"))  # short: socket paths are limited
    gcs, dashboard, agent, metrics = free_ports(4)
    url = f"http://127.0.0.1:{dashboard}"
    command = [
        *starter,
        *("--node-ip-address", "127.0.0.1", "--port", str(gcs)),
        *("--dashboard-host", "127.0.0.1", "--dashboard-port", str(dashboard)),
        *("--dashboard-agent-listen-port", str(agent)),
        *("--metrics-export-port", str(metrics)),
        *("--num-cpus", str(num_cpus), *SMALL),
        *("--temp-dir", str(temp / "ray"), "--disable-usage-stats"),
    ]
    with (temp / "log").open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=temp,
            env=environment(RAY_API_SERVER_ADDRESS=url, **variables),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return RayHead(url, f"127.0.0.1:{gcs}", temp, process)


def _remove(head: RayHead) -> None:
    end(head.process)
    shutil.rmtree(head.temp, ignore_errors=True)


def _wait_until_ready(head: RayHead) -> None:
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if head.process.poll() is not None:
            break
        with suppress(urllib.error.URLError, OSError):
            _get(f"{head.url}/api/jobs/")  # the job server itself, later than /api/version
            return
        time.sleep(0.05)
    raise RuntimeError(f"no Ray head:\n{(head.temp / 'log').read_text()}")


def _get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=30) as reply:
        body: bytes = reply.read()
        return body


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill a node's group and its descendants; on SIGTERM Ray would drain for half a minute."""
    descendants = _descendants(process.pid)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for pid in descendants:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _descendants(root: int) -> list[int]:
    """Workers and drivers have process groups of their own, so the group alone misses them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):
            # pid (name, which may hold blanks and brackets) state parent ...
            parents[int(entry.parent.name)] = int(entry.read_text().rpartition(")")[2].split()[1])
    found = {root}
    while new := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= new
    return sorted(found - {root})
