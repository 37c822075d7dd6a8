from __future__ import annotations

from collections.abc import Sequence

import pytest

from miniverl_dist.environments.base import Observation, Outcome
from miniverl_dist.environments.players import as_parsed, play_expert, play_nothing
from miniverl_dist.schemas.messages import Message, ParsedCall, ToolCall, ToolSchema


class CountingSession:
    """A session whose task is to make so many calls per turn."""

    def __init__(self, *due: int) -> None:
        self.due = list(due)
        self.made = [0] * len(due)
        self.messages = 0
        self.turn = 0

    def opening(self) -> list[Message]:
        return []

    def tools(self) -> list[ToolSchema]:
        return []

    def step(self, calls: Sequence[ParsedCall]) -> list[Observation]:
        self.messages += 1
        self.made[self.turn] += len(calls)
        return [Observation(content="", is_error=False) for _ in calls]

    def next_user_turn(self) -> Message | None:
        if self.turn == len(self.due) - 1:
            return None
        self.turn += 1
        return Message(role="user", content=str(self.turn))

    def expert_tail(self) -> list[list[ToolCall]]:
        call = ToolCall(name="f", arguments={})
        turns = zip(self.due[self.turn :], self.made[self.turn :], strict=True)
        return [[call] * (due - made) for due, made in turns]

    def finish(self) -> Outcome:
        passed = self.made == self.due
        return Outcome(passed=passed, reward=float(passed), reward_parts={}, verdict={})

    def close(self) -> None:
        """Nothing to free."""


@pytest.mark.parametrize("due", [(2,), (1, 0, 3), (0, 0), (0, 1, 0)])
def test_the_expert_makes_all_calls_in_one_message_per_turn(due: tuple[int, ...]) -> None:
    session = CountingSession(*due)
    assert play_expert(session).passed
    assert session.messages == sum(number > 0 for number in due)


def test_nothing_walks_through_all_turns_without_a_call() -> None:
    session = CountingSession(1, 2)
    assert not play_nothing(session).passed
    assert (session.turn, session.messages) == (1, 0)


def test_as_parsed_keeps_calls_and_their_order() -> None:
    calls = [ToolCall(name="a", arguments={"x": 1}), ToolCall(name="b", arguments={})]
    assert [parsed.call for parsed in as_parsed(calls)] == calls
