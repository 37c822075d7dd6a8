"""Hypothesis profiles, workers by file, and the Ray cluster that tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

import pytest
from hypothesis import settings

from tests.support.ray_head import WORKER_NICENESS

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")

# Ray's workers give way to everything else (niceness 15), so that a busy machine, or the other
# half of these tests, starves them until a deadline passes.
os.environ[WORKER_NICENESS] = "0"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Spread tests over workers by file; those that share Ray, or start ranks, share a worker.

    Not by xdist's own groups: it writes them into node ids, which pytest 9.2 no longer reads.
    """
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            path = PurePosixPath(nodeid.partition("::")[0])
            shared = path.parent.name in ("ray", "megatron")
            return path.parent.name if shared else str(path)

    return ByFile(config, log)


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[str]:
    """Address of one Ray cluster of two nodes for all tests that can share it; connected to it."""
    from tests.support.two_nodes import two_nodes

    with two_nodes() as address:
        yield address
