"""One Ray cluster for all tests of a session that can share it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.two_nodes import two_nodes


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[str]:
    """Address of a cluster of two nodes; this process is connected to it."""
    with two_nodes() as address:
        yield address
