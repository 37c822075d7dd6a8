"""Which cluster is joined or started, and that only what was started here is ended.

Ray's own functions are replaced: runs on real clusters are in tests/ray.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from miniverl_dist.config.cluster import ClusterConfig
from miniverl_dist.errors import PlacementError, UpdateError
from tests.support.requirements import require_ray

require_ray()

from actors import ray_session as module  # noqa: E402 -- imports Ray
from actors.ray_session import JOB_MARK, cluster_address, ray_session  # noqa: E402

LOCAL = ClusterConfig(num_cpus=3)
JOINED = ClusterConfig(address="10.0.0.1:6379", num_cpus=3)


class FakeRay:
    """Ray's connection of this process."""

    def __init__(self) -> None:
        self.is_connected = False
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: Exception | None = None

    def is_initialized(self) -> bool:
        return self.is_connected

    def init(self, **options: Any) -> None:
        self.calls.append(("init", options))
        if self.error is not None:
            raise self.error
        self.is_connected = True

    def shutdown(self) -> None:
        self.calls.append(("shutdown", {}))
        self.is_connected = False

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


@pytest.fixture
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    ray = FakeRay()
    monkeypatch.setattr(module, "ray", ray)
    monkeypatch.setattr(module, "_require_answer", lambda address, deadline_s: None)
    monkeypatch.delenv(JOB_MARK, raising=False)
    return ray


def test_a_local_cluster_is_started_for_this_run_alone(fake_ray: FakeRay) -> None:
    with ray_session(LOCAL):
        assert fake_ray.is_connected
        assert fake_ray.names == ["init"]
    [(_, options), (last, _)] = fake_ray.calls
    assert (options["address"], options["num_cpus"], options["include_dashboard"]) == (
        "local",
        3,
        False,
    )
    assert last == "shutdown"


def test_a_running_cluster_is_joined_with_the_resources_it_has(fake_ray: FakeRay) -> None:
    with ray_session(JOINED):
        pass
    assert fake_ray.names == ["init", "shutdown"]
    options = fake_ray.calls[0][1]
    assert options["address"] == "10.0.0.1:6379"
    assert "num_cpus" not in options  # Ray refuses it there


@pytest.mark.parametrize("config", [LOCAL, JOINED], ids=["local", "joined"])
def test_a_submitted_job_joins_the_cluster_that_runs_it(
    fake_ray: FakeRay, monkeypatch: pytest.MonkeyPatch, config: ClusterConfig
) -> None:
    assert cluster_address(config) == config.address
    monkeypatch.setenv(JOB_MARK, "{}")
    assert cluster_address(config) == "auto"
    with ray_session(config):
        pass
    assert fake_ray.calls[0][1]["address"] == "auto"
    assert "num_cpus" not in fake_ray.calls[0][1]


def fails() -> None:
    raise UpdateError("it went wrong")


@pytest.mark.parametrize("work", [lambda: None, fails], ids=["well", "badly"])
def test_an_existing_connection_is_used_and_left_alone(
    fake_ray: FakeRay, work: Callable[[], None]
) -> None:
    fake_ray.is_connected = True
    try:
        with ray_session(LOCAL):
            work()
    except UpdateError:
        assert work is fails
    assert fake_ray.is_connected
    assert fake_ray.calls == []


def test_what_was_started_ends_with_an_error_too(fake_ray: FakeRay) -> None:
    with pytest.raises(UpdateError), ray_session(LOCAL):
        fails()
    assert fake_ray.names == ["init", "shutdown"]


@pytest.mark.parametrize("kind", [ConnectionError, RuntimeError, ValueError, TimeoutError])
def test_no_cluster_is_one_clear_error(fake_ray: FakeRay, kind: type[Exception]) -> None:
    fake_ray.error = kind("no answer")
    expected = r"no Ray cluster at '10\.0\.0\.1:6379' \(cluster\.address\): no answer"
    with pytest.raises(PlacementError, match=expected), ray_session(JOINED):
        raise AssertionError("it must not begin")
    assert "shutdown" not in fake_ray.names


def test_an_error_of_the_work_is_not_taken_for_a_missing_cluster(fake_ray: FakeRay) -> None:
    with pytest.raises(ValueError, match="of the work"), ray_session(JOINED):
        raise ValueError("of the work")


@pytest.fixture
def unconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another test's connection in this process is not seen."""
    monkeypatch.setattr(module.ray, "is_initialized", lambda: False)


@pytest.mark.usefixtures("unconnected")
class TestSilentAddresses:
    """The real probe: what listens there speaks, or does not speak, for itself."""

    def test_a_port_that_accepts_and_stays_silent_fails_within_the_deadline(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"127.0.0.1:{silent.getsockname()[1]}"
            config = ClusterConfig(address=address, start_deadline_s=1.0)
            began = time.monotonic()
            expected = rf"no Ray cluster at '{address}'.*no answer within 1 s.*6379 by default"
            with pytest.raises(PlacementError, match=expected), ray_session(config):
                raise AssertionError("it must not begin")
        assert time.monotonic() - began < 30

    def test_an_address_without_a_port_is_refused_at_once(self) -> None:
        config = ClusterConfig(address="nowhere", start_deadline_s=60.0)
        with pytest.raises(PlacementError, match="nowhere"), ray_session(config):
            raise AssertionError("it must not begin")
