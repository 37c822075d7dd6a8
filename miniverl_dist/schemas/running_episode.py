"""What is known of an episode while it runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from miniverl_dist.schemas.messages import Message
from miniverl_dist.schemas.trajectory import Span


class TokenRecord(Protocol):
    """What a trajectory and a running episode share: enough to show either to a teacher."""

    @property
    def trajectory_id(self) -> str:
        """Unique within a run."""

    @property
    def task_id(self) -> str:
        """Whose tools were shown."""

    @property
    def tokenizer_fingerprint(self) -> str:
        """Whose ids these are."""

    @property
    def token_ids(self) -> Sequence[int]:
        """[T]."""

    @property
    def spans(self) -> Sequence[Span]:
        """They tile the tokens."""

    @property
    def messages(self) -> Sequence[Message]:
        """What the spans render."""


@dataclass(frozen=True)
class RunningEpisode:
    """An episode up to where the policy writes next; its trajectory will begin with all of it.

    The last span ends with the opening of that turn. So what stands between two model-written spans
    is there as a whole, and will not grow.
    """

    trajectory_id: str
    group_id: str
    task_id: str
    tokenizer_fingerprint: str
    token_ids: tuple[int, ...]
    spans: tuple[Span, ...]
    messages: tuple[Message, ...]
