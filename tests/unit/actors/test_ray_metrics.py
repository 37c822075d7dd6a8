"""Step records on a real node's Prometheus endpoint."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from actors.ray_metrics import COUNTERS, GAUGES, PHASES
from miniverl_dist.observability.metrics import METRICS
from tests.support.ray_head import environment
from tests.support.requirements import require_ray

ROOT = Path(__file__).resolve().parents[3]

FIRST = dict.fromkeys(GAUGES, 0.5) | dict.fromkeys(COUNTERS, 7.0)
FIRST |= {"step": 1, "seconds_step": 2.0, "loss_by_span_type": {"system": 1.0}}
FIRST |= dict.fromkeys(PHASES, 0.25)
SECOND = {
    "step": 2,
    "policy_version": 8,
    "policy_lag_mean": 1.5,
    "policy_lag_max": 2,
    "num_groups_waiting": 3,
    "reward_mean": -0.25,
    "reverse_kl_mean": math.nan,
    "pass_rate": None,
    "rollout_tokens": 5,
    "num_loss_tokens": 0,
    "seconds_step": 40.0,
    "seconds_update": 30.5,
}

CHILD = r"""
import json, re, sys, time, urllib.request
import ray
from actors.ray_metrics import RayMetrics
records, temp = json.loads(sys.argv[1]), sys.argv[2]
ray.init(
    address="local", include_dashboard=False, num_cpus=1, num_gpus=0, _temp_dir=temp,
    object_store_memory=100 * 1024 * 1024, log_to_driver=False,
    _system_config={"metrics_report_interval_ms": 500},
)
try:
    sink = RayMetrics("a run")
    for record in records:
        sink(record)
    port = ray.nodes()[0]["MetricsExportPort"]
    url = f"http://127.0.0.1:{port}/metrics"
    all_counted = re.compile(r"^ray_miniverl_steps_total.* 2.0$", re.MULTILINE)
    text, deadline = "", time.monotonic() + 60
    while not all_counted.search(text) and time.monotonic() < deadline:
        time.sleep(0.2)
        text = urllib.request.urlopen(url, timeout=10).read().decode()
    print(json.dumps(text))
finally:
    ray.shutdown()
"""


@pytest.fixture(scope="module")
def samples() -> dict[tuple[str, str, str], float]:
    """Value by name, run and phase (or bucket) on the endpoint, after two records."""
    require_ray()
    with tempfile.TemporaryDirectory(prefix="rm", dir="/tmp", ignore_cleanup_errors=True) as temp:
        result = subprocess.run(
            [sys.executable, "-c", CHILD, json.dumps([FIRST, SECOND]), temp],
            cwd=ROOT,
            env=environment(),
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    return parse(json.loads(result.stdout.splitlines()[-1]))


def parse(text: str) -> dict[tuple[str, str, str], float]:
    found = {}
    for name, tags, value in re.findall(r"^ray_miniverl_(\w+)\{(.*)\} (\S+)$", text, re.MULTILINE):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', tags))
        found[name, labels["run"], labels.get("phase") or labels.get("le", "")] = float(value)
    return found


def test_gauges_show_the_newest_record(samples: dict[tuple[str, str, str], float]) -> None:
    newest = {
        "step": 2,
        "policy_version": 8,
        "policy_lag_mean": 1.5,
        "policy_lag_max": 2,
        "groups_waiting": 3,
        "reward_mean": -0.25,
    }
    assert {name: samples[name, "a run", ""] for name in newest} == newest


def test_what_a_record_lacks_stays(samples: dict[tuple[str, str, str], float]) -> None:
    assert [samples[name, "a run", ""] for name in ("entropy_nats", "grad_norm")] == [0.5] * 2


def test_what_is_not_a_number_does_not_look_healthy(
    samples: dict[tuple[str, str, str], float],
) -> None:
    """Ray offers no sample of such a gauge, which is a gap in Prometheus."""
    for name in ("reverse_kl_nats", "pass_rate"):
        assert math.isnan(samples.get((name, "a run", ""), math.nan))


def test_counters_add_up(samples: dict[tuple[str, str, str], float]) -> None:
    totals = {"steps": 2, "rollout_tokens": 12, "loss_tokens": 7, "harness_faults": 7}
    assert {name: samples[f"{name}_total", "a run", ""] for name in totals} == totals


def test_times_are_counted_by_phase(samples: dict[tuple[str, str, str], float]) -> None:
    assert samples["phase_seconds_total", "a run", "update"] == 30.75
    assert samples["last_phase_seconds", "a run", "update"] == 30.5
    assert samples["last_step_seconds", "a run", ""] == 40
    phases = {phase for name, _, phase in samples if name == "phase_seconds_total"}
    assert phases == set(PHASES.values())


def test_step_times_fall_into_buckets(samples: dict[tuple[str, str, str], float]) -> None:
    bounds = ("1.0", "3.0", "30.0", "60.0", "+Inf")
    counts = [samples["step_seconds_bucket", "a run", bound] for bound in bounds]
    assert counts == [0, 1, 1, 2, 2]


def test_every_field_is_one_that_a_step_record_has() -> None:
    assert {*GAUGES, *COUNTERS, *PHASES} <= set(METRICS)
