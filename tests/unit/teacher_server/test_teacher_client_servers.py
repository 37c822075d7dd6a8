"""The teacher behind several servers and a breaker, and with weights that change or must not."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from miniverl_dist.errors import TeacherError, TokenizerMismatchError
from miniverl_dist.generate_api.breaker import BreakerLimits
from miniverl_dist.generate_api.client import ClientLimits, GenerateClient
from miniverl_dist.generate_api.probe import probe_text
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal, TeacherScore
from miniverl_dist.schemas.trajectory import Trajectory
from teacher_server.client import HttpTeacher, LocalTeacher, Renderer
from tests.support.faulty_server import entries_of, reply_with
from tests.support.http_faults import (
    RESET,
    Act,
    Answer,
    FakeClock,
    ScriptedServer,
    reply,
    scripted_server,
)
from tests.support.teachers import IDENTITY, SumScorer, rendering, trajectory

RENDERED = rendering([10, 20, 30, 40, 50, 60, 70], (1, 1), (2, 4), (5, 6))
LIMITS = ClientLimits(request_deadline_s=5, max_retries=1, retry_backoff_s=0.5)
NUM_GROUPS = 40
"""Groups go by the servers' ports, which differ from run to run: with ten, all went to one server
once in 500 runs."""


def scored(body: dict[str, Any]) -> Act:
    return reply(body=reply_with(body, entries_of(body)))


def without_last(body: dict[str, Any]) -> Act:
    *entries, (_, token, _) = entries_of(body)
    return reply(body=reply_with(body, [*entries, [None, token, None]]))


def as_rendered(asked: Trajectory) -> Any:
    del asked
    return RENDERED


@asynccontextmanager
async def http_teacher(
    *script: Answer,
    limits: ClientLimits = LIMITS,
    deadline_s: float = 20,
    wait: bool = False,
    policy_version: Callable[[], int] | None = None,
) -> AsyncIterator[tuple[HttpTeacher, ScriptedServer, FakeClock]]:
    clock = FakeClock()
    async with scripted_server(*script) as server:
        teacher = HttpTeacher(
            GenerateClient(server.url, limits=limits, clock=clock),
            as_rendered,
            IDENTITY,
            max_prefill_tokens=100,
            deadline_s=deadline_s,
            wait=wait,
            clock=clock,
            policy_version=policy_version,
        )
        try:
            yield teacher, server, clock
        finally:
            await teacher.close()


def behind(renderer: Renderer, *servers: ScriptedServer) -> HttpTeacher:
    urls = [server.url for server in servers]
    return HttpTeacher(
        GenerateClient(urls, limits=LIMITS),
        renderer,
        IDENTITY,
        max_prefill_tokens=100,
        deadline_s=20,
    )


def of_group(name: str, group: str) -> Trajectory:
    return trajectory(name).model_copy(update={"group_id": group})


async def test_a_groups_siblings_are_scored_by_one_server() -> None:
    async with scripted_server(scored) as first, scripted_server(scored) as second:
        teacher = behind(
            lambda asked: rendering([ord(c) for c in asked.trajectory_id], (1, 3)), first, second
        )
        for group in range(NUM_GROUPS):
            before = len(first.received)
            for member in range(3):
                # Their texts differ from the first token on: the group alone keeps them together.
                result = await teacher.score(of_group(f"{member}{group}x", f"g{group}"))
                assert isinstance(result, TeacherScore)
            assert len(first.received) - before in (0, 3)
        await teacher.close()
    assert 0 < len(first.received) < 3 * NUM_GROUPS


@pytest.mark.parametrize("is_own", [True, False])
async def test_a_student_that_teaches_itself_shares_no_prefix_between_versions(
    is_own: bool,
) -> None:
    version = [4]
    current = (lambda: version[0]) if is_own else None
    async with http_teacher(scored, policy_version=current) as (teacher, server, _):
        await teacher.score(trajectory())
        version[0] = 5
        await teacher.score(trajectory())
    keys = [each.json.get("extra_key") for each in server.received]
    assert keys == (["policy-4", "policy-5"] if is_own else [None, None])


async def test_refusals_are_counted_by_reason() -> None:
    rejected = reply(400, {"error": {"message": "too long"}})
    script = (rejected, scored, without_last, rejected)
    async with http_teacher(*script) as (teacher, _, _):
        for _ in script:
            await teacher.score(trajectory())
    assert teacher.refusals == {RefusalReason.REJECTED: 2, RefusalReason.NOT_FINITE: 1}
    local = LocalTeacher(SumScorer(), as_rendered, IDENTITY, max_prefill_tokens=5, deadline_s=5)
    await local.score(trajectory())
    assert local.refusals == {RefusalReason.TOO_LONG: 1}


async def test_wait_outlasts_an_open_breaker() -> None:
    limits = ClientLimits(
        request_deadline_s=5,
        max_retries=0,
        breaker=BreakerLimits(failures_in_a_row=1, open_s=6.5),
    )
    options: Any = {"limits": limits, "wait": True, "deadline_s": 100}
    async with http_teacher(RESET, scored, **options) as (teacher, server, clock):
        assert isinstance(await teacher.score(trajectory()), TeacherScore)
        assert len(server.received) == 2
        assert sum(clock.sleeps) == 7
    async with http_teacher(RESET, scored, **options | {"wait": False}) as (teacher, server, _):
        for said in ("ClientOSError|ServerDisconnected|ConnectionReset", "left alone"):
            result = await teacher.score(trajectory())
            assert isinstance(result, TeacherRefusal)
            assert result.reason == RefusalReason.UNAVAILABLE
            assert re.search(said, result.detail)
        assert len(server.received) == 1


def drifting() -> Answer:
    """A server whose weights move with each request."""
    count = iter(range(1, 100))

    def answer(body: dict[str, Any]) -> Act:
        by = next(count)
        first, *rest = entries_of(body)
        entries = [first, *([-by / 10, token, None] for _, token, _ in rest)]
        return reply(body=reply_with(body, entries))

    return answer


async def test_a_teacher_that_scores_the_same_text_differently_is_refused() -> None:
    text = probe_text(range(20, 40))
    async with http_teacher(scored) as (teacher, server, _):
        await teacher.require_stable_scores(text, tolerance=0.0)
    assert len(server.received) == 2
    async with http_teacher(drifting()) as (teacher, _, _):
        await teacher.require_stable_scores(text, tolerance=0.11)
        with pytest.raises(TeacherError, match=r"two scores.*difference 0\.1 nats"):
            await teacher.require_stable_scores(text, tolerance=0.09)


async def test_every_server_has_to_read_the_same_tokenizer() -> None:
    info = {"model_path": "m"}
    own = reply(body=info | {"tokenizer_fingerprint": IDENTITY.tokenizer_fingerprint})
    foreign = reply(body=info | {"tokenizer_fingerprint": "0" * 64})
    async with scripted_server(own) as first, scripted_server(own, foreign) as second:
        teacher = behind(as_rendered, first, second)
        await teacher.require_same_tokenizer()
        with pytest.raises(TokenizerMismatchError, match=second.url):
            await teacher.require_same_tokenizer()
        await teacher.close()
