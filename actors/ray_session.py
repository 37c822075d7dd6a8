"""The connection to Ray: started or joined as the recipe says, ended only where it was started."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private import services  # public names can neither resolve an address nor bound a wait
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RayError

from miniverl_dist.config.cluster import ClusterConfig
from miniverl_dist.errors import PlacementError

JOB_MARK = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Set by Ray in the entry point of a submitted job."""

ANSWER_S = 30.0
"""For a running cluster to answer; ``cluster.start_deadline_s`` where that is shorter."""


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
        return
    address = cluster_address(config)
    _require_answer(address, min(config.start_deadline_s, ANSWER_S))
    ray.init(address=address, logging_level=logging.WARNING)


def _require_answer(address: str, deadline_s: float) -> None:
    """Raise unless a cluster answers: ``ray.init`` itself takes minutes to give up on silence."""
    resolved = services.canonicalize_bootstrap_address(address)
    if resolved is None:
        raise ConnectionError("no cluster runs on this machine")
    failed: list[Exception] = []

    def ask() -> None:
        try:
            GcsClient(address=resolved)
        except (RayError, RuntimeError, ValueError, OSError) as error:
            failed.append(error)

    asking = threading.Thread(target=ask, daemon=True, name="ray-probe")
    asking.start()
    asking.join(deadline_s)
    if failed:
        raise ConnectionError(str(failed[0])) from failed[0]
    if asking.is_alive():
        raise ConnectionError(
            f"no answer within {deadline_s:g} s; expected the head's own port, 6379 by default "
            "(not the dashboard's, 8265)"
        )


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
