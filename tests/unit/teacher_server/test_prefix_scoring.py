"""Scoring an episode turn by turn: what is asked when, what is kept, and the same scores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from miniverl_dist.errors import ConfigError, UnspellableBytesError
from miniverl_dist.generate_api.app import serving
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.schemas.running_episode import RunningEpisode
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal, TeacherScore
from miniverl_dist.schemas.trajectory import Trajectory
from teacher_server.app import build_teacher_app
from teacher_server.batching import BatchLimits, TextScorer
from teacher_server.client import HttpTeacher
from teacher_server.prefix_scoring import PrefixScorer, PrefixScores, ScoredPrefix
from teacher_server.rendering import TeacherRendering
from teacher_server.scorer import load_scorer
from tests.support.faulty_server import entries_of, reply_with
from tests.support.http_faults import Act, Answer, reply, scripted_server
from tests.support.teachers import IDENTITY, SumScorer, rendering, trajectory

pytestmark = pytest.mark.timeout(60)
ONCE = ClientLimits(max_retries=0, deadline_s=20, request_deadline_s=20)
TEXT = tuple(range(20, 50))
SPANS = ((3, 6), (10, 12), (15, 21), (24, 28))
"""Teacher tokens of four turns; what stands behind the last one is scored for nobody."""


def so_far(num_turns: int) -> RunningEpisode:
    """The episode when turn ``num_turns`` is about to be written."""
    return RunningEpisode("t0", "g", "task", "s" * 64, tuple(range(num_turns)), (), ())


class Renderer:
    """Renders the first turns of one text, and a trajectory as all of it."""

    def __init__(
        self, text: Sequence[int] = TEXT, spans: Sequence[tuple[int, int]] = SPANS
    ) -> None:
        self.text, self.spans = tuple(text), tuple(spans)

    def __call__(self, record: RunningEpisode | Trajectory) -> TeacherRendering:
        if isinstance(record, Trajectory):
            return rendering(self.text, *self.spans)
        num_turns = len(record.token_ids)
        return rendering(self.text[: self.spans[num_turns][0]], *self.spans[:num_turns])


class World:
    """A prefix scorer and a teacher that uses what it keeps, with a client each."""

    def __init__(self, url: str | Sequence[str], renderer: Renderer, **changes: Any) -> None:
        self.teacher = HttpTeacher(
            GenerateClient(url, limits=ONCE),
            renderer,
            IDENTITY,
            max_prefill_tokens=500,
            deadline_s=20,
        )
        arguments: dict[str, Any] = {"max_prefill_tokens": 500} | changes
        self.prefixes = PrefixScorer(GenerateClient(url, limits=ONCE), renderer, **arguments)
        self.teacher.reuse(self.prefixes)

    async def idle(self) -> None:
        async with asyncio.timeout(10):
            while self.prefixes.num_running:  # noqa: ASYNC110 - it tells nobody when it is idle
                await asyncio.sleep(0.002)

    async def play(self, *turns: int) -> None:
        """Tell of turns, each scored before the next."""
        for turn in turns:
            self.prefixes.turn(so_far(turn))
            await self.idle()
        self.prefixes.end("t0", will_be_scored=True)


@asynccontextmanager
async def world_at(
    url: str | Sequence[str], renderer: Renderer, **changes: Any
) -> AsyncIterator[World]:
    made = World(url, renderer, **changes)
    try:
        yield made
    finally:
        await made.prefixes.close()
        await made.teacher.close()


@asynccontextmanager
async def world(
    scorer: TextScorer, renderer: Renderer | None = None, **changes: Any
) -> AsyncIterator[World]:
    async with (
        serving(build_teacher_app(scorer)) as url,
        world_at(url, renderer or Renderer(), **changes) as made,
    ):
        yield made


def logprobs(result: object) -> list[float]:
    assert isinstance(result, TeacherScore), result
    return [value for span in result.spans for value in span.logprobs]


async def test_each_call_asks_for_one_turn_and_the_scores_are_those_of_one_call() -> None:
    scorer = SumScorer()
    async with world(scorer) as made:
        await made.play(1, 2, 3)
        found = await made.teacher.score(trajectory())
        asked, scorer.asked = scorer.asked, []
        whole = await made.teacher.score(trajectory())
    assert (
        asked
        == [
            (TEXT[:10], 3),  # with all that stands before the second turn
            (TEXT[:15], 10),
            (TEXT[:24], 15),
            (TEXT[:28], 24),
        ]
    )
    assert scorer.asked == [(TEXT[:28], 3)]  # kept scores are handed out once
    assert isinstance(found, TeacherScore)
    assert isinstance(whole, TeacherScore)
    assert found.model_copy(update={"seconds": 0.0}) == whole.model_copy(update={"seconds": 0.0})
    assert made.teacher.num_kept_tokens == 11
    assert made.prefixes.counts == {"calls": 3, "taken": 1, "taken_tokens": 7 + 5 + 9}


@pytest.mark.parametrize(
    ("dtype", "atol", "rtol"),
    # float32 has 2.4e-7 to 9.5e-7 between neighbours at these scores.
    [("float64", 1e-6, 0.0), ("float32", 0.0, 1e-6)],
)
async def test_an_hf_model_computes_each_token_once_and_scores_within_1e_6(
    dtype: str, atol: float, rtol: float
) -> None:
    tiny_hf = pytest.importorskip("tests.support.tiny_hf")
    rng = np.random.default_rng(0)
    text = rng.integers(0, 290, 190).tolist()
    spans = ((100, 108), (120, 131), (150, 151), (170, 188))
    folder = tiny_hf.model_folder("qwen3")
    scorer = load_scorer(folder, dtype=dtype, limits=BatchLimits())
    renderer = Renderer(text, spans)
    async with world(scorer, renderer) as made:
        await made.play(1, 2, 3)
        found = logprobs(await made.teacher.score(trajectory()))
    async with world(load_scorer(folder, dtype=dtype), renderer) as made:
        whole = logprobs(await made.teacher.score(trajectory()))
    assert scorer.num_kept_tokens == 188
    np.testing.assert_allclose(found, whole, rtol=rtol, atol=atol)


async def test_all_calls_of_a_group_go_to_the_server_that_holds_its_prefix() -> None:
    first, second = SumScorer(), SumScorer()
    async with (
        serving(build_teacher_app(first)) as one,
        serving(build_teacher_app(second)) as other,
        world_at((one, other), Renderer()) as made,
    ):
        for member in range(8):
            group = f"group-{member}"
            made.prefixes.turn(replace(so_far(1), group_id=group))
            await made.idle()
            made.prefixes.turn(replace(so_far(3), group_id=group))
            await made.idle()
            made.prefixes.end("t0", will_be_scored=True)
            played = trajectory().model_copy(update={"group_id": group})
            assert isinstance(await made.teacher.score(played), TeacherScore)
    lengths = [[len(ids) for ids, _ in scorer.asked] for scorer in (first, second)]
    assert sum(map(len, lengths)) == 3 * 8
    for found in lengths:
        assert found == [10, 24, 28] * (len(found) // 3)


@pytest.mark.parametrize("changed", [0, 7, 26])
async def test_scores_of_another_text_are_thrown_away(changed: int) -> None:
    scorer, kept = SumScorer(), PrefixScores()
    other = (*TEXT[:changed], 9, *TEXT[changed + 1 :])
    kept.keep("t0", ScoredPrefix(other, np.full(len(other), -9.0)))
    async with world(scorer) as made:
        made.teacher.reuse(kept)
        await made.teacher.score(trajectory())
    assert scorer.asked == [(TEXT[:28], 3)]
    assert made.teacher.num_kept_tokens == 0


async def test_a_turn_of_another_text_begins_anew() -> None:
    scorer, renderer = SumScorer(), Renderer()
    async with world(scorer, renderer) as made:
        made.prefixes.turn(so_far(1))
        await made.idle()
        renderer.text = (*TEXT[:4], 9, *TEXT[5:])
        await made.play(2)
        found = logprobs(await made.teacher.score(trajectory()))
        whole = logprobs(await made.teacher.score(trajectory()))
    assert [start for _, start in scorer.asked] == [3, 3, 15, 3]
    assert found == whole


async def test_nothing_is_asked_where_all_is_known() -> None:
    scorer = SumScorer()
    async with world(scorer) as made:
        kept = PrefixScores()
        kept.keep("t0", ScoredPrefix(TEXT, np.arange(len(TEXT)) * -1.0))
        made.teacher.reuse(kept)
        found = logprobs(await made.teacher.score(trajectory()))
    assert scorer.asked == []
    assert found == [-float(i) for start, end in SPANS for i in range(start, end)]


class GatedScorer(SumScorer):
    """Scores once the gate is open."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.at_work = threading.Event(), threading.Event()

    def score(self, token_ids: Sequence[int], start: int) -> NDArray[np.float64]:
        self.at_work.set()
        assert self.gate.wait(20)
        return super().score(token_ids, start)


async def reached(event: threading.Event) -> None:
    assert await asyncio.to_thread(event.wait, 10)


async def test_one_call_at_a_time_and_the_newest_text_is_next() -> None:
    scorer = GatedScorer()
    async with world(scorer) as made:
        made.prefixes.turn(so_far(1))
        await reached(scorer.at_work)
        made.prefixes.turn(so_far(2))
        made.prefixes.turn(so_far(3))
        assert made.prefixes.num_running == 1
        scorer.gate.set()
        await made.idle()
    assert scorer.asked == [(TEXT[:10], 3), (TEXT[:24], 10)]
    assert made.prefixes.counts == {"calls": 2, "superseded": 1}


async def test_an_end_stops_the_call_and_the_teacher_asks_for_what_it_lacks() -> None:
    scorer = GatedScorer()
    async with world(scorer) as made:
        made.prefixes.turn(so_far(2))
        await reached(scorer.at_work)
        made.prefixes.turn(so_far(3))
        made.prefixes.end("t0", will_be_scored=True)
        await made.idle()
        scorer.gate.set()
        assert len(logprobs(await made.teacher.score(trajectory()))) == 15
    assert scorer.asked[-1] == (TEXT[:28], 3)
    assert made.prefixes.counts == {"calls": 1, "cancelled": 1}


async def test_scores_are_kept_only_for_what_will_be_scored() -> None:
    async with world(SumScorer()) as made:
        made.prefixes.turn(so_far(1))
        await made.idle()
        made.prefixes.end("t0", will_be_scored=False)
        made.prefixes.end("never-seen", will_be_scored=True)
        assert made.prefixes.take("t0") is None
        assert made.prefixes.take("never-seen") is None
        await made.play(1)  # played once more
        assert made.prefixes.take("t0") is not None
        assert made.prefixes.take("t0") is None


async def test_closing_stops_what_runs() -> None:
    scorer = GatedScorer()
    async with world(scorer) as made:
        made.prefixes.turn(so_far(1))
        await reached(scorer.at_work)
        async with asyncio.timeout(60):
            await made.prefixes.close()
        assert made.prefixes.num_running == 0
        scorer.gate.set()


def scored(body: dict[str, Any]) -> Act:
    return reply(body=reply_with(body, entries_of(body)))


def without_last(body: dict[str, Any]) -> Act:
    return reply(body=reply_with(body, entries_of(body)[:-1]))


@pytest.mark.parametrize(
    ("fault", "counted"),
    [
        (reply(429, {"error": "busy"}), "ServerUnavailableError"),
        (reply(400, {"error": "no"}), "RequestRejectedError"),
        (without_last, "ReplyMismatchError"),
        (reply(body=b"{"), "MalformedReplyError"),
    ],
)
async def test_a_failure_is_counted_and_its_spans_go_with_the_next(
    fault: Answer, counted: str
) -> None:
    async with (
        scripted_server(fault, scored, scored) as server,
        world_at(server.url, Renderer()) as made,
    ):
        await made.play(1, 2)
        found = logprobs(await made.teacher.score(trajectory()))
    assert made.prefixes.counts[counted] == 1
    assert len(server.received) == 3  # not one retry
    assert [r.json["logprob_start_len"] + 1 for r in server.received] == [3, 3, 15]
    assert len(found) == 15


async def test_an_episode_that_cannot_be_rendered_is_counted_and_no_more() -> None:
    class Unspellable(Renderer):
        def __call__(self, record: RunningEpisode | Trajectory) -> TeacherRendering:
            raise UnspellableBytesError("no byte 7")

    async with world(SumScorer(), Unspellable()) as made:
        await made.play(1)
        assert made.prefixes.counts == {"UnspellableBytesError": 1}
        refused = await made.teacher.score(trajectory())
    assert isinstance(refused, TeacherRefusal)
    assert refused.reason is RefusalReason.REJECTED


async def test_a_text_that_is_too_long_is_not_sent() -> None:
    scorer = SumScorer()
    async with world(scorer, max_prefill_tokens=12) as made:
        await made.play(1, 2)
    assert [len(ids) for ids, _ in scorer.asked] == [10]
    assert made.prefixes.counts["too_long"] == 1


async def test_a_teacher_whose_weights_change_keeps_no_scores() -> None:
    teacher = HttpTeacher(
        GenerateClient("http://127.0.0.1:9"),
        Renderer(),
        IDENTITY,
        max_prefill_tokens=500,
        deadline_s=1,
        policy_version=lambda: 3,
    )
    with pytest.raises(ConfigError, match=r"weights change.*teacher\.prefix_scoring"):
        teacher.reuse(PrefixScores())
