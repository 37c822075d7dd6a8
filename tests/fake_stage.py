"""A tool-calling environment and an inference engine that follow scripts, for episode tests."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from miniverl_dist.config.recipe import RolloutConfig
from miniverl_dist.environments.base import Observation, Outcome, TaskInfo
from miniverl_dist.errors import EnvironmentFaultError, TaskNotFoundError
from miniverl_dist.generate_api.wire import (
    FinishReason,
    FinishType,
    GenerateReply,
    GenerateRequest,
    MetaInfo,
    SamplingParams,
    WeightVersion,
)
from miniverl_dist.ports import Assignment, WeightSnapshot
from miniverl_dist.schemas.messages import Message, ParsedCall, ToolCall, ToolSchema
from miniverl_dist.schemas.trajectory import Trajectory
from rollout_server.episode import TRAINING_BUDGET, EpisodePlayer, Stage, TurnBudget
from rollout_server.policies import EnginePolicy
from rollout_server.tool_calls import parse_hermes_json, write_hermes_json
from tests.fakes import FakeClock, PlainChat

CHAT = PlainChat()


def call(name: str = "f", **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def wire(*calls: ToolCall) -> str:
    """The text with which a model makes these calls."""
    return write_hermes_json(calls)


class ScriptedSession:
    """`Session` of one task; the names of calls say what happens.

    ``fail`` answers with an error, ``slow`` with that of a call which its cap has cut, ``fault`` is
    a fault of the environment; everything else works.
    """

    def __init__(self, turns: list[list[ToolCall]], prefix_calls: int, tools: list[str]) -> None:
        self._turns, self._tools = turns, tools
        flat = [(index, made) for index, turn in enumerate(turns) for made in turn]
        self._prefix = flat[:prefix_calls]
        due = [index for index, _ in flat[prefix_calls:]]
        self.turn = due[0] if due else len(turns) - 1
        self._due = [made for _, made in flat[prefix_calls:]]
        self._made_in_turn = sum(index == self.turn for index, _ in self._prefix)
        self.made: list[ParsedCall] = []
        self.num_finishes = self.num_closes = 0
        self.finish_fault = False

    def opening(self) -> list[Message]:
        messages = []
        for index in range(self.turn + 1):
            messages.append(Message(role="user", content=f"do {index}"))
            for turn, made in self._prefix:
                if turn == index:
                    text = write_hermes_json([made])
                    messages.append(Message(role="assistant", content=text, tool_calls=(made,)))
                    messages.append(Message(role="tool", content=f"{made.name} ok"))
        return messages

    def tools(self) -> list[ToolSchema]:
        return [ToolSchema(name=name, description="", parameters={}) for name in self._tools]

    def call_schemas(self) -> Mapping[str, ToolSchema]:
        return {tool.name: tool for tool in self.tools()}

    def step(self, calls: Sequence[ParsedCall]) -> list[Observation]:
        return [self._run(parsed) for parsed in calls]

    def _run(self, parsed: ParsedCall) -> Observation:
        self.made.append(parsed)
        if parsed.call is None:
            return Observation(content=f"error: {parsed.error}", is_error=True)
        self._made_in_turn += 1
        name = parsed.call.name
        if name == "fault":
            raise EnvironmentFaultError("the database is gone")
        if name == "slow":
            return Observation(content="error: cut after 5.0 s", is_error=True)
        return Observation(content=f"{name} ok", is_error=name == "fail")

    def next_user_turn(self) -> Message | None:
        if self.turn == len(self._turns) - 1:
            return None
        self.turn += 1
        self._made_in_turn = 0
        return Message(role="user", content=f"do {self.turn}")

    def expert_tail(self) -> list[list[ToolCall]]:
        turns = self._turns[self.turn :]
        return [turns[0][self._made_in_turn :], *turns[1:]]

    def finish(self) -> Outcome:
        self.num_finishes += 1
        if self.finish_fault:
            raise EnvironmentFaultError("the verifier is gone")
        passed = [parsed.call for parsed in self.made] == self._due
        return Outcome(
            passed=passed,
            reward=1.0 if passed else 0.1,
            reward_parts={"mean_partial": 0.1},
            verdict={"state_only": passed, "official_per_turn": passed},
        )

    def close(self) -> None:
        self.num_closes += 1


class ScriptedEnvironment:
    """`Environment` of tasks given as user turns of expert calls."""

    name = "scripted"

    def __init__(
        self, tasks: Mapping[str, list[list[ToolCall]]] | None = None, tools: Sequence[str] = ("f",)
    ) -> None:
        self._tasks = tasks or {"a": [[call(x=0), call(x=1)], [call(x=2)]]}
        self._tools = list(tools)
        self.sessions: list[ScriptedSession] = []
        self.start_fault = self.finish_fault = False

    def tasks(self) -> Mapping[str, TaskInfo]:
        return {
            task_id: TaskInfo(
                task_id=task_id,
                num_calls=sum(map(len, turns)),
                num_turns=len(turns),
                classes=(),
            )
            for task_id, turns in self._tasks.items()
        }

    def start(self, task_id: str, *, prefix_calls: int) -> ScriptedSession:
        if task_id not in self._tasks:
            raise TaskNotFoundError(f"no task {task_id!r}")
        if self.start_fault:
            raise EnvironmentFaultError("the replay failed")
        session = ScriptedSession(self._tasks[task_id], prefix_calls, self._tools)
        session.finish_fault = self.finish_fault
        self.sessions.append(session)
        return session

    def provenance(self) -> dict[str, str]:
        return {"package": "none"}


Answer = str | GenerateReply | Exception | asyncio.Event


class ScriptedEngine:
    """`Engine` that gives the next answer of its script, whatever it is asked."""

    name = "scripted-0"
    weight_version = 3

    def __init__(self, *answers: Answer) -> None:
        self._answers = list(answers)
        self.requests: list[GenerateRequest] = []

    async def generate(self, request: GenerateRequest) -> GenerateReply:
        self.requests.append(request)
        answer = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        if isinstance(answer, asyncio.Event):
            await answer.wait()
            answer = "too late"
        if isinstance(answer, Exception):
            raise answer
        return reply(answer) if isinstance(answer, str) else answer

    async def load_weights(self, snapshot: WeightSnapshot) -> str:
        return snapshot.checksum

    async def close(self) -> None:
        pass


def reply(
    text: str = "",
    *,
    end: str | None = "<|end|>",
    kind: FinishType = "stop",
    logprob: float | None = -0.25,
    versions: Sequence[str] = ("3",),
) -> GenerateReply:
    """What an engine says; ``end`` None leaves the text without an end token."""
    ids = [*CHAT.tokenizer.encode(text), *([CHAT.tokenizer.special_id(end)] if end else [])]
    meta = MetaInfo(
        id="r",
        finish_reason=FinishReason(type=kind),
        prompt_tokens=1,
        completion_tokens=len(ids),
        weight_version="3",
        weight_versions=tuple(WeightVersion(v, i, i + 1) for i, v in enumerate(versions)),
        output_token_logprobs=tuple((logprob, token, None) for token in ids),
    )
    return GenerateReply(meta_info=meta, output_ids=tuple(ids))


def stage(environment: ScriptedEnvironment | None = None, **limits: Any) -> Stage:
    return Stage(
        environment or ScriptedEnvironment(),
        CHAT,
        parse_hermes_json,
        RolloutConfig.model_validate({"max_new_tokens": 200} | limits),
    )


def engine_policy(engine: ScriptedEngine, **options: Any) -> EnginePolicy:
    stop = CHAT.tokenizer.special_id("<|stop|>")
    sampling = SamplingParams(temperature=0.7, max_new_tokens=200)
    return EnginePolicy(engine, CHAT, sampling, **({"other_stop_ids": (stop,)} | options))


async def play(
    *answers: Answer,
    environment: ScriptedEnvironment | None = None,
    place: Assignment | None = None,
    member: int = 0,
    engine: ScriptedEngine | None = None,
    budget: TurnBudget = TRAINING_BUDGET,
    seed: int = 0,
    **limits: object,
) -> Trajectory:
    """One episode against a script."""
    player = EpisodePlayer(
        stage(environment, **limits),
        engine_policy(engine or ScriptedEngine(*answers)),
        seed=seed,
        clock=FakeClock(),
        budget=budget,
    )
    return await player.rollout(place or assignment(), member)


def assignment(prefix_calls: int = 2, task_id: str = "a", tail_calls: int = 1) -> Assignment:
    return Assignment(ticket=4, task_id=task_id, prefix_calls=prefix_calls, tail_calls=tail_calls)
