"""BFCL as an ``Environment``: one private session per episode, opened at step K."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from pydantic import Field

from miniverl_dist.config.recipe import RewardWeights
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
from rollout_server.bfcl.dispatch import CallResult, ToolHost
from rollout_server.bfcl.reward import DEFAULT_WEIGHTS, trajectory_reward
from rollout_server.bfcl.tasks import BfclData, BfclTask, load_data
from rollout_server.bfcl.verdict import Verifier, replay


class BfclOptions(FrozenModel):
    """What of a task the model sees, and the limits of a call."""

    prompt: Literal["full", "names", "compact"] = "full"
    """``full``: schemas and the whole history; ``names``: tool names alone, and the history from
    the user turn of step K on; ``compact``: that history and no tools."""
    max_observation_chars: Annotated[int, Field(gt=0)] = 2000
    """Longest observation, the mark of the cut included."""
    call_deadline_s: Annotated[float, Field(gt=0)] = 5.0
    """CPU seconds. Expensive calls are refused beforehand (``limits``); one that still takes
    longer ends the episode as a fault of the harness instead of passing unnoticed."""


class BfclEnvironment:
    """The 200 tasks of ``multi_turn_base``; sessions may run in any number of threads.

    Args:
        options: prompt mode and limits.
        write_calls: gives prefix calls the wire form that the model itself uses.
        weights: of the reward.
        data: tasks already read; None reads those of the installed package.

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
        self.data = load_data() if data is None else data
        self._infos = {task_id: task.info for task_id, task in self.data.tasks.items()}

    @property
    def name(self) -> str:
        """Registry name."""
        return "bfcl"

    def tasks(self) -> Mapping[str, TaskInfo]:
        """All tasks by id, in the data's order."""
        return self._infos

    def provenance(self) -> dict[str, str]:
        """Package, version, category and SHA-256 of the data."""
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

    The model takes over in the user turn in which expert call K + 1 is due: earlier turns are
    replayed to their end, and so are the calls of this turn before K.
    """

    def __init__(self, environment: BfclEnvironment, task: BfclTask, prefix_calls: int) -> None:
        self._options = environment.options
        self._write_calls = environment.write_calls
        self._weights = environment.weights
        self._task = task
        self._prefix_calls = prefix_calls
        self._tools = environment.data.tools(task)
        self._host: ToolHost | None = self._new_host()
        self._verifier = Verifier(task, self._new_host(), prefix_calls)
        self._turn = self._first_turn = task.turn_of_call(prefix_calls)
        self._responses = replay(self._host, task.task_id, task.expert_calls[:prefix_calls])
        for _ in range(self._turn):
            self._verifier.skip_turn()
        self._num_turn_calls = len(self._turn_prefix(self._turn))
        self._student_calls: list[ToolCall | None] = []
        self._successes: list[bool] = []

    def _new_host(self) -> ToolHost:
        return ToolHost(self._task, self._tools, call_deadline_s=self._options.call_deadline_s)

    def _turn_prefix(self, turn: int) -> tuple[ToolCall, ...]:
        """Expert calls of ``turn`` that the prefix covers."""
        before = sum(len(calls) for calls in self._task.expert_turns[:turn])
        return self._task.expert_turns[turn][: max(0, self._prefix_calls - before)]

    def opening(self) -> list[Message]:
        """Messages up to step K: user turns, and one assistant message per prefix call."""
        messages: list[Message] = []
        observations = iter(self._responses[: self._prefix_calls])
        shown_from = 0 if self._options.prompt == "full" else self._first_turn
        for turn in range(self._first_turn + 1):
            told = [Message(role="user", content=self._task.turns[turn])]
            for call in self._turn_prefix(turn):
                told.append(
                    Message(role="assistant", content=self._write_calls([call]), tool_calls=(call,))
                )
                told.append(Message(role="tool", content=self._cut(next(observations))))
            if turn >= shown_from:
                messages += told
        return messages

    def tools(self) -> list[ToolSchema]:
        """Tools as the prompt mode shows them; all of them can be called in every mode."""
        if self._options.prompt == "compact":
            return []
        if self._options.prompt == "names":
            return [
                ToolSchema(name=tool.name, description="", parameters={}) for tool in self._tools
            ]
        return list(self._tools)

    def call_schemas(self) -> Mapping[str, ToolSchema]:
        """Full schemas of every function the task allows, whatever the prompt shows."""
        return {tool.name: tool for tool in self._tools}

    def step(self, calls: Sequence[ParsedCall]) -> list[Observation]:
        """Run all calls of one assistant message in order; one observation per call."""
        host = self._open_host()
        observations = []
        for parsed in calls:
            result = host.run(parsed)
            self._record(parsed, result)
            observations.append(
                Observation(content=self._cut(result.text), is_error=result.is_error)
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
        return Message(role="user", content=self._task.turns[self._turn])

    def _end_turn(self, host: ToolHost) -> None:
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
            verdict=verdict.columns(),
        )

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
