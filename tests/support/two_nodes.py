"""A Ray cluster of two nodes on this machine, for the length of a block."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

CPUS_PER_NODE = 2
"""What each node claims to have; the machine may have fewer."""


@contextmanager
def two_nodes() -> Iterator[str]:
    """Start both raylets, connect this process, end what was started; yields the address."""
    import ray
    from ray.cluster_utils import Cluster

    # Unix sockets lie below: a longer path would not fit.
    temp = tempfile.mkdtemp(prefix="mvr-", dir="/tmp")
    (Path(temp) / "ray").mkdir()
    node = {"num_cpus": CPUS_PER_NODE, "object_store_memory": 150 * 2**20}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        patch.setenv("RAY_TMPDIR", temp)  # where Ray notes the address of the cluster started last
        cluster = Cluster(
            initialize_head=True,
            head_node_args=node | {"include_dashboard": False, "temp_dir": temp},
            shutdown_at_exit=True,
        )
        try:
            cluster.add_node(**node)
            ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()
            shutil.rmtree(temp, ignore_errors=True)
