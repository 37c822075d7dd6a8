"""Ray's workers do not give way to the rest of the tests."""

from __future__ import annotations

import os

from tests.support.ray_head import WORKER_NICENESS, environment
from tests.support.requirements import require_ray

require_ray()


def test_workers_have_the_priority_of_their_driver(shared_cluster: str) -> None:
    import ray

    del shared_cluster
    found = ray.get(ray.remote(lambda: os.nice(0)).options(num_cpus=0).remote())
    assert found == os.nice(0)


def test_a_ray_that_a_test_starts_is_told_so_too() -> None:
    assert environment()[WORKER_NICENESS] == os.environ[WORKER_NICENESS] == "0"
