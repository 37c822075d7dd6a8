from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import pytest

from miniverl_dist.config.recipe import RewardWeights
from miniverl_dist.environments.base import Environment, Session
from miniverl_dist.environments.players import as_parsed, play_expert, play_nothing
from miniverl_dist.errors import EnvironmentFaultError, TaskNotFoundError
from miniverl_dist.schemas.messages import Message, ParsedCall, ParseStatus, ToolCall
from rollout_server.bfcl.environment import BfclEnvironment, BfclOptions, BfclSession
from rollout_server.bfcl.tasks import BfclTask

pytestmark = [
    pytest.mark.bfcl,
    pytest.mark.skipif(
        importlib.util.find_spec("bfcl_eval") is None,
        reason="bfcl-eval is not installed: scripts/install_bfcl.sh",
    ),
]

TASK = "multi_turn_base_0"
"""Turns of 3, 2, 1 and 4 calls."""
GAPS = "multi_turn_base_180"
"""Turns of 2, 2, 1, 0, 0 and 2 calls."""
EMPTY_END = "multi_turn_base_167"
"""Turns of 1, 2, 1, 1 and 0 calls."""


@pytest.fixture(scope="module")
def env() -> BfclEnvironment:
    return BfclEnvironment()


def roles(messages: Sequence[Message]) -> str:
    return "".join(message.role[0] for message in messages)


def made_up(env: BfclEnvironment, **changes: object) -> BfclEnvironment:
    """The environment with a changed task 0."""
    task: BfclTask = env.data.task(TASK).model_copy(update=changes)
    return BfclEnvironment(data=replace(env.data, tasks={TASK: task}))


def malformed(raw: str = '{"a":1') -> ParsedCall:
    return ParsedCall(status=ParseStatus.MALFORMED, raw=raw, error="not closed")


def test_it_is_an_environment(env: BfclEnvironment) -> None:
    environment: Environment = env
    session: Session = environment.start(TASK, prefix_calls=0)
    assert environment.name == "bfcl"
    assert len(environment.tasks()) == 200
    assert environment.tasks()[TASK].num_calls == 10
    assert environment.provenance()["version"] == "2026.3.23"
    session.close()


class TestOpening:
    @pytest.mark.parametrize(
        ("task_id", "prefix_calls", "expected"),
        [
            (TASK, 0, "u"),
            (TASK, 1, "uat"),
            (TASK, 2, "uatat"),
            (TASK, 3, "uatatat" + "u"),  # the boundary: the next call is due in the next turn
            (TASK, 4, "uatatat" + "uat"),
            (TASK, 10, "uatatat" + "uatat" + "uat" + "uatatatat"),
            (GAPS, 4, "uatat" + "uatat" + "u"),
            (GAPS, 5, "uatat" + "uatat" + "uat" + "u" + "u" + "u"),  # over both empty turns
            (GAPS, 6, "uatat" + "uatat" + "uat" + "u" + "u" + "uat"),
            (EMPTY_END, 5, "uat" + "uatat" + "uat" + "uat" + "u"),
        ],
    )
    def test_the_model_takes_over_where_its_first_call_is_due(
        self, env: BfclEnvironment, task_id: str, prefix_calls: int, expected: str
    ) -> None:
        session = env.start(task_id, prefix_calls=prefix_calls)
        messages = session.opening()
        assert roles(messages) == expected
        task = env.data.task(task_id)
        told = [m.content for m in messages if m.role == "user"]
        assert told == list(task.turns[: len(told)])
        called = [m.tool_calls for m in messages if m.role == "assistant"]
        assert called == [(call,) for call in task.expert_calls[:prefix_calls]]

    def test_prefix_calls_are_written_by_the_given_writer(self) -> None:
        env = BfclEnvironment(write_calls=lambda calls: f"<{'|'.join(c.name for c in calls)}>")
        messages = env.start(TASK, prefix_calls=2).opening()
        assert [m.content for m in messages if m.role == "assistant"] == ["<cd>", "<mkdir>"]

    def test_observations_are_those_of_the_calls(self, env: BfclEnvironment) -> None:
        messages = env.start(TASK, prefix_calls=2).opening()
        observations = [m.content for m in messages if m.role == "tool"]
        assert observations == ['{"current_working_directory": "document"}', "None"]

    @pytest.mark.parametrize("prefix_calls", [-1, 11])
    def test_prefix_out_of_range(self, env: BfclEnvironment, prefix_calls: int) -> None:
        with pytest.raises(EnvironmentFaultError, match="expected 0 to 10"):
            env.start(TASK, prefix_calls=prefix_calls)

    def test_unknown_task(self, env: BfclEnvironment) -> None:
        with pytest.raises(TaskNotFoundError, match="multi_turn_base_20"):
            env.start("multi_turn_base_200", prefix_calls=0)


class TestPrompt:
    def test_peer_21_every_tool_is_shown_under_full(self, env: BfclEnvironment) -> None:
        for task_id in env.tasks():
            shown = env.start(task_id, prefix_calls=0).tools()
            task = env.data.task(task_id)
            documented = {t.name for name in task.classes for t in env.data.schemas[name]}
            assert {tool.name for tool in shown} == documented - set(task.excluded)
            assert all(tool.description and "type" in tool.parameters for tool in shown)

    @pytest.mark.parametrize("prompt", ["names", "compact"])
    def test_the_short_prompts_show_the_turn_of_step_k_alone(
        self, env: BfclEnvironment, prompt: Literal["names", "compact"]
    ) -> None:
        short = BfclEnvironment(BfclOptions(prompt=prompt))
        messages = short.start(TASK, prefix_calls=4).opening()
        assert roles(messages) == "uat"
        assert messages == env.start(TASK, prefix_calls=4).opening()[-3:]
        assert roles(short.start(GAPS, prefix_calls=5).opening()) == "u"

    def test_tools_of_the_short_prompts(self, env: BfclEnvironment) -> None:
        full = env.start(TASK, prefix_calls=0).tools()
        names = BfclEnvironment(BfclOptions(prompt="names")).start(TASK, prefix_calls=0).tools()
        assert [tool.name for tool in names] == [tool.name for tool in full]
        assert all(tool.description == "" and tool.parameters == {} for tool in names)
        compact = BfclEnvironment(BfclOptions(prompt="compact"))
        assert compact.start(TASK, prefix_calls=0).tools() == []
        assert play_expert(compact.start(TASK, prefix_calls=3)).reward == pytest.approx(1.0)


class TestCut:
    def test_observations_are_cut_but_the_verdict_sees_all(self, env: BfclEnvironment) -> None:
        short = BfclEnvironment(BfclOptions(max_observation_chars=12))
        session = short.start(TASK, prefix_calls=1)
        assert max(len(m.content) for m in session.opening() if m.role == "tool") == 12
        longest = 0
        while True:
            for observation in session.step(as_parsed(session.expert_tail()[0])):
                longest = max(longest, len(observation.content))
            if session.next_user_turn() is None:
                break
        assert longest == 12
        assert session.finish().passed


class TestStep:
    def test_all_calls_of_a_message_run_in_order(self, env: BfclEnvironment) -> None:
        session = env.start(TASK, prefix_calls=0)
        calls = [
            ToolCall(name="cd", arguments={"folder": "document"}),
            ToolCall(name="mkdir", arguments={"dir_name": "temp"}),
            ToolCall(name="ls", arguments={}),
        ]
        observations = session.step(as_parsed(calls))
        assert [o.is_error for o in observations] == [False, False, False]
        assert '"temp"' in observations[2].content

    def test_peer_23_two_parallel_calls_both_run_and_both_earn(self, env: BfclEnvironment) -> None:
        session = env.start(TASK, prefix_calls=8)
        due = session.expert_tail()[0]
        assert len(due) == 2
        assert len(session.step(as_parsed(due))) == 2
        outcome = session.finish()
        assert outcome.passed
        assert outcome.reward == pytest.approx(1.0)

    def test_only_the_first_call_of_a_message_executed_is_not_what_happens(
        self, env: BfclEnvironment
    ) -> None:
        # The tutorial ran one call per message: three calls in one message would leave two undone.
        session = env.start("multi_turn_base_3", prefix_calls=0)
        num_calls = 0
        while True:
            due = session.expert_tail()[0]
            num_calls += len(session.step(as_parsed(due)))
            if session.next_user_turn() is None:
                break
        assert num_calls == env.data.task("multi_turn_base_3").num_calls == 5
        assert session.finish().passed

    def test_peer_24_malformed_json_is_an_observation_and_the_episode_goes_on(
        self, env: BfclEnvironment
    ) -> None:
        session = env.start(TASK, prefix_calls=9)
        (observation,) = session.step([malformed()])
        assert observation.is_error
        assert "not closed" in json.loads(observation.content)["error"]
        session.step(as_parsed(session.expert_tail()[0]))
        outcome = session.finish()
        assert outcome.passed
        # The malformed call held the only expert call's place, and was one of two attempts.
        assert outcome.reward_parts == {
            "mean_partial": 0.0,
            "first_call": 0.0,
            "exec_score": 0.5,
            "terminal_pass": 1.0,
        }

    def test_a_malformed_call_between_good_ones_stops_neither(self, env: BfclEnvironment) -> None:
        session = env.start(TASK, prefix_calls=8)
        first, second = as_parsed(session.expert_tail()[0])
        errors = [o.is_error for o in session.step([first, malformed(), second])]
        assert errors == [False, True, False]
        assert session.finish().passed

    def test_no_calls(self, env: BfclEnvironment) -> None:
        assert env.start(TASK, prefix_calls=0).step([]) == []


class TestExpertTail:
    def test_one_list_per_turn_from_the_current_one(self, env: BfclEnvironment) -> None:
        session = env.start(GAPS, prefix_calls=3)
        assert [len(turn) for turn in session.expert_tail()] == [1, 1, 0, 0, 2]
        session.next_user_turn()
        assert [len(turn) for turn in session.expert_tail()] == [1, 0, 0, 2]

    def test_calls_made_are_taken_off(self, env: BfclEnvironment) -> None:
        session = env.start(TASK, prefix_calls=0)
        first = session.expert_tail()[0]
        session.step(as_parsed(first[:1]))
        assert session.expert_tail()[0] == first[1:]
        session.step(as_parsed(first))
        assert session.expert_tail()[0] == []


class TestTurns:
    def test_user_turns_come_in_order_and_end(self, env: BfclEnvironment) -> None:
        session = env.start(TASK, prefix_calls=3)
        told = []
        while (message := session.next_user_turn()) is not None:
            told.append(message)
        assert [m.content for m in told] == list(env.data.task(TASK).turns[2:])
        assert {m.role for m in told} == {"user"}
        assert session.next_user_turn() is None


class TestFunctionsThatComeLater:
    """Task 0 of ``miss_func``: its fourth user turn brings ``sort``, the third has no call."""

    task = "multi_turn_miss_func_0"

    def start(self, prefix_calls: int, prompt: str = "full") -> BfclSession:
        options = BfclOptions.model_validate({"categories": ("miss_func",), "prompt": prompt})
        return BfclEnvironment(options).start(self.task, prefix_calls=prefix_calls)

    def test_unknown_until_its_turn_then_shown_and_callable(self) -> None:
        session = self.start(5)
        sort = as_parsed([ToolCall(name="sort", arguments={"file_name": "final_report.pdf"})])
        schemas = session.call_schemas()
        assert "sort" not in schemas
        (early,) = session.step(sort)
        assert "Unknown function 'sort'" in early.content
        message = session.next_user_turn()
        assert message is not None
        first, shown, last, said = message.content.split("\n")
        assert (first, last) == ("<tools>", "</tools>")
        function = json.loads(shown)["function"]
        assert function["name"] == "sort"
        assert function["parameters"]["required"] == ["file_name"]
        assert said.startswith("I have updated some more functions")
        assert "sort" in schemas
        (late,) = session.step(sort)
        assert not late.is_error

    @pytest.mark.parametrize(
        ("prompt", "shown"), [("full", '"name": "sort"'), ("names", "Tools: sort\n")]
    )
    def test_behind_its_turn_the_history_or_the_first_turn_shows_it(
        self, prompt: str, shown: str
    ) -> None:
        for prefix_calls in (6, 7, 8):
            session = self.start(prefix_calls, prompt)
            told = [m.content for m in session.opening() if m.role == "user"]
            assert sum(shown in text for text in told) == 1, prefix_calls
            assert "sort" not in {tool.name for tool in session.tools()}
            assert "sort" in session.call_schemas()

    def test_compact_shows_the_words_alone(self) -> None:
        session = self.start(5, "compact")
        message = session.next_user_turn()
        assert message is not None
        assert message.content.startswith("I have updated")

    def test_the_opening_answers_a_turn_in_which_nothing_can_be_done(self) -> None:
        assert roles(self.start(5).opening()) == "uatatat" + "uatat" + "u"
        assert roles(self.start(6).opening()) == "uatatat" + "uatat" + "ua" + "uat" + "u"

    def test_abstained_says_whether_nothing_was_called_there(self) -> None:
        session = self.start(5)
        assert play_expert(session).verdict["abstained"] is True
        session = self.start(5)
        session.step(as_parsed([ToolCall(name="ls", arguments={})]))
        assert play_expert(session).verdict["abstained"] is False
        assert play_expert(self.start(6)).verdict["abstained"] is None


class TestOutcome:
    def test_a_perfect_tail_earns_one_at_any_horizon(self, env: BfclEnvironment) -> None:
        # T = 1, 4 and all 10: the divisor is N - K, never a horizon beyond the task's calls.
        for prefix_calls in (9, 6, 0):
            outcome = play_expert(env.start(TASK, prefix_calls=prefix_calls))
            assert outcome.reward == pytest.approx(1.0)

    def test_peer_22_no_calls_earn_no_reward(self, env: BfclEnvironment) -> None:
        outcome = play_nothing(env.start(TASK, prefix_calls=9))
        assert not outcome.passed
        assert outcome.reward == 0.0

    def test_peer_22_unreadable_calls_earn_no_reward(self, env: BfclEnvironment) -> None:
        session = env.start(TASK, prefix_calls=9)
        session.step([malformed("<function=diff>"), malformed('{"name": "diff"')])
        assert session.finish().reward == 0.0

    def test_a_call_that_was_cut_off_earns_nothing_though_its_name_was_read(
        self, env: BfclEnvironment
    ) -> None:
        session = env.start(TASK, prefix_calls=9)
        (due,) = session.expert_tail()[0]
        session.step([ParsedCall(status=ParseStatus.TRUNCATED, call=due, raw="<tool_call>")])
        assert session.expert_tail()[0] == [due]
        assert session.finish().reward == 0.0

    def test_a_do_nothing_state_is_not_a_pass(self, env: BfclEnvironment) -> None:
        # The last call of task 0 reads two files: doing nothing leaves the right state.
        outcome = play_nothing(env.start(TASK, prefix_calls=9))
        assert outcome.verdict["state_only"] is True
        assert outcome.verdict["response_only"] is False
        assert outcome.verdict["reason"] == "end: responses missing"
        assert not outcome.passed

    def test_verdict_columns(self, env: BfclEnvironment) -> None:
        outcome = play_expert(env.start(TASK, prefix_calls=0))
        assert outcome.verdict == {
            "passed": True,
            "state_only": True,
            "response_only": True,
            "official_per_turn": True,
            "reason": None,
            "first_call_match": True,
        }

    @pytest.mark.parametrize(
        ("prefix_calls", "calls", "expected"),
        [
            (9, [], False),
            (9, [ToolCall(name="ls", arguments={})], False),
            (10, [], True),
            (10, [ToolCall(name="ls", arguments={})], False),
        ],
    )
    def test_the_first_call_matches_the_expert_s(
        self, env: BfclEnvironment, prefix_calls: int, calls: list[ToolCall], expected: bool
    ) -> None:
        session = env.start(TASK, prefix_calls=prefix_calls)
        session.step(as_parsed(calls))
        assert session.finish().verdict["first_call_match"] is expected

    def test_weights_reach_the_reward(self) -> None:
        weights = RewardWeights(mean_partial=0, first_call=0, exec_score=0, terminal_pass=1)
        env = BfclEnvironment(weights=weights)
        session = env.start(TASK, prefix_calls=9)
        session.step(as_parsed([ToolCall(name="ls", arguments={})]))
        assert session.finish().reward == 0.0


class TestFaults:
    """Faults of the harness are raised, never turned into a failed verdict."""

    def test_a_broken_start_state(self, env: BfclEnvironment) -> None:
        broken = made_up(env, initial_config={"GorillaFileSystem": {"root": {"w": {}}}})
        with pytest.raises(EnvironmentFaultError, match=f"{TASK}, building the start state"):
            broken.start(TASK, prefix_calls=0)

    def test_a_prefix_that_does_not_replay(self, env: BfclEnvironment) -> None:
        wrong = ToolCall(name="cd", arguments={"folder": "nowhere"})
        broken = made_up(env, expert_turns=((wrong,), (), (), ()))
        with pytest.raises(EnvironmentFaultError, match=r"expert's own call cd.*nowhere"):
            broken.start(TASK, prefix_calls=1)

    def test_an_expert_that_fails_in_the_verdict(self, env: BfclEnvironment) -> None:
        wrong = ToolCall(name="cd", arguments={"folder": "nowhere"})
        broken = made_up(env, expert_turns=((wrong,), (), (), ()))
        with pytest.raises(EnvironmentFaultError, match="data and code of bfcl-eval do not fit"):
            play_nothing(broken.start(TASK, prefix_calls=0))

    def test_a_closed_session(self, env: BfclEnvironment) -> None:
        session: BfclSession = env.start(TASK, prefix_calls=0)
        session.close()
        session.close()
        for use in (lambda: session.step([]), session.next_user_turn, session.finish):
            with pytest.raises(EnvironmentFaultError, match="closed"):
                use()

    def test_finish_only_once(self, env: BfclEnvironment) -> None:
        session = env.start(TASK, prefix_calls=0)
        session.finish()
        with pytest.raises(EnvironmentFaultError, match="closed"):
            session.finish()
