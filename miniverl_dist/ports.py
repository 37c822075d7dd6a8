"""The ports: what the loop asks of the world, and nothing about who answers.

``actors`` wires implementations to these protocols. Every await behind a port is bounded by a
deadline that config sets; an implementation that runs out of time raises ``DeadlineError``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from miniverl_dist.schemas.batch import FloatArray, SftBatch, TrainBatch, UpdateResult
from miniverl_dist.schemas.messages import FrozenModel, Message, ToolSchema
from miniverl_dist.schemas.targets import TrajectoryTargets
from miniverl_dist.schemas.teacher import TeacherRefusal, TeacherResult
from miniverl_dist.schemas.trajectory import SpanKind, Trajectory
from miniverl_dist.tokens.tokenizer import TokenizerLike


class Assignment(FrozenModel):
    """One group to roll out: a task at a reverse-K horizon, with its place in the FIFO."""

    ticket: int
    """FIFO place; also what makes the group's random seeds."""
    attempt: int = 0
    """How often this place has been refilled after a drop."""
    task_id: str
    prefix_calls: int
    tail_calls: int

    @property
    def group_id(self) -> str:
        """Unique within a run."""
        return f"{self.ticket:06d}.{self.attempt}"


class ScoredTrajectory(FrozenModel):
    """A trajectory with the teacher's word on it (None where the objective has no teacher)."""

    trajectory: Trajectory
    teacher: TeacherResult | None = None


class GroupOutcome(FrozenModel):
    """How often a group passed; all that the curriculum learns from a group that was dropped."""

    task_id: str
    tail_calls: int
    num_passed: int
    num_counted: int
    """Members that count: harness faults are left out."""


class ScoredGroup(FrozenModel):
    """GRPO siblings of one assignment; what the buffer holds and the journal stores."""

    assignment: Assignment
    members: tuple[ScoredTrajectory, ...]
    replaced: tuple[GroupOutcome, ...] = ()
    """Groups that were dropped from this FIFO place before it."""
    num_publishes: int
    """Publishes that had been confirmed when the group was started (for the lag check)."""

    @property
    def outcome(self) -> GroupOutcome:
        """This group's own outcome."""
        counted = [m.trajectory for m in self.members if m.trajectory.is_trainable]
        return GroupOutcome(
            task_id=self.assignment.task_id,
            tail_calls=self.assignment.tail_calls,
            num_passed=sum(trajectory.passed for trajectory in counted),
            num_counted=len(counted),
        )


class Clock(Protocol):
    """Time, so that tests need not wait for it."""

    def now(self) -> float:
        """Monotonic seconds."""

    async def sleep(self, seconds: float) -> None:
        """Wait; a fake clock returns when told to."""


class RolloutSource(Protocol):
    """Plays the episodes of a group; the trajectories come one by one as they finish."""

    async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
        """Play one episode: sibling ``member`` of the group.

        Never raises for what can go wrong inside an episode: harness faults are terminations.
        """


GroupTaker = Callable[[int, ScoredGroup], Awaitable[None]]
"""Told of a group of a batch, and of its index there, before the batch is whole."""


class TrajectorySource(Protocol):
    """Where the trainer's groups come from: the online buffer, or stored ones."""

    async def take(self, num_groups: int, each: GroupTaker | None = None) -> list[ScoredGroup]:
        """The next groups in FIFO order; waits for the rollout workers, up to a deadline.

        ``each`` is called with each of them as soon as it is there.
        """

    def release(self, num_publishes: int, *, trained: bool) -> None:
        """Free the slots of the groups taken last; call after the publish is confirmed.

        With ``trained`` False the batch was empty: as many more groups are handed out in its
        stead.
        """


class TeacherScorer(Protocol):
    """Scores the sampled spans of a trajectory."""

    @property
    def teacher_id(self) -> str:
        """Name of the model that scores."""

    async def score(self, trajectory: Trajectory) -> TeacherResult:
        """Score, or refuse with a typed reason; raises only what config says is fatal."""


TargetAnswer = TrajectoryTargets | TeacherRefusal


class TargetSource(Protocol):
    """Finds what trajectories are compared with where whole distributions count."""

    async def targets(self, trajectories: Sequence[Trajectory]) -> Mapping[str, TargetAnswer]:
        """Targets by trajectory, or why the teacher has none; without a token to train on, neither.

        Raises:
            StaleCacheError: stored targets are about something else.
            TeacherError: the teacher cannot be loaded or asked.
        """


@dataclass(frozen=True)
class WeightSnapshot:
    """Weights of one policy version on their way to the engines."""

    policy_version: int
    tensors: Mapping[str, Any]
    """Name -> numpy array, C-contiguous."""
    checksum: str
    """SHA-256 over names, dtypes, shapes and bytes (``schemas.weights.weights_checksum``)."""


class StudentPool(Protocol):
    """All ranks of the student: every call is carried out by all of them or by none.

    Every call but ``rebuild`` raises ``StudentLostError`` when a rank has died or stands half way:
    then ``rebuild`` and ``load`` of the newest commit come before anything else.
    """

    @property
    def policy_version(self) -> int:
        """Committed optimizer steps."""

    async def update(self, batch: TrainBatch) -> UpdateResult:
        """Proximal (and reference) logprobs, then one optimizer step per minibatch."""

    async def accumulate(self, batch: TrainBatch, place: int) -> None:
        """Add the gradients of a part of a step's batch to those of its other parts.

        The weights stay; ``commit_accumulated`` takes the step. Any error discards what has been
        accumulated. Parts come in any order; ``place`` says where this one stands in the batch.
        """

    async def commit_accumulated(self) -> UpdateResult:
        """One optimizer step over all parts, as an ``update`` of them together would take it."""

    async def discard_accumulated(self) -> None:
        """Forget the parts; nothing has changed then. Harmless where there are none."""

    async def sft_update(self, batch: SftBatch, learning_rate: float) -> dict[str, float]:
        """One supervised step (warm-up); does not count as a policy version."""

    async def finish_warmup(self) -> None:
        """Forget the warm-up's optimizer state and freeze the reference policy here."""

    async def logprobs(self, batch: TrainBatch) -> FloatArray:
        """[N] nats of the batch's tokens under the current weights; NaN at position 0."""

    async def save(self, directory: Path) -> None:
        """Write weights, reference and optimizer below ``directory``."""

    async def load(self, directory: Path, policy_version: int) -> None:
        """Restore what ``save`` wrote."""

    async def rebuild(self) -> None:
        """Start all ranks anew, with their initial weights; ``load`` follows.

        Raises:
            UpdateError: too many rebuilds, or the ranks do not come up in time.
        """


@dataclass(frozen=True)
class PublishReceipt:
    """A publish that every engine in rotation has confirmed."""

    policy_version: int
    checksum: str
    engines: tuple[str, ...]
    quarantined: tuple[str, ...] = ()
    """Engines that did not confirm and have left the rotation."""


class WeightStore(Protocol):
    """Brings weights to the rollout engines."""

    async def publish(self, policy_version: int) -> PublishReceipt:
        """Bring the student's current weights, of this version, to every engine.

        Quiesce, load, confirm version and checksum, resume.

        Raises:
            PublishError: not one engine confirmed.
            StudentLostError: a rank died while it sent.
        """


class Curriculum(Protocol):
    """Hands out assignments and learns from committed groups, in FIFO order."""

    def assign(self, ticket: int) -> Assignment:
        """The assignment of FIFO place ``ticket``; tickets come in rising order."""

    def reassign(self, dropped: Assignment) -> Assignment:
        """A replacement for a dropped group in the same FIFO place."""

    def advance(self, groups: Sequence[ScoredGroup]) -> None:
        """Learn from the groups of one committed step."""

    def summary(self) -> dict[str, float]:
        """Progress as metrics (share of finished tasks)."""

    def state(self) -> dict[str, Any]:
        """JSON state for RunState."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up a state written by ``state``."""


@dataclass(frozen=True)
class Piece:
    """A rendered stretch of an episode: the tokens of one message, markers included.

    The chat formats make them and the episode appends them; a piece never changes a former one,
    which is what gives the prefix property.
    """

    kind: SpanKind
    token_ids: tuple[int, ...]
    message_index: int | None = None


class ChatFormat(Protocol):
    """Turns messages into tokens, append-only.

    What the model writes starts after ``assistant_opening`` and ends with ``turn_end_id``,
    which the model samples itself.
    """

    @property
    def tokenizer(self) -> TokenizerLike:
        """The tokenizer all ids belong to."""

    @property
    def turn_end_id(self) -> int:
        """The token that ends an assistant turn."""

    def system(self, tools: Sequence[ToolSchema]) -> Piece:
        """The opening of an episode: system text, wire format and tools."""

    def user(self, content: str) -> Piece:
        """A user turn."""

    def tool_results(self, contents: Sequence[str]) -> Piece:
        """The results of one assistant message's calls, in order."""

    def assistant_opening(self) -> Piece:
        """What stands before the model's own tokens (a generation prompt)."""

    def assistant_closing(self) -> Piece:
        """What the template puts behind a turn end; may be empty."""

    def written(self, message: Message) -> Piece:
        """An assistant message that the policy did not sample (prefix call), turn end included."""
