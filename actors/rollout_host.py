"""One rollout engine and its episodes, alone in a process. A plain class: Ray makes an actor of it.

A whole episode is one call: environment, engine and transcript live here, so that neither turns
nor tokens cross processes.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from actors.builds import build_engine, set_num_threads
from actors.outbox import GroupAddress
from actors.sources import EpisodeKind, evaluation_player, training_player
from actors.student_side import student_side, student_tokenizer
from actors.teacher_scoring import prefix_scorer
from miniverl_dist.config.models import RunConfig
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.trajectory import Trajectory
from rollout_server.inbox import BucketMessage, WeightInbox
from teacher_server.prefix_scoring import ScoredPrefix

if TYPE_CHECKING:
    from actors.broadcast_group import BroadcastReceiver


class RolloutHost:
    """Plays training and evaluation episodes with one engine.

    Args:
        config: Of the run.
        run_dir: On storage that all nodes share.
        name: Of the engine, in receipts and events.
        host: Of this machine, as the student's ranks can reach it.
    """

    def __init__(self, config: RunConfig, run_dir: Path, name: str, host: str) -> None:
        set_num_threads(config)
        clock = SystemClock()
        tokenizer = student_tokenizer(config, run_dir)
        side = student_side(config, tokenizer)
        self._engine = build_engine(config, tokenizer, run_dir, name)
        self._prefixes = prefix_scorer(config, side, run_dir, clock)
        self._players = {
            "training": training_player(config, side, self._engine, clock, watcher=self._prefixes),
            "evaluation": evaluation_player(config, side, self._engine, clock),
        }
        self._receiver: BroadcastReceiver | None = None
        if config.publish.transport == "broadcast":
            from actors.broadcast_group import BroadcastReceiver, wire_of

            self._receiver = BroadcastReceiver(name, host, wire_of(config))
        receive = None if self._receiver is None else self._receiver.receive
        self._inbox = WeightInbox(self._engine, receive=receive)

    async def ready(self) -> None:
        """Answer once everything is built, and the engine's server stands."""
        await self._engine.start()

    async def play(
        self, kind: EpisodeKind, assignment: Assignment, member: int
    ) -> tuple[Trajectory, ScoredPrefix | None]:
        """One episode, from its first token to its verdict, and what was scored meanwhile."""
        played = await self._players[kind].rollout(assignment, member)
        if kind == "evaluation" or self._prefixes is None:
            return played, None
        return played, self._prefixes.take(played.trajectory_id)

    async def begin_weights(self, policy_version: int) -> None:
        """See `WeightInbox.begin`."""
        await self._inbox.begin(policy_version)

    async def add_weights(self, message: BucketMessage, payload: object) -> None:
        """See `WeightInbox.add`."""
        await self._inbox.add(message, payload)

    async def finish_weights(self, checksum: str) -> tuple[int, str]:
        """See `WeightInbox.finish`."""
        return await self._inbox.finish(checksum)

    async def connect_broadcast(self, address: GroupAddress) -> None:
        """See `BroadcastReceiver.connect`."""
        if self._receiver is not None:
            # Waits for the other members; bounded by the group's own timeout.
            await asyncio.to_thread(self._receiver.connect, address)
