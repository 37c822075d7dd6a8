"""One rank of the student, alone in its process. A plain class: Ray makes an actor of it."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import TYPE_CHECKING

from actors.builds import build_student, set_num_threads
from actors.outbox import GroupAddress, WeightOutbox
from actors.student_side import student_tokenizer
from miniverl_dist.backends.base import StudentBackend
from miniverl_dist.backends.rank_address import RankAddress, listen
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import StudentLostError
from miniverl_dist.schemas.batch import FloatArray, SftBatch, TrainBatch, UpdateResult
from rollout_server.inbox import BucketMessage

if TYPE_CHECKING:
    from actors.broadcast_group import BroadcastSender

PUBLISH_FOLDER = "publish"


class StudentRank:
    """Holds a backend and answers the pool; every rank is asked the same at the same time.

    Args:
        config: Of the run.
        run_dir: On storage that all nodes share.
        rank: 0 .. world_size - 1.
        world_size: Ranks of the student.
        host: Of this rank's machine, as the others can reach it.
    """

    def __init__(
        self, config: RunConfig, run_dir: Path, rank: int, world_size: int, host: str
    ) -> None:
        self._config, self._run_dir, self._host = config, run_dir, host
        self._rank, self._world_size = rank, world_size
        self._listener: socket.socket | None = None
        self._backend: StudentBackend | None = None
        self._outbox: WeightOutbox | None = None
        self._sender: BroadcastSender | None = None

    def listen(self) -> tuple[str, int]:
        """Host and port for the ranks to meet at; held until `start`."""
        self._listener = listen(self._host)
        return self._host, self._listener.getsockname()[1]

    def start(self, master_addr: str, master_port: int) -> None:
        """Join the other ranks and build this rank's share; returns when all have come."""
        set_num_threads(self._config)
        self._backend = build_student(
            self._config,
            student_tokenizer(self._config, self._run_dir),
            self._run_dir,
            RankAddress(self._rank, self._world_size, master_addr, master_port, self._listener),
        )
        if self._config.publish.transport == "broadcast" and self._backend.sends_weights:
            from actors.broadcast_group import BroadcastSender, wire_of

            self._sender = BroadcastSender(self._rank, self._host, wire_of(self._config))
        self._outbox = WeightOutbox(
            self._backend,
            self._config.publish,
            rank=self._rank,
            directory=self._run_dir / PUBLISH_FOLDER,
            broadcast=None if self._sender is None else self._sender.group,
        )

    @property
    def backend(self) -> StudentBackend:
        """What this rank computes with."""
        if self._backend is None:
            raise StudentLostError(f"rank {self._rank} was asked before it was started")
        return self._backend

    @property
    def outbox(self) -> WeightOutbox:
        """What this rank publishes through."""
        if self._outbox is None:
            raise StudentLostError(f"rank {self._rank} was asked before it was started")
        return self._outbox

    def update(self, batch: TrainBatch) -> UpdateResult:
        """See `ports.StudentPool`."""
        return self.backend.update(batch)

    def accumulate(self, batch: TrainBatch, place: int) -> None:
        """See `ports.StudentPool`."""
        self.backend.accumulate(batch, place)

    def commit_accumulated(self) -> UpdateResult:
        """See `ports.StudentPool`."""
        return self.backend.commit_accumulated()

    def discard_accumulated(self) -> None:
        """See `ports.StudentPool`."""
        self.backend.discard_accumulated()

    def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        """See `ports.StudentPool`."""
        return self.backend.sft_update(batch, learning_rate)

    def finish_warmup(self) -> None:
        """See `ports.StudentPool`."""
        self.backend.finish_warmup()

    def logprobs(self, batch: TrainBatch) -> FloatArray:
        """See `ports.StudentPool`."""
        return self.backend.logprobs(batch)

    def save(self, directory: Path) -> None:
        """See `ports.StudentPool`."""
        self.backend.save(directory)

    def load(self, directory: Path, policy_version: int) -> None:
        """See `ports.StudentPool`."""
        self.backend.load(directory, policy_version)

    def open_publish(self, policy_version: int) -> int:
        """See `WeightOutbox.open`."""
        return self.outbox.open(policy_version)

    def next_bucket(self) -> BucketMessage | None:
        """See `WeightOutbox.next`."""
        return self.outbox.next()

    def close_publish(self) -> dict[str, str]:
        """See `WeightOutbox.close`."""
        return self.outbox.close()

    def broadcast_endpoint(self) -> tuple[str, int] | None:
        """Where this rank's broadcast group meets; None where it sends nothing."""
        return None if self._sender is None else self._sender.endpoint

    def connect_broadcast(self, address: GroupAddress) -> None:
        """See `BroadcastSender.connect`."""
        if self._sender is not None:
            self._sender.connect(address)
