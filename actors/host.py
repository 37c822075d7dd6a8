"""``runtime: single_actor``: a whole run in one Ray actor, the driver only waits and relays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import ray

from actors.placement import PlacedGroups, Role, place
from actors.ray_calls import remote
from actors.ray_session import cluster_address, ray_session
from actors.running import Running
from actors.supervisor import started_within
from miniverl_dist.config.load import LoadedConfig
from miniverl_dist.errors import MiniverlError, PlacementError
from miniverl_dist.observability.progress import LineProgress, Progress
from miniverl_dist.observability.run_dir import RunDirectory
from miniverl_dist.training.loop import RunSummary


class RunHost:
    """A run in a process of its own. A plain class: Ray makes an actor of it."""

    def __init__(self) -> None:
        self._running: Running | None = None
        self._is_stopped = False

    async def ready(self) -> None:
        """Answer once the process stands."""

    async def train(
        self, config: LoadedConfig, run_dir: Path, resume_from: Path | None
    ) -> RunSummary:
        """See `Running.train`; the directory stands already, and nobody else has it open."""
        with RunDirectory.open(run_dir, writable=True) as run:
            self._running = Running(config, run, LineProgress(sys.stderr))
            if self._is_stopped:
                self._running.request_stop()
            return await self._running.train(resume_from)

    async def request_stop(self) -> None:
        """See `Running.request_stop`."""
        self._is_stopped = True
        if self._running is not None:
            self._running.request_stop()


class HostedRun:
    """A run in an actor, seen from the driver."""

    def __init__(
        self, config: LoadedConfig, run_dir: Path, progress: Progress, resume_from: Path | None
    ) -> None:
        self._config, self._run_dir, self._progress = config, run_dir.resolve(), progress
        self._resume_from = resume_from.resolve() if resume_from is not None else None
        self._host: Any = None
        self._is_stopped = False

    def request_stop(self) -> None:
        """Ask the actor to end in order; safe in a signal handler, and before there is one."""
        self._is_stopped = True
        if self._host is not None:
            self._host.request_stop.remote()

    async def run(self) -> RunSummary:
        """Start the actor and wait for its run, which is bounded by its own deadlines.

        Raises:
            PlacementError: the cluster cannot hold the actor, or did not start it in time.
            MiniverlError: what ended the run there, or the actor's death.
        """
        config = self._config.config
        is_local = cluster_address(config.cluster) == "local"
        try:
            with ray_session(config.cluster):
                self._progress.phase("waiting for the cluster's nodes and resources")
                async with await place(config, config.name, may_grow=not is_local) as placed:
                    return await self._run(placed)
        finally:
            self._progress.close()

    async def _run(self, placed: PlacedGroups) -> RunSummary:
        self._host = ray.remote(RunHost).options(**placed.options(Role.STUDENT, 0)).remote()
        try:
            ready = remote(self._host.ready.remote(), "the run's actor", PlacementError)
            deadline_s = self._config.config.cluster.start_deadline_s
            await started_within(ready, "the run's actor", deadline_s, PlacementError)
            self._progress.phase("training in one Ray actor")
            if self._is_stopped:
                self.request_stop()
            work = self._host.train.remote(self._config, self._run_dir, self._resume_from)
            summary: RunSummary = await remote(
                work, f"the run's actor (`miniverl-dist resume {self._run_dir}`)", MiniverlError
            )
            return summary
        finally:
            ray.kill(self._host)
