"""Hypothesis profiles, workers by file, and the Ray cluster that tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

settings.register_profile("dev", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "dev")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Spread tests over workers by file; those that share Ray, or start ranks, share a worker."""
    for item in items:
        folder = item.path.parent.name
        group = folder if folder in ("ray", "megatron") else item.path.name
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[str]:
    """Address of one Ray cluster of two nodes for all tests that can share it; connected to it."""
    from tests.support.two_nodes import two_nodes

    with two_nodes() as address:
        yield address
