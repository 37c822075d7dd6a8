"""Stopping early: a server that fails every request from the start will not pass an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from miniverl_dist.environments.base import Session
from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineLostError,
    GenerateApiError,
    RequestRejectedError,
    TokenizerError,
)
from rollout_server.policies import Moment, Policy, Turn


class EarlyStop:
    """Plays as another policy does, until it is clear that no request of it succeeds.

    Faults are of one kind when they are of the same class and HTTP status; their words may differ
    by an id or a length. One turn that is written settles it: later faults are single episodes'.

    Args:
        policy: Who plays.
        name: Of the policy, for the error.
        max_faults: Of one kind in a row, before any turn has been written.
    """

    def __init__(self, policy: Policy, name: str, *, max_faults: int = 8) -> None:
        self._policy, self._name, self._max_faults = policy, name, max_faults
        self._has_written = False
        self._kind: tuple[type[Exception], int] | None = None
        self._num_faults = 0

    async def act(self, prompt: Sequence[int], session: Session, moment: Moment) -> Turn:
        """Have the turn written; see `Policy.act`.

        Raises:
            ConfigError: enough faults in a row; what has been played stays.
        """
        try:
            turn = await self._policy.act(prompt, session, moment)  # bounded by that policy
        except EngineLostError:
            raise  # another engine plays it again
        except (EngineError, GenerateApiError, DeadlineError, TokenizerError) as error:
            self._count(error)
            raise
        self._has_written = True
        return turn

    def _count(self, error: Exception) -> None:
        if self._has_written:
            return
        kind = (type(error), error.status if isinstance(error, RequestRejectedError) else 0)
        self._num_faults = self._num_faults + 1 if kind == self._kind else 1
        self._kind = kind
        if self._num_faults >= self._max_faults:
            raise ConfigError(
                f"policy {self._name}: none of its requests has succeeded, and the last "
                f"{self._num_faults} failed in one way, so no more are made; the last: {error}"
            ) from error
