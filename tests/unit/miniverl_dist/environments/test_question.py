"""What all environments of one question share, shown on the calculator."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from miniverl_dist.config.environments import CalculatorConfig, QuestionReward
from miniverl_dist.environments.base import Environment, Session
from miniverl_dist.environments.calculator import FAMILY, calculator
from miniverl_dist.environments.players import play_expert
from miniverl_dist.environments.question import QuestionEnvironment
from miniverl_dist.environments.question_tasks import (
    Question,
    ToolError,
    ToolResult,
    draw_tasks,
)
from miniverl_dist.environments.splits import split
from miniverl_dist.errors import ConfigError, EnvironmentFaultError, TaskNotFoundError
from miniverl_dist.schemas.messages import ParsedCall, ParseStatus
from tests.support.question_audit import answer_of, call, do, refused, told

EASY, MEDIUM = "calculator_easy_000", "calculator_medium_000"


@pytest.fixture
def env() -> QuestionEnvironment:
    return calculator(CalculatorConfig(num_tasks=6))


def first_call(env: QuestionEnvironment, task_id: str) -> tuple[str, dict[str, object]]:
    made = env.questions[task_id].expert_calls[0]
    return made.name, dict(made.arguments)


class TestTasks:
    def test_mixed_takes_the_difficulties_in_turn(self, env: QuestionEnvironment) -> None:
        kinds = [info.classes for info in env.tasks().values()]
        assert kinds == [("easy",), ("medium",), ("hard",)] * 2
        assert list(env.tasks())[3:] == [f"calculator_{k}_001" for k in ("easy", "medium", "hard")]

    def test_more_tasks_leave_the_former_ones_as_they_were(self, env: QuestionEnvironment) -> None:
        larger = calculator(CalculatorConfig(num_tasks=30))
        assert list(larger.questions.values())[:6] == list(env.questions.values())

    def test_the_seed_decides_what_is_asked(self, env: QuestionEnvironment) -> None:
        again = calculator(CalculatorConfig(num_tasks=6))
        other = calculator(CalculatorConfig(num_tasks=6, seed=1))
        assert again.questions == env.questions
        assert again.provenance() == env.provenance()
        assert other.provenance()["data_sha256"] != env.provenance()["data_sha256"]

    def test_the_data_is_what_it_was_when_numbers_were_published(self) -> None:
        found = calculator(CalculatorConfig()).provenance()["data_sha256"]
        assert found[:16] == "b24fed756e88ae85"

    def test_no_two_tasks_ask_the_same(self) -> None:
        env = calculator(CalculatorConfig(difficulty="easy", num_tasks=2000))
        assert len({task.question.text for task in env.questions.values()}) == 2000

    def test_a_family_that_runs_out_of_questions_says_so(self) -> None:
        family = replace(
            FAMILY, draw=lambda level, rng: Question(f"Is {rng.randrange(3)} 0?", (), "no")
        )
        assert len(draw_tasks(family, CalculatorConfig(difficulty="easy", num_tasks=3))) == 3
        with pytest.raises(ConfigError, match=r"num_tasks 4: calculator easy has no further .* 3"):
            draw_tasks(family, CalculatorConfig(difficulty="easy", num_tasks=4))

    def test_both_splits_work(self) -> None:
        tasks = calculator(CalculatorConfig(num_tasks=30)).tasks()
        for kind in ("tail", "stratified"):
            train, held_out = split(tasks, kind, 6)
            classes = sorted(tasks[task_id].classes[0] for task_id in held_out)
            assert classes == ["easy", "easy", "hard", "hard", "medium", "medium"], kind
            assert not set(train) & set(held_out)


class TestStart:
    def test_it_is_an_environment(self, env: QuestionEnvironment) -> None:
        environment: Environment = env
        session: Session = environment.start(EASY, prefix_calls=0)
        assert environment.name == "calculator"
        session.close()
        session.close()

    def test_the_prefix_is_shown_as_the_model_would_have_written_it(
        self, env: QuestionEnvironment
    ) -> None:
        written = calculator(CalculatorConfig(num_tasks=6), lambda calls: f"<{calls[0].name}>")
        opening = written.start(EASY, prefix_calls=1).opening()
        name, _ = first_call(env, EASY)
        assert [m.role for m in opening] == ["user", "assistant", "tool"]
        assert opening[1].content == f"<{name}>"
        assert opening[2].content == str(answer_of(env, EASY))
        assert env.start(EASY, prefix_calls=0).opening() == opening[:1]

    def test_unknown_tasks_and_impossible_prefixes(self, env: QuestionEnvironment) -> None:
        with pytest.raises(TaskNotFoundError, match="no task 'x' among its 6"):
            env.start("x", prefix_calls=0)
        with pytest.raises(EnvironmentFaultError, match="prefix_calls is 3, expected 0 to 2"):
            env.start(EASY, prefix_calls=3)

    @pytest.mark.parametrize("prompt", ["full", "names", "compact"])
    def test_prompt_modes_hide_tools_that_can_still_be_called(self, prompt: str) -> None:
        config = CalculatorConfig.model_validate({"num_tasks": 3, "prompt": prompt})
        session = calculator(config).start(EASY, prefix_calls=0)
        tools = session.tools()
        assert bool(tools) == (prompt != "compact")
        assert any(tool.parameters for tool in tools) == (prompt == "full")
        assert set(session.call_schemas()) == {"add", "subtract", "multiply", "divide", "submit"}
        assert play_expert(session).passed


class TestVerdict:
    def test_a_guess_is_right_and_does_not_pass(self, env: QuestionEnvironment) -> None:
        session = env.start(EASY, prefix_calls=0)
        assert told(session, "submit", answer=answer_of(env, EASY)) == "recorded"
        outcome = session.finish()
        assert not outcome.passed
        assert outcome.verdict == {
            "answer_correct": True,
            "answer_seen": False,
            "submitted": True,
            "reason": "no tool has shown the answer",
        }
        assert outcome.reward == pytest.approx(0.1)  # its call was valid, and reached nothing

    def test_the_first_answer_counts(self, env: QuestionEnvironment) -> None:
        name, arguments = first_call(env, EASY)
        session = env.start(EASY, prefix_calls=0)
        told(session, name, **arguments)
        told(session, "submit", answer=123456)
        assert "an answer has been submitted" in refused(
            session, "submit", answer=answer_of(env, EASY)
        )
        assert "an answer has been submitted" in refused(session, name, **arguments)
        outcome = session.finish()
        assert (outcome.passed, outcome.verdict["reason"]) == (False, "wrong answer")
        assert outcome.reward_parts == {"passed": 0.0, "progress": 0.5, "valid_calls": 0.5}
        assert outcome.reward == pytest.approx(0.3 * 0.5 + 0.1 * 0.5)

    def test_a_refused_submission_is_none(self, env: QuestionEnvironment) -> None:
        session = env.start(EASY, prefix_calls=1)
        assert "answer must be a single value, found list" in refused(
            session, "submit", answer=[answer_of(env, EASY)]
        )
        told(session, "submit", answer=answer_of(env, EASY))
        assert session.finish().passed

    def test_any_way_to_the_answer_passes_in_full(self, env: QuestionEnvironment) -> None:
        session = env.start(EASY, prefix_calls=0)
        refused(session, "divide", a=1, b=0)
        told(session, "add", a=answer_of(env, EASY), b=0)
        told(session, "submit", answer=str(answer_of(env, EASY)))
        outcome = session.finish()
        assert (outcome.passed, outcome.reward) == (True, 1.0)
        assert set(outcome.reward_parts.values()) == {1.0}

    def test_work_without_an_answer_is_progress(self, env: QuestionEnvironment) -> None:
        expert = env.questions[MEDIUM].expert_calls
        session = env.start(MEDIUM, prefix_calls=1)
        do(session, *expert[1:-1])
        outcome = session.finish()
        assert (outcome.passed, outcome.verdict["reason"]) == (False, "nothing submitted")
        due = len(expert) - 1
        assert outcome.reward_parts["progress"] == pytest.approx((due - 1) / due)

    def test_results_of_the_prefix_are_no_progress(self, env: QuestionEnvironment) -> None:
        expert = env.questions[MEDIUM].expert_calls
        session = env.start(MEDIUM, prefix_calls=1)
        do(session, expert[0])
        assert session.finish().reward_parts["progress"] == 0

    def test_weights_of_the_reward(self) -> None:
        reward = QuestionReward(passed=0.8, progress=0.2, valid_calls=0.0)
        env = calculator(CalculatorConfig(num_tasks=3, reward=reward))
        name, arguments = first_call(env, EASY)
        session = env.start(EASY, prefix_calls=0)
        told(session, name, **arguments)
        assert session.finish().reward == pytest.approx(0.2 * 0.5)

    @pytest.mark.parametrize("parts", [(0.5, 0.3, 0.1), (0.0, 0.9, 0.1), (1.0, 0.1, 0.0)], ids=str)
    def test_weights_that_do_not_add_up_are_refused(
        self, parts: tuple[float, float, float]
    ) -> None:
        with pytest.raises(ValidationError, match=r"expected a sum of 1, and more than 0"):
            QuestionReward(passed=parts[0], progress=parts[1], valid_calls=parts[2])


class TestMistakes:
    def test_what_cannot_be_read(self, env: QuestionEnvironment) -> None:
        session = env.start(EASY, prefix_calls=0)
        broken = ParsedCall(status=ParseStatus.MALFORMED, raw="<x>", error="no name")
        (observation,) = session.step([broken])
        assert observation.is_error
        assert json.loads(observation.content)["error"] == "call not executed (malformed): no name"
        due = session.expert_tail()[0]
        assert len(due) == 2, "an unreadable call takes nothing off"

    @pytest.mark.parametrize(
        ("name", "arguments", "problem"),
        [
            ("eval", {"a": 1}, "unknown tool 'eval'; known are add, subtract"),
            ("__class__", {}, "unknown tool"),
            ("x" * 5000, {}, "unknown tool 'xxx"),
            ("add", {"a": 1}, "add: missing arguments ['b']"),
            ("add", {"a": 1, "b": 2, "c": 3}, "unexpected arguments ['c'], expected ['a', 'b']"),
            ("add", {"a": "9" * 30_000, "b": 2}, "more than 20000 characters"),
            ("submit", {}, "submit: missing arguments ['answer']"),
        ],
    )
    def test_calls_that_fit_no_tool(
        self, env: QuestionEnvironment, name: str, arguments: dict[str, object], problem: str
    ) -> None:
        session = env.start(EASY, prefix_calls=0)
        (observation,) = do(session, call(name, **arguments))
        assert observation.is_error
        assert problem in json.loads(observation.content)["error"]
        assert len(observation.content) < 500
        assert not session.finish().passed

    def test_observations_are_cut(self) -> None:
        env = calculator(CalculatorConfig(num_tasks=3, max_observation_chars=20))
        (observation,) = do(env.start(EASY, prefix_calls=0), call("nothing"))
        assert len(observation.content) == 20
        assert observation.content.endswith("[cut]")

    def test_a_closed_session_is_a_fault(self, env: QuestionEnvironment) -> None:
        session = env.start(EASY, prefix_calls=0)
        session.finish()
        for use in (session.finish, session.next_user_turn, lambda: session.step([])):
            with pytest.raises(EnvironmentFaultError, match="the session is closed"):
                use()


class Shelf:
    """Tools that say when they are closed."""

    def __init__(self) -> None:
        self.num_closed = 0

    def call(self, name: str, arguments: Mapping[str, Any]) -> ToolResult:
        raise ToolError("out of order")

    def close(self) -> None:
        self.num_closed += 1


def test_tools_are_closed_with_the_session_and_where_it_does_not_open() -> None:
    opened: list[Shelf] = []

    def open_tools(question: Question) -> Shelf:
        opened.append(Shelf())
        return opened[-1]

    family = replace(FAMILY, open_tools=open_tools, draw=lambda level, rng: Question("?", (), "no"))
    config = CalculatorConfig(num_tasks=1)
    QuestionEnvironment(family, config).start(EASY, prefix_calls=0).finish()
    broken = Question("?", (call("add", a=1, b=2),), "no")
    family = replace(family, draw=lambda level, rng: broken)
    with pytest.raises(EnvironmentFaultError, match=r"the expert's own call add.* out of order"):
        QuestionEnvironment(family, config).start(EASY, prefix_calls=0)
    assert [shelf.num_closed for shelf in opened] == [1, 1]


def test_sessions_are_private(env: QuestionEnvironment) -> None:
    """Two episodes of one task, call by call in turns: neither sees what the other found."""
    working, guessing = (env.start(MEDIUM, prefix_calls=0) for _ in range(2))
    for made in env.questions[MEDIUM].expert_calls[:-1]:
        do(working, made)
        refused(guessing, "divide", a=1, b=0)
    answer = answer_of(env, MEDIUM)
    told(guessing, "submit", answer=answer)
    told(working, "submit", answer=answer)
    assert guessing.expert_tail() == [[]]
    assert (guessing.finish().verdict["answer_seen"], working.finish().passed) == (False, True)
