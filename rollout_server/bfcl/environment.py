"""BFCL as an ``Environment``: one private session per episode, opened at step K."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Literal

from pydantic import Field

from miniverl_dist.config.recipe import BfclCategory, RewardWeights
from miniverl_dist.environments.base import Observation, Outcome, TaskInfo
from miniverl_dist.environments.texts import CallWriter, cut, write_json_lines
from miniverl_dist.errors import EnvironmentFaultError
from miniverl_dist.schemas.messages import (
    FrozenModel,
    Message,
    ParsedCall,
    ParseStatus,
    ToolCall,
    ToolSchema,
)
from rollout_server.bfcl.dispatch import CallResult, ToolHost, faults, tool_classes
from rollout_server.bfcl.reward import DEFAULT_WEIGHTS, same_call, trajectory_reward
from rollout_server.bfcl.tasks import BfclData, BfclTask, load_data
from rollout_server.bfcl.verdict import Verifier, replay

IDLE_REPLY = "I cannot do that with the functions and the information I have."
"""What the replayed prefix answers in a turn in which nothing can be called; the data has no words
for it. Without an answer two user turns would follow each other in every such task."""


class BfclOptions(FrozenModel):
    """Which tasks there are, what of a task the model sees, and the limits of a call."""

    categories: Annotated[tuple[BfclCategory, ...], Field(min_length=1)] = ("base",)

    prompt: Literal["full", "names", "compact"] = "full"
    """``full``: schemas and the whole history; ``names``: tool names alone, and the history from
    the user turn of step K on; ``compact``: that history and no tools."""
    max_observation_chars: Annotated[int, Field(gt=0)] = 2000
    """Longest observation, the mark of the cut included."""
    call_deadline_s: Annotated[float, Field(gt=0)] = 5.0
    """CPU seconds. Expensive calls are refused beforehand (``limits``); one that still takes
    longer ends the episode as a fault of the harness instead of passing unnoticed."""


class BfclEnvironment:
    """200 tasks of each category; sessions may run in any number of threads.

    Args:
        options: prompt mode and limits.
        write_calls: gives prefix calls the wire form that the model itself uses.
        weights: of the reward.
        data: tasks already read, whatever the categories; None reads those of the installed
            package.

    Raises:
        MissingDependencyError: bfcl-eval is not installed.
    """

    def __init__(
        self,
        options: BfclOptions | None = None,
        *,
        write_calls: CallWriter = write_json_lines,
        weights: RewardWeights = DEFAULT_WEIGHTS,
        data: BfclData | None = None,
    ) -> None:
        self.options = options or BfclOptions()
        self.write_calls = write_calls
        self.weights = weights
        self.data = load_data(categories=self.options.categories) if data is None else data
        self._infos = {task_id: task.info for task_id, task in self.data.tasks.items()}

    @property
    def name(self) -> str:
        """Registry name."""
        return "bfcl"

    def tasks(self) -> Mapping[str, TaskInfo]:
        """All tasks by id, in the data's order."""
        return self._infos

    def provenance(self) -> dict[str, str]:
        """Package, version, categories and SHA-256 of the data."""
        return dict(self.data.provenance)

    def start(self, task_id: str, *, prefix_calls: int) -> BfclSession:
        """Open a private session with the first ``prefix_calls`` expert calls replayed.

        Raises:
            TaskNotFoundError: no such task.
            EnvironmentFaultError: the replay failed, or the task has fewer calls.
        """
        task = self.data.task(task_id)
        if not 0 <= prefix_calls <= task.num_calls:
            raise EnvironmentFaultError(
                f"BFCL {task_id}: prefix_calls is {prefix_calls}, expected 0 to {task.num_calls}"
            )
        return BfclSession(self, task, prefix_calls)


class BfclSession:
    """One episode; made by ``BfclEnvironment.start``.

    The model takes over in the user turn in which expert call K + 1 is due, or in the turns before
    it where the task is about doing nothing (``BfclTask.first_turn``): earlier turns are replayed
    to their end, and so are the calls of this turn before K.

    A function that a user turn brings (``miss_func``) is unknown until that turn, whose text shows
    it: the system text stays as it was, so that the prompt only grows.
    """

    def __init__(self, environment: BfclEnvironment, task: BfclTask, prefix_calls: int) -> None:
        self._options = environment.options
        self._write_calls = environment.write_calls
        self._weights = environment.weights
        self._task = task
        self._prefix_calls = prefix_calls
        self._tools = environment.data.tools(task)
        self._turn = self._first_turn = task.first_turn(prefix_calls)
        self._callable = {tool.name: tool for tool in self._tools if self._is_known(tool)}
        # Made here, and once: the verdict compares instances of the same classes.
        with faults(f"{task.task_id}, loading its classes"):
            self._classes = tool_classes(task)
        self._host: ToolHost | None = self._new_host(tuple(self._callable.values()))
        self._verifier = Verifier(task, self._new_host(self._tools), prefix_calls)
        self._responses = replay(self._host, task.task_id, task.expert_calls[:prefix_calls])
        for _ in range(self._turn):
            self._verifier.skip_turn()
        self._num_turn_calls = len(self._turn_prefix(self._turn))
        self._student_calls: list[ToolCall | None] = []
        self._successes: list[bool] = []
        self._abstained: bool | None = None

    def _new_host(self, tools: Sequence[ToolSchema]) -> ToolHost:
        return ToolHost(
            self._task,
            tools,
            call_deadline_s=self._options.call_deadline_s,
            classes=self._classes,
        )

    def _is_known(self, tool: ToolSchema) -> bool:
        return tool.name not in self._task.refused_before(self._turn)

    def _turn_prefix(self, turn: int) -> tuple[ToolCall, ...]:
        """Expert calls of ``turn`` that the prefix covers."""
        before = sum(len(calls) for calls in self._task.expert_turns[:turn])
        return self._task.expert_turns[turn][: max(0, self._prefix_calls - before)]

    def opening(self) -> list[Message]:
        """Messages up to step K: user turns, and one assistant message per prefix call."""
        messages: list[Message] = []
        observations = iter(self._responses[: self._prefix_calls])
        for turn in range(self._first_turn + 1):
            told = [self._user_message(turn)]
            if turn < self._first_turn and self._is_idle(turn):
                told.append(Message(role="assistant", content=IDLE_REPLY))
            for call in self._turn_prefix(turn):
                told.append(
                    Message(role="assistant", content=self._write_calls([call]), tool_calls=(call,))
                )
                told.append(Message(role="tool", content=self._cut(next(observations))))
            if turn >= self._shown_from:
                messages += told
        return messages

    @property
    def _shown_from(self) -> int:
        """First user turn in the prompt."""
        return 0 if self._options.prompt == "full" else self._first_turn

    def _is_idle(self, turn: int) -> bool:
        return self._task.plays_empty_turns and not self._task.expert_turns[turn]

    def _user_message(self, turn: int) -> Message:
        """The user's text, under the functions that the turn brings as the prompt mode shows them.

        The form is that of most system texts, and plain text to every chat format.
        """
        text = self._task.turns[turn]
        since = 0 if turn == self._shown_from else turn  # the first one tells of those left out
        names = [n for t, found in self._task.brought.items() if since <= t <= turn for n in found]
        brought = [tool for tool in self._tools if tool.name in names]
        if brought and self._options.prompt == "full":
            lines = [
                json.dumps({"type": "function", "function": tool.model_dump()}, ensure_ascii=False)
                for tool in brought
            ]
            text = "\n".join(["<tools>", *lines, "</tools>", text])
        elif brought and self._options.prompt == "names":
            text = f"Tools: {', '.join(tool.name for tool in brought)}\n{text}"
        return Message(role="user", content=text)

    def tools(self) -> list[ToolSchema]:
        """Tools that are there from the start, as the prompt mode shows them; the same at every K.

        All of them can be called in every mode.
        """
        if self._options.prompt == "compact":
            return []
        later = set().union(*self._task.brought.values())
        shown = [tool for tool in self._tools if tool.name not in later]
        if self._options.prompt == "names":
            return [ToolSchema(name=tool.name, description="", parameters={}) for tool in shown]
        return shown

    def call_schemas(self) -> Mapping[str, ToolSchema]:
        """Full schemas of every function that can be called, whatever the prompt shows.

        A view: a user turn that brings functions adds them.
        """
        return MappingProxyType(self._callable)

    def step(self, calls: Sequence[ParsedCall]) -> list[Observation]:
        """Run all calls of one assistant message in order; one observation per call."""
        host = self._open_host()
        observations = []
        for parsed in calls:
            result = host.run(parsed)
            self._record(parsed, result)
            observations.append(
                Observation(
                    content=self._cut(result.text), is_error=result.is_error, error=result.error
                )
            )
        return observations

    def _record(self, parsed: ParsedCall, result: CallResult) -> None:
        call = parsed.call if parsed.status is ParseStatus.OK else None
        self._student_calls.append(call)
        self._successes.append(not result.is_error)
        if call is not None:
            # What cannot be read never reaches bfcl-eval's executor, and has no response there.
            self._responses.append(result.text)
            self._num_turn_calls += 1

    def next_user_turn(self) -> Message | None:
        """End the user turn; the next user message, or None after the last."""
        host = self._open_host()
        if self._turn == len(self._task.turns) - 1:
            return None
        self._end_turn(host)
        self._turn += 1
        news = [t for t in self._tools if t.name not in self._callable and self._is_known(t)]
        host.allow(news)
        self._callable |= {tool.name: tool for tool in news}
        return self._user_message(self._turn)

    def _end_turn(self, host: ToolHost) -> None:
        if self._is_idle(self._turn):
            self._abstained = self._abstained is not False and self._num_turn_calls == 0
        self._verifier.end_turn(host, self._responses, has_calls=self._num_turn_calls > 0)
        self._num_turn_calls = 0

    def expert_tail(self) -> list[list[ToolCall]]:
        """Expert calls still due, one list per user turn from the current one.

        Of the current turn's calls, as many are taken off as have been made in it: an oracle that
        makes the first one and asks again gets the next.
        """
        turns = self._task.expert_turns[self._turn :]
        return [list(turns[0][self._num_turn_calls :]), *(list(turn) for turn in turns[1:])]

    def finish(self) -> Outcome:
        """Verify the final state and compute the reward; call once."""
        host = self._open_host()
        self._end_turn(host)
        verdict = self._verifier.verdict(host, self._responses[self._prefix_calls :])
        parts = trajectory_reward(
            self._student_calls,
            self._successes,
            self._task.expert_calls[self._prefix_calls :],
            self._tools,
            verdict.passed,
            self._task.num_calls - self._prefix_calls,
            weights=self._weights,
        )
        self.close()
        return Outcome(
            passed=verdict.passed,
            reward=parts.total,
            reward_parts=parts.model_dump(exclude={"total"}),
            verdict=verdict.columns() | self._own_columns(),
        )

    def _own_columns(self) -> dict[str, bool | float | str | None]:
        """What bfcl-eval does not judge."""
        columns: dict[str, bool | float | str | None] = {
            "first_call_match": self._first_call_matches()
        }
        if self._task.plays_empty_turns:
            # No readable call in the turns where nothing can be done; None: none was played.
            columns["abstained"] = self._abstained
        return columns

    def _first_call_matches(self) -> bool:
        """Whether the first call is the expert's; where none is due, whether none was made."""
        due = self._task.expert_calls[self._prefix_calls :]
        if not due or not self._student_calls:
            return not due and not self._student_calls
        return same_call(self._student_calls[0], due[0])

    def close(self) -> None:
        """Let go of the instances; safe to call twice."""
        self._host = None

    def _open_host(self) -> ToolHost:
        if self._host is None:
            raise EnvironmentFaultError(
                f"BFCL {self._task.task_id}: the session is closed; start another one"
            )
        return self._host

    def _cut(self, text: str) -> str:
        return cut(text, self._options.max_observation_chars)
