"""What a rollout engine offers: the ``/generate`` contract in process, and versioned weights."""

from __future__ import annotations

from typing import Protocol

from miniverl_dist.generate_api.wire import GenerateReply, GenerateRequest
from miniverl_dist.ports import WeightSnapshot


class Engine(Protocol):
    """One inference process or its in-process equivalent."""

    @property
    def name(self) -> str:
        """Unique within a run; receipts and events name the engine by it."""

    @property
    def weight_version(self) -> int:
        """Policy version of the weights it samples from; -1 before the first load."""

    async def start(self) -> None:
        """Be ready to take weights; where there is a server, it stands then.

        Raises:
            EngineError, DeadlineError: it does not.
        """

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        """Continue one prompt. Cancelling the call frees what the request held.

        Raises:
            GenerateApiError: the request itself is wrong; asking again would not help.
            EngineError: the engine failed, is closed, or holds no weights yet.
        """

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        """Let running requests finish, take the weights, let waiting requests go on.

        Returns:
            The checksum recomputed from what the engine now holds; the caller compares.

        Raises:
            PublishError: the weights do not fit; the engine still samples from the former ones.
        """

    async def close(self) -> None:
        """End running and waiting requests as ``abort`` and free everything; may be repeated."""
