"""Two policies without a model: the expert, who must always pass, and one that does nothing.

They play any ``Session``. The audits use them to show that the environment is right, and
evaluations to print the do-nothing pass rate beside every other.
"""

from __future__ import annotations

from collections.abc import Sequence

from miniverl_dist.environments.base import Outcome, Session
from miniverl_dist.schemas.messages import ParsedCall, ParseStatus, ToolCall


def as_parsed(calls: Sequence[ToolCall]) -> list[ParsedCall]:
    """Calls as a parser would have found them in a message."""
    return [
        ParsedCall(status=ParseStatus.OK, call=call, raw=call.model_dump_json()) for call in calls
    ]


def play_expert(session: Session) -> Outcome:
    """Make the expert's remaining calls, one message per user turn that has any."""
    while True:
        due = session.expert_tail()[0]
        if due:
            session.step(as_parsed(due))
        if session.next_user_turn() is None:
            return session.finish()


def play_nothing(session: Session) -> Outcome:
    """Answer every user turn without a call."""
    while session.next_user_turn() is not None:
        pass
    return session.finish()
