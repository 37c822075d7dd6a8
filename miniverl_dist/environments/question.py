"""Environments whose task is one question: calls find the answer, ``submit`` gives it.

    user: the question
    assistant: tool calls, in one message or several     -> observations
    assistant: submit(answer)                            -> "recorded"; nothing can be called after
    assistant: a message without calls                   -> the end

The verifier is exact. A task is passed when the first submitted answer is right *and* a tool has
shown it in this episode (the replayed prefix included). So a policy that does nothing never passes
while a call is due, and neither does one that guesses: it keeps what its calls were worth, and its
verdict says ``answer_correct`` without ``answer_seen``. What this cannot tell apart is a guess that
is afterwards made to appear (``add(85, 0)``): that is work of a kind, done through calls.

    reward = passed * 1[passed] + progress * reached + valid_calls * valid     (weights from config)

``reached``: share of the expert's remaining calls whose result is among the results of the policy's
own calls; the way there is free. ``valid``: share of its calls
that ran without an error. Both are 1 for a passed task, so the reward is 1 exactly when the task is
passed, and 0 for an episode without calls.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from miniverl_dist.config.environments import QuestionConfig
from miniverl_dist.environments.arguments import size_problem
from miniverl_dist.environments.base import Observation, Outcome, TaskInfo
from miniverl_dist.environments.question_tasks import (
    SUBMIT,
    ArgumentsError,
    Family,
    QuestionTask,
    Toolbox,
    ToolError,
    UnknownToolError,
    canonical,
    draw_tasks,
    make_tool,
)
from miniverl_dist.environments.texts import CallWriter, cut, write_json_lines
from miniverl_dist.errors import EnvironmentFaultError, TaskNotFoundError
from miniverl_dist.schemas.messages import Message, ParsedCall, ParseStatus, ToolCall, ToolSchema


class QuestionEnvironment:
    """A family's tasks under one config; sessions may run in any number of threads.

    Args:
        family: Tools, tasks and answers.
        config: Section of the recipe.
        write_calls: Gives prefix calls the wire form that the model itself uses.
    """

    def __init__(
        self, family: Family, config: QuestionConfig, write_calls: CallWriter = write_json_lines
    ) -> None:
        self.family, self.config, self.write_calls = family, config, write_calls
        submit = make_tool(
            SUBMIT,
            "Give the answer, once, as a tool has shown it. Afterwards no tool can be called: end "
            "with a message without calls.",
            answer=family.answer_schema,
        )
        self.schemas = {tool.name: tool for tool in (*family.tools, submit)}
        self.questions = draw_tasks(family, config)
        self._infos = {task_id: task.info for task_id, task in self.questions.items()}

    @property
    def name(self) -> str:
        """Registry name."""
        return self.family.name

    def tasks(self) -> Mapping[str, TaskInfo]:
        """All tasks by id, in the order they were drawn."""
        return self._infos

    def provenance(self) -> dict[str, str]:
        """What the tasks were drawn from, and a SHA-256 of all that a verdict depends on."""
        digest = hashlib.sha256()
        for task in self.questions.values():
            calls = [call.model_dump() for call in task.expert_calls]
            record = [task.task_id, task.question.text, calls, task.question.hidden]
            digest.update(json.dumps(record, sort_keys=True).encode())
        return {
            "generator": self.name,
            "difficulty": self.config.difficulty,
            "seed": str(self.config.seed),
            "num_tasks": str(self.config.num_tasks),
            "data_sha256": digest.hexdigest(),
            **self.family.versions,
        }

    def start(self, task_id: str, *, prefix_calls: int) -> QuestionSession:
        """Open a private session with the first ``prefix_calls`` expert calls replayed.

        Raises:
            TaskNotFoundError: no such task.
            EnvironmentFaultError: the task has fewer calls, or one of the expert's fails.
        """
        task = self.questions.get(task_id)
        if task is None:
            raise TaskNotFoundError(
                f"{self.name} has no task {task_id!r} among its {len(self.questions)} "
                f"(the first is {next(iter(self.questions))!r}); see environment.num_tasks"
            )
        num_calls = len(task.expert_calls)
        if not 0 <= prefix_calls <= num_calls:
            raise EnvironmentFaultError(
                f"{task_id}: prefix_calls is {prefix_calls}, expected 0 to {num_calls}"
            )
        return QuestionSession(self, task, prefix_calls)


@dataclass
class _Answers:
    """What the policy has found and given; ``submitted`` is the first answer, canonical."""

    seen: set[str] = field(default_factory=set)
    submitted: str | None = None


class QuestionSession:
    """One episode; made by ``QuestionEnvironment.start``."""

    def __init__(
        self, environment: QuestionEnvironment, task: QuestionTask, prefix_calls: int
    ) -> None:
        self._environment, self._task, self._prefix_calls = environment, task, prefix_calls
        self._expert_calls = task.expert_calls
        self._answer = canonical(task.question.answer)
        self._tools: Toolbox | None = environment.family.open_tools(task.question)
        self._answers = _Answers()
        self._own_results: set[str] = set()
        self._successes: list[bool] = []
        self._num_readable = 0
        try:
            # Tools only read, so what the expert's later calls give can be asked beforehand.
            self._due = [self._expert_result(call) for call in self._expert_calls[:-1]]
            self._answers = _Answers()
            self._shown = [self._expert_result(c) for c in self._expert_calls[:prefix_calls]]
        except BaseException:
            self.close()
            raise

    def _expert_result(self, call: ToolCall) -> str:
        try:
            return self._run(call)
        except ToolError as error:
            raise EnvironmentFaultError(
                f"{self._task.task_id}: the expert's own call {call.name}({call.arguments}) failed "
                f"with {error}"
            ) from error

    def opening(self) -> list[Message]:
        """The question, and one assistant message per prefix call with its result."""
        messages = [Message(role="user", content=self._task.question.text)]
        for call, shown in zip(self._expert_calls, self._shown, strict=False):
            text = self._environment.write_calls([call])
            messages.append(Message(role="assistant", content=text, tool_calls=(call,)))
            messages.append(Message(role="tool", content=self._cut(shown)))
        return messages

    def tools(self) -> list[ToolSchema]:
        """Tools as the prompt mode shows them; all of them can be called in every mode."""
        prompt, tools = self._environment.config.prompt, self._environment.schemas.values()
        if prompt == "names":
            return [ToolSchema(name=tool.name, description="", parameters={}) for tool in tools]
        return [] if prompt == "compact" else list(tools)

    def call_schemas(self) -> Mapping[str, ToolSchema]:
        """Full schemas of every tool."""
        return self._environment.schemas

    def step(self, calls: Sequence[ParsedCall]) -> list[Observation]:
        """Run all calls of one assistant message in order; one observation per call."""
        self._open_tools()
        return [self._observe(parsed) for parsed in calls]

    def _observe(self, parsed: ParsedCall) -> Observation:
        try:
            content, is_error, kind = self._attempt(parsed), False, None
        except ToolError as error:
            content, is_error = json.dumps({"error": str(error)}, ensure_ascii=False), True
            kind = error.kind if parsed.status is ParseStatus.OK else None
        self._successes.append(not is_error)
        return Observation(content=self._cut(content), is_error=is_error, error=kind)

    def _attempt(self, parsed: ParsedCall) -> str:
        call = parsed.call if parsed.status is ParseStatus.OK else None
        if call is None:
            detail = parsed.error or "it could not be read"
            raise ToolError(f"call not executed ({parsed.status.value}): {detail}")
        self._num_readable += 1
        text = self._run(call)
        self._own_results.add(text)
        return text

    def _run(self, call: ToolCall) -> str:
        """The call's result, uncut; what it showed or submitted is noted."""
        schema = self._environment.schemas.get(call.name)
        if schema is None:
            known = ", ".join(self._environment.schemas)
            raise UnknownToolError(f"unknown tool {call.name[:100]!r}; known are {known}")
        for problem in _argument_problems(schema, call):
            raise ArgumentsError(f"{call.name}: {problem}")
        if self._answers.submitted is not None:
            raise ToolError("an answer has been submitted: end with a message without calls")
        if call.name == SUBMIT:
            return self._submit(call.arguments["answer"])
        result = self._open_tools().call(call.name, call.arguments)
        self._answers.seen.update(canonical(value) for value in result.values)
        return result.text

    def _submit(self, answer: object) -> str:
        if not isinstance(answer, str | int | float | bool | None):
            raise ArgumentsError(
                f"{SUBMIT}: answer must be a single value, found {type(answer).__name__}"
            )
        self._answers.submitted = canonical(answer)
        return "recorded"

    def next_user_turn(self) -> Message | None:
        """None: there is one question."""
        self._open_tools()
        return None

    def expert_tail(self) -> list[list[ToolCall]]:
        """Expert calls still due; as many are taken off as the policy has made."""
        return [list(self._expert_calls[self._prefix_calls + self._num_readable :])]

    def finish(self) -> Outcome:
        """Verify the answer and compute the reward; call once."""
        self._open_tools()
        self.close()
        correct = self._answers.submitted == self._answer
        passed = correct and self._answer in self._answers.seen
        weights = self._environment.config.reward
        parts = {
            "passed": float(passed),
            "progress": 1.0 if passed else self._progress(),
            "valid_calls": 1.0 if passed else self._valid_share(),
        }
        total = sum(getattr(weights, name) * part for name, part in parts.items())
        return Outcome(
            passed=passed,
            reward=1.0 if passed else total,  # no rounding of the sum of the weights
            reward_parts=parts,
            verdict={
                "answer_correct": correct,
                "answer_seen": self._answer in self._answers.seen,
                "submitted": self._answers.submitted is not None,
                "reason": self._reason(correct=correct),
            },
        )

    def _progress(self) -> float:
        """Of an episode that has not passed: what a guess was worth is not in it."""
        reached = sum(text in self._own_results for text in self._due[self._prefix_calls :])
        num_due = len(self._expert_calls) - self._prefix_calls
        return reached / num_due if num_due else 0.0

    def _valid_share(self) -> float:
        return sum(self._successes) / len(self._successes) if self._successes else 0.0

    def _reason(self, *, correct: bool) -> str | None:
        if self._answers.submitted is None:
            return "nothing submitted"
        if not correct:
            return "wrong answer"
        return None if self._answer in self._answers.seen else "no tool has shown the answer"

    def close(self) -> None:
        """Let go of the tools; safe to call twice."""
        if self._tools is not None:
            self._tools.close()
        self._tools = None

    def _open_tools(self) -> Toolbox:
        if self._tools is None:
            raise EnvironmentFaultError(
                f"{self._task.task_id}: the session is closed; start another one"
            )
        return self._tools

    def _cut(self, text: str) -> str:
        return cut(text, self._environment.config.max_observation_chars)


def _argument_problems(schema: ToolSchema, call: ToolCall) -> Iterator[str]:
    """What is wrong with a call's arguments before their types are looked at."""
    if problem := size_problem(call.arguments):
        yield problem
    expected = schema.parameters["required"]
    if missing := [name for name in expected if name not in call.arguments]:
        yield f"missing arguments {missing}"
    if foreign := [name[:100] for name in call.arguments if name not in expected][:5]:
        yield f"unexpected arguments {foreign}, expected {expected}"
