from __future__ import annotations

from collections.abc import Sequence

import pytest

from miniverl_dist.environments.base import Session
from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineLostError,
    MalformedReplyError,
    MiniverlError,
    RequestRejectedError,
    TokenizerError,
)
from rollout_server.episode import EpisodePlayer
from rollout_server.first_faults import EarlyStop
from rollout_server.policies import Moment, Turn
from tests.fake_stage import ScriptedEnvironment, assignment, stage
from tests.fakes import FakeClock

WRITTEN = Turn((65,), None, (), "length")
SESSION = ScriptedEnvironment().start("a", prefix_calls=0)
FORBIDDEN = RequestRejectedError("no key", status=401)
TOO_LONG = RequestRejectedError("too long", status=400)


class Script:
    """Ends its requests one after the other."""

    def __init__(self, *ends: MiniverlError | Turn) -> None:
        self.ends = list(ends)

    async def act(self, prompt: Sequence[int], session: Session, moment: Moment) -> Turn:
        end = self.ends.pop(0)
        if isinstance(end, Turn):
            return end
        raise end


async def played(*ends: MiniverlError | Turn, max_faults: int = 3) -> list[type[Exception] | None]:
    """How each request ends for who asks."""
    policy, found = EarlyStop(Script(*ends), "openai:m", max_faults=max_faults), []
    for _ in ends:
        try:
            await policy.act([], SESSION, Moment(0, 9, 0))
            found.append(None)
        except MiniverlError as error:
            found.append(type(error))
    return found


@pytest.mark.parametrize(
    "fault",
    [
        FORBIDDEN,
        MalformedReplyError("x"),
        EngineError("x"),
        DeadlineError("x"),
        TokenizerError("x"),
    ],
)
async def test_one_fault_from_the_start_ends_it(fault: MiniverlError) -> None:
    assert await played(fault, fault, fault) == [type(fault), type(fault), ConfigError]


async def test_the_error_says_who_failed_and_how() -> None:
    policy = EarlyStop(Script(FORBIDDEN), "openai:m", max_faults=1)
    with pytest.raises(ConfigError, match=r"policy openai:m: none .* the last 1 .*: no key") as end:
        await policy.act([], SESSION, Moment(0, 9, 0))
    assert end.value.__cause__ is FORBIDDEN


async def test_one_turn_that_was_written_settles_it() -> None:
    found = await played(FORBIDDEN, FORBIDDEN, WRITTEN, *[FORBIDDEN] * 5)
    assert ConfigError not in found


async def test_faults_of_different_kinds_are_counted_apart() -> None:
    assert ConfigError not in await played(*[FORBIDDEN, FORBIDDEN, TOO_LONG] * 3)
    assert (await played(FORBIDDEN, *[TOO_LONG] * 3))[-1] is ConfigError


async def test_a_lost_engine_is_nothing_to_count() -> None:
    lost = EngineLostError("gone")
    assert await played(lost, lost, lost, lost) == [EngineLostError] * 4


async def test_it_comes_through_an_episode() -> None:
    policy = EarlyStop(Script(FORBIDDEN, FORBIDDEN), "openai:m", max_faults=2)
    player = EpisodePlayer(stage(), policy, seed=0, clock=FakeClock())
    lost = await player.rollout(assignment(prefix_calls=0), 0)
    assert lost.termination == "engine_error"
    with pytest.raises(ConfigError, match="no key"):
        await player.rollout(assignment(prefix_calls=0), 1)
