"""What somebody who watches an episode is told, and when."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from miniverl_dist.errors import EngineError, EngineLostError
from miniverl_dist.schemas.running_episode import RunningEpisode
from miniverl_dist.schemas.trajectory import Trajectory
from rollout_server.episode import EpisodePlayer
from tests.fake_stage import (
    Answer,
    ScriptedEngine,
    assignment,
    call,
    engine_policy,
    play,
    reply,
    stage,
    wire,
)
from tests.fakes import FakeClock

LONG = assignment(prefix_calls=0, tail_calls=3)
ANSWERS = (wire(call(x=0), call(x=1)), "that was it", wire(call(x=2)), "done")
"""Two user turns with a call message and a text each."""


class Watching:
    """Writes down what it is told, and what the engine had been asked by then."""

    def __init__(self, engine: ScriptedEngine) -> None:
        self._engine = engine
        self.turns: list[RunningEpisode] = []
        self.num_asked: list[int] = []
        self.ends: list[tuple[str, bool]] = []

    def turn(self, episode: RunningEpisode) -> None:
        self.turns.append(episode)
        self.num_asked.append(len(self._engine.requests))

    def end(self, trajectory_id: str, *, will_be_scored: bool) -> None:
        self.ends.append((trajectory_id, will_be_scored))


def watched(*answers: Answer, **limits: object) -> tuple[EpisodePlayer, Watching, ScriptedEngine]:
    engine = ScriptedEngine(*answers)
    watcher = Watching(engine)
    player = EpisodePlayer(
        stage(**limits), engine_policy(engine), seed=0, clock=FakeClock(), watcher=watcher
    )
    return player, watcher, engine


async def test_each_turn_that_another_follows_is_told_with_the_next_prompt() -> None:
    player, watcher, engine = watched(*ANSWERS)
    played = await player.rollout(LONG, 1)
    assert [told.token_ids for told in watcher.turns] == [
        request.input_ids for request in engine.requests[1:]
    ]
    assert watcher.num_asked == [1, 2, 3]  # before the next turn is asked for
    assert watcher.ends == [("000004.0.1", True)]
    for told in watcher.turns:
        assert (told.trajectory_id, told.group_id) == (played.trajectory_id, played.group_id)
        assert told.task_id == played.task_id
        assert told.tokenizer_fingerprint == played.tokenizer_fingerprint


async def test_what_is_told_is_how_the_trajectory_begins() -> None:
    player, watcher, _ = watched(*ANSWERS)
    played = await player.rollout(LONG, 0)
    for told in watcher.turns:
        assert told.token_ids == played.token_ids[: len(told.token_ids)]
        assert told.spans == played.spans[: len(told.spans)]
        assert told.messages == played.messages[: len(told.messages)]
        assert told.spans[-1].end == len(told.token_ids)
        assert played.spans[len(told.spans)].sampled  # the turn that follows
    for earlier, later in pairwise(watcher.turns):
        assert len(later.token_ids) > len(earlier.token_ids)


async def test_an_episode_is_the_same_unwatched() -> None:
    player, _, _ = watched(*ANSWERS)
    watched_one = await player.rollout(LONG, 0)
    alone = await play(*ANSWERS, place=LONG)
    assert without_seconds(watched_one) == without_seconds(alone)


def without_seconds(played: Trajectory) -> str:
    return played.model_copy(update={"notes": {}}).model_dump_json()


@pytest.mark.parametrize(
    ("answers", "limits", "num_turns"),
    [
        ((EngineError("it died"),), {}, 0),
        ((wire(call("fault")),), {}, 0),
        ((ANSWERS[0], asyncio.Event()), {"episode_deadline_s": 2.0}, 1),
    ],
)
async def test_a_fault_of_the_harness_will_not_be_scored(
    answers: tuple[Answer, ...], limits: dict[str, object], num_turns: int
) -> None:
    player, watcher, _ = watched(*answers, **limits)
    await player.rollout(LONG, 0)
    assert watcher.ends == [("000004.0.0", False)]
    assert len(watcher.turns) == num_turns


async def test_no_turn_is_told_of_where_none_follows() -> None:
    player, watcher, _ = watched("done")
    await player.rollout(assignment(), 0)
    assert (watcher.turns, watcher.ends) == ([], [("000004.0.0", True)])
    player, watcher, _ = watched(*ANSWERS)
    await player.rollout(LONG, 0)
    full = len(watcher.turns[0].token_ids)
    player, watcher, engine = watched(ANSWERS[0], max_context_tokens=full)
    played = await player.rollout(LONG, 0)
    assert (played.termination.value, len(engine.requests)) == ("max_tokens", 1)
    assert watcher.turns == []


async def test_an_episode_that_is_lost_or_cancelled_has_ended() -> None:
    player, watcher, _ = watched(ANSWERS[0], EngineLostError("gone"))
    with pytest.raises(EngineLostError):
        await player.rollout(LONG, 0)
    assert watcher.ends == [("000004.0.0", False)]
    player, watcher, engine = watched(asyncio.Event())
    playing = asyncio.create_task(player.rollout(LONG, 0))
    while not engine.requests:  # noqa: ASYNC110 - the engine tells nobody when it is asked
        await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert watcher.ends == [("000004.0.0", False)]


async def test_a_turn_that_was_cut_is_told_with_its_end() -> None:
    player, watcher, engine = watched(reply(wire(call(x=0)), end=None, kind="length"), *ANSWERS[1:])
    await player.rollout(LONG, 0)
    assert watcher.turns[0].token_ids == engine.requests[1].input_ids
