"""What must hold for every environment of one question, whatever its tools are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hypothesis import strategies as st

from miniverl_dist.environments.base import Observation, Outcome, Session
from miniverl_dist.environments.players import as_parsed, play_expert, play_nothing
from miniverl_dist.environments.question import QuestionEnvironment
from miniverl_dist.schemas.messages import ParsedCall, ParseStatus, ToolCall

Make = Callable[..., QuestionEnvironment]
"""Takes fields of the config section."""

DIFFICULTIES = ("easy", "medium", "hard")


def places(environment: QuestionEnvironment) -> Iterator[tuple[str, int]]:
    """Every task at every K at which a call is due."""
    for task_id, info in environment.tasks().items():
        for prefix_calls in range(info.num_calls):
            yield task_id, prefix_calls


def audit(environment: QuestionEnvironment) -> None:
    """The expert passes from every K, at once or call by call; who does nothing never does."""
    for task_id, prefix_calls in places(environment):
        where = f"{task_id} at K = {prefix_calls}"
        outcome = play_expert(environment.start(task_id, prefix_calls=prefix_calls))
        assert (outcome.passed, outcome.reward) == (True, 1.0), (where, outcome)
        assert outcome == play_singly(environment.start(task_id, prefix_calls=prefix_calls)), where
        outcome = play_nothing(environment.start(task_id, prefix_calls=prefix_calls))
        assert (outcome.passed, outcome.reward) == (False, 0.0), (where, outcome)


def play_singly(session: Session) -> Outcome:
    """The expert again, one call a message, as a policy that reads each result would."""
    while due := session.expert_tail()[0]:
        (observation,) = session.step(as_parsed(due[:1]))
        assert not observation.is_error, observation
    assert session.next_user_turn() is None
    return session.finish()


def call(name: str, /, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def do(session: Session, *calls: ToolCall) -> list[Observation]:
    return session.step(as_parsed(calls))


def told(session: Session, name: str, /, **arguments: Any) -> str:
    """What a call is answered with, which must not be an error."""
    (observation,) = do(session, call(name, **arguments))
    assert not observation.is_error, observation.content
    return observation.content


def refused(session: Session, name: str, /, **arguments: Any) -> str:
    """The words of an error observation."""
    (observation,) = do(session, call(name, **arguments))
    assert observation.is_error, observation.content
    words = json.loads(observation.content)
    assert list(words) == ["error"]
    return str(words["error"])


def answer_of(environment: QuestionEnvironment, task_id: str) -> Any:
    """What the expert submits."""
    return environment.questions[task_id].expert_calls[-1].arguments["answer"]


def random_calls(names: Sequence[str], arguments: Sequence[str]) -> st.SearchStrategy[ParsedCall]:
    """Calls that a model might make: known and unknown names and arguments, any JSON value."""
    scalar = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(max_size=20),
        st.from_regex(r"/?[a-z]{0,8}(/[0-9a-z~]{0,6}){0,4}", fullmatch=True),
        st.from_regex(r"(SELECT|WITH|DROP|PRAGMA)[ a-z*(),;']{0,30}", fullmatch=True),
        st.decimals(allow_nan=False, allow_infinity=False, places=3).map(str),
    )
    value = st.recursive(
        scalar,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=6,
    )
    made = st.builds(
        ToolCall,
        name=st.sampled_from(names) | st.text(max_size=8),
        arguments=st.dictionaries(st.sampled_from(arguments) | st.text(max_size=4), value),
    )
    readable = made.map(lambda c: ParsedCall(status=ParseStatus.OK, call=c, raw=""))
    broken = st.sampled_from([s for s in ParseStatus if s is not ParseStatus.OK]).map(
        lambda status: ParsedCall(status=status, raw="", error="broken")
    )
    return readable | broken


def play_messages(session: Session, messages: Sequence[Sequence[ParsedCall]]) -> Outcome:
    """Run whatever was drawn; every observation is one text, and an outcome is well-formed."""
    for calls in messages:
        observations = session.step(calls)
        assert len(observations) == len(calls)
        assert all(isinstance(o.content, str) for o in observations)
    outcome = session.finish()
    assert 0 <= outcome.reward <= 1
    assert outcome.passed == (outcome.reward == 1)
    assert all(0 <= part <= 1 for part in outcome.reward_parts.values())
    return outcome
