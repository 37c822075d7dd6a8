"""The protocol of a tool-calling environment: tasks, and one private session per episode."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from miniverl_dist.schemas.messages import (
    CallError,
    FrozenModel,
    Message,
    ParsedCall,
    ToolCall,
    ToolSchema,
)


class TaskInfo(FrozenModel):
    """What the curriculum and the splits need to know about a task."""

    task_id: str
    num_calls: int
    """N, the number of expert calls."""
    num_turns: int
    classes: tuple[str, ...]
    """Names of the classes (tool families) involved, sorted."""
    category: str = ""
    """Part of the data that the task is from; empty where there is only one."""
    family: str = ""
    """Tasks of one family are variants of each other: a split never divides them. Empty: alone."""
    extra_turns: int = 0
    """Assistant turns that an episode needs beyond those of its calls: one per user turn in which
    nothing can be called."""


class Observation(FrozenModel):
    """What one call gave back: the text that the model reads, and whether it worked."""

    content: str
    is_error: bool
    error: CallError | None = None
    """What kind of error; None without one, for a call that could not be read, and where the
    environment does not tell."""


class Outcome(FrozenModel):
    """The exact verifier's answer at the end of an episode."""

    passed: bool
    """Task passed by the verdict that earns reward (BFCL: state and response checks at the end)."""
    reward: float
    reward_parts: dict[str, float]
    verdict: dict[str, bool | float | str | None]
    """Every check by name, for instance ``state_only`` and ``official_per_turn``."""


class Session(Protocol):
    """One episode's private instance of a task; never shared, thread-compatible.

    Raises ``EnvironmentFaultError`` when the environment itself fails; a model's mistakes come
    back as observations with ``is_error``.
    """

    def opening(self) -> list[Message]:
        """Messages up to the point where the model takes over, prefix calls replayed."""

    def tools(self) -> list[ToolSchema]:
        """Tools as the prompt shows them; may be fewer, or shorter, than those it may call."""

    def call_schemas(self) -> Mapping[str, ToolSchema]:
        """Full schemas of every tool that may be called, by name; types the parsed arguments."""

    def step(self, calls: Sequence[ParsedCall]) -> list[Observation]:
        """Run all calls of one assistant message in order; one observation per call."""

    def next_user_turn(self) -> Message | None:
        """The next user message after an assistant message without calls, or None at the end."""

    def expert_tail(self) -> list[list[ToolCall]]:
        """Expert calls still to be made, one list per user turn from the current one (oracle)."""

    def finish(self) -> Outcome:
        """Verify the final state; call once, after the last step."""

    def close(self) -> None:
        """Free what the session holds (a worker process, for instance); safe to call twice."""


class Environment(Protocol):
    """A family of tasks."""

    @property
    def name(self) -> str:
        """Registry name, for instance ``bfcl``."""

    def tasks(self) -> Mapping[str, TaskInfo]:
        """All tasks by id, in the data's order."""

    def start(self, task_id: str, *, prefix_calls: int) -> Session:
        """Open a private session with the first ``prefix_calls`` expert calls replayed.

        Raises:
            TaskNotFoundError: no such task.
            EnvironmentFaultError: the replay failed.
        """

    def provenance(self) -> dict[str, str]:
        """Data package, version and SHA-256 of the data, for the run's manifest."""
