"""Scripted traces for supervised steps: the oracle's episodes, some of them spoilt on purpose.

A warm-up on clean traces leaves no variance within a group, so a share of the traces carries one
spoilt call: a wrong argument, a wrong function, a dropped argument, or no call at all. The
observations that follow are the environment's real answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from miniverl_dist.environments.base import Environment, Session, TaskInfo
from miniverl_dist.errors import ConfigError, EnvironmentFaultError
from miniverl_dist.ports import Assignment, Clock
from miniverl_dist.schemas.messages import ToolCall
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import (
    ASSISTANT_KINDS,
    HARNESS_TERMINATIONS,
    Span,
    Trajectory,
)
from rollout_server.episode import EpisodePlayer, Stage
from rollout_server.policies import DONE_TEXT, Moment, ScriptedPolicy

CallWriter = Callable[[Sequence[ToolCall]], str]


@dataclass(frozen=True)
class Trace:
    """One scripted episode."""

    trajectory: Trajectory
    clean_texts: Mapping[int, str]
    """Message index -> what the oracle would have written there, for spoilt messages only."""

    @property
    def written_spans(self) -> tuple[tuple[int, Span], ...]:
        """(index, span) of every assistant span: prefix calls and scripted turns."""
        return tuple(
            (index, span)
            for index, span in enumerate(self.trajectory.spans)
            if span.kind in ASSISTANT_KINDS
        )

    def divergence(self, span: Span) -> int | None:
        """Byte offset in the span's text from which it is spoilt; None where it is not."""
        clean = None if span.message_index is None else self.clean_texts.get(span.message_index)
        if clean is None or span.message_index is None:
            return None
        spoilt = self.trajectory.messages[span.message_index].content
        return common_prefix_bytes(clean.encode(), spoilt.encode())


def common_prefix_bytes(left: bytes, right: bytes) -> int:
    """Length of the common beginning."""
    length = min(len(left), len(right))
    return next((i for i in range(length) if left[i] != right[i]), length)


class TraceMaker:
    """Plays scripted episodes on a stage."""

    def __init__(self, stage: Stage, write_calls: CallWriter, clock: Clock, *, seed: int) -> None:
        self._stage, self._write_calls, self._clock, self._seed = stage, write_calls, clock, seed

    async def make(
        self,
        task_ids: Sequence[str],
        *,
        max_tail_calls: int,
        per_task: int,
        noisy_fraction: float,
    ) -> list[Trace]:
        """Play ``per_task`` episodes of every task at every horizon from 1 to ``max_tail_calls``.

        Raises:
            EnvironmentFaultError: an episode ended as a fault of the harness.
            ConfigError: an episode does not fit the context.
        """
        tasks = self._stage.environment.tasks()
        pool = _call_pool(self._stage.environment, tasks, task_ids)
        places = [
            (task_id, tail, repeat)
            for task_id in task_ids
            for tail in range(1, min(max_tail_calls, tasks[task_id].num_calls) + 1)
            for repeat in range(per_task)
        ]
        return [
            await self._play(
                ticket, task_id, tasks[task_id].num_calls - tail, tail, noisy_fraction, pool
            )
            for ticket, (task_id, tail, _) in enumerate(places)
        ]

    async def _play(
        self,
        ticket: int,
        task_id: str,
        prefix_calls: int,
        tail_calls: int,
        noisy_fraction: float,
        pool: Sequence[ToolCall],
    ) -> Trace:
        script = _NoisyScript(self._write_calls, pool, noisy_fraction)
        player = EpisodePlayer(
            self._stage,
            ScriptedPolicy(self._stage.chat, script),
            seed=derive_seed(self._seed, "traces"),
            clock=self._clock,
        )
        place = Assignment(
            ticket=ticket, task_id=task_id, prefix_calls=prefix_calls, tail_calls=tail_calls
        )
        trajectory = await player.rollout(place, 0)
        if trajectory.termination in HARNESS_TERMINATIONS:
            raise EnvironmentFaultError(
                f"scripted trace of {task_id} at K = {prefix_calls} ended as "
                f"{trajectory.termination}: {trajectory.notes.get('error')}"
            )
        trace = Trace(trajectory, script.clean_texts(trajectory))
        self._require_fit(trace, has_written=script.has_written)
        return trace

    def _require_fit(self, trace: Trace, *, has_written: bool) -> None:
        trajectory, limit = trace.trajectory, self._stage.limits.max_context_tokens
        spans = trace.written_spans
        found = spans[-1][1].end if has_written else len(trajectory.token_ids)
        if not has_written or found > limit:
            raise ConfigError(
                f"the scripted episode of {trajectory.task_id} with T = {trajectory.tail_calls} "
                f"takes {found} tokens or more, the context of the model that plays has {limit}: "
                "raise max_context_tokens (rollout, student.model), choose a shorter "
                "environment.prompt, or leave the task out"
            )


class _NoisyScript:
    """The oracle's script, with the last call of the last busy user turn spoilt now and then."""

    def __init__(
        self, write_calls: CallWriter, pool: Sequence[ToolCall], noisy_fraction: float
    ) -> None:
        self._write_calls, self._pool, self._noisy_fraction = write_calls, pool, noisy_fraction
        self._texts: list[tuple[str, str]] = []  # (written, clean) per turn

    def __call__(self, session: Session, moment: Moment) -> str:
        tail = session.expert_tail()
        calls = tail[0] if moment.turns_since_user == 0 else []
        clean = self._write_calls(calls) if calls else DONE_TEXT
        written = clean
        draw = random.Random(moment.seed)
        if calls and not any(tail[1:]) and draw.random() < self._noisy_fraction:
            written = self._spoil(calls, session, draw)
        self._texts.append((written, clean))
        return written

    def _spoil(self, calls: Sequence[ToolCall], session: Session, draw: random.Random) -> str:
        kept, last = list(calls[:-1]), calls[-1]
        spoilt = draw.choice((_wrong_argument, _wrong_function, _dropped_argument, _no_call))(
            last, [call for call in self._pool if call.name in session.call_schemas()], draw
        )
        calls = kept if spoilt is None else [*kept, spoilt]
        return self._write_calls(calls) if calls else DONE_TEXT

    @property
    def has_written(self) -> bool:
        """False where the context left no room for a single turn."""
        return bool(self._texts)

    def clean_texts(self, trajectory: Trajectory) -> dict[int, str]:
        """Message index -> clean text of the spoilt messages."""
        written = [i for i, m in enumerate(trajectory.messages) if m.role == "assistant"]
        own = written[len(written) - len(self._texts) :]
        return {
            index: clean
            for index, (text, clean) in zip(own, self._texts, strict=True)
            if text != clean
        }


def _wrong_argument(
    call: ToolCall, pool: Sequence[ToolCall], draw: random.Random
) -> ToolCall | None:
    """One argument gets another call's value of the same type, or a made-up one."""
    if not call.arguments:
        return _wrong_function(call, pool, draw)
    name = draw.choice(sorted(call.arguments))
    value = call.arguments[name]
    others: list[Any] = [
        other
        for candidate in pool
        for other in candidate.arguments.values()
        if type(other) is type(value) and other != value
    ]
    return call.model_copy(
        update={"arguments": call.arguments | {name: draw.choice(others) if others else None}}
    )


def _wrong_function(
    call: ToolCall, pool: Sequence[ToolCall], draw: random.Random
) -> ToolCall | None:
    """Another call that the tools allow."""
    others = [candidate for candidate in pool if candidate.name != call.name]
    return draw.choice(others) if others else None


def _dropped_argument(
    call: ToolCall, pool: Sequence[ToolCall], draw: random.Random
) -> ToolCall | None:
    """One argument is missing."""
    if not call.arguments:
        return None
    name = draw.choice(sorted(call.arguments))
    return call.model_copy(
        update={"arguments": {k: v for k, v in call.arguments.items() if k != name}}
    )


def _no_call(call: ToolCall, pool: Sequence[ToolCall], draw: random.Random) -> ToolCall | None:
    """The call is left out."""
    return None


def _call_pool(
    environment: Environment, tasks: Mapping[str, TaskInfo], task_ids: Sequence[str]
) -> list[ToolCall]:
    """All expert calls of the tasks, in order."""
    pool: list[ToolCall] = []
    for task_id in task_ids:
        session = environment.start(task_id, prefix_calls=0)
        pool.extend(call for turn in session.expert_tail() for call in turn)
        session.close()
    return pool
