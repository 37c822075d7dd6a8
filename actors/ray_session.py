"""The connection to Ray: started or joined as the recipe says, ended only where it was started."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from miniverl_dist.config.cluster import ClusterConfig
from miniverl_dist.errors import PlacementError

JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the entry point of a submitted job."""


@contextmanager
def ray_session(config: ClusterConfig) -> Iterator[None]:
    """Be connected for the length of the block.

    A connection that this process has already is used and left alone. A cluster that was joined
    goes on; one that was started here ends.

    Raises:
        PlacementError: there is no cluster at the address.
    """
    if ray.is_initialized():
        yield
        return
    try:
        with _signal_handlers_kept():
            _connect(config)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        raise PlacementError(
            f"no Ray cluster at {cluster_address(config)!r} (cluster.address): {error}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def _connect(config: ClusterConfig) -> None:
    if cluster_address(config) == "local":
        ray.init(
            address="local",
            num_cpus=config.num_cpus,
            include_dashboard=False,
            logging_level=logging.WARNING,
        )
    else:
        ray.init(address=cluster_address(config), logging_level=logging.WARNING)


@contextmanager
def _signal_handlers_kept() -> Iterator[None]:
    """Put SIGTERM back to what it did: ``ray.init`` makes it exit at once, without a commit."""
    if threading.current_thread() is not threading.main_thread():
        yield  # neither Ray nor we can set a handler here
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def cluster_address(config: ClusterConfig) -> str:
    """Where to connect: a submitted job uses the cluster that runs it."""
    return "auto" if JOB_MARK in os.environ else config.address
