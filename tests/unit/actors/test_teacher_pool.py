"""Servers that the run launched: a dead one is started anew, a refusal of a living one stands."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from actors.supervisor import RestartBudget
from actors.teacher_pool import TeacherHost, TeacherPool
from miniverl_dist.errors import ConfigError, EngineError, EngineLostError, TokenizerMismatchError
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal, TeacherResult, TeacherScore
from miniverl_dist.schemas.trajectory import Trajectory
from tests.fakes import FakeClock, FakeTeacher, Log, run_config, trajectory
from tests.support.pools import FakeServer, Told, restart_budget, until


def told_of(group: int, member: int = 0) -> Trajectory:
    place = Assignment(ticket=group, task_id="a", prefix_calls=0, tail_calls=1)
    return trajectory(place=place, member=member)


class Servers:
    """Starts servers and connects to them, as the cluster does; either may fail."""

    def __init__(self) -> None:
        self.log: Log = []
        self.told = Told()
        self.made: list[FakeServer] = []
        self.scorers: dict[str, FakeTeacher] = {}
        self.connections: list[object] = []
        """Held here, so that nothing but the pool can end one."""
        self.start_errors: deque[Exception] = deque()
        self.attach_errors: deque[Exception] = deque()
        self.refuse: Callable[[Trajectory], RefusalReason | None] = lambda told: None

    async def make(self, index: int) -> FakeServer:
        await asyncio.sleep(0)
        if self.start_errors:
            raise self.start_errors.popleft()
        number = sum(server.url.startswith(f"http://{index}.") for server in self.made)
        server = FakeServer(f"http://{index}.{number}")
        self.made.append(server)
        return server

    def attach(self, url: str) -> AbstractAsyncContextManager[FakeTeacher]:
        connection = self._connection(url)
        self.connections.append(connection)
        return connection

    @asynccontextmanager
    async def _connection(self, url: str) -> AsyncIterator[FakeTeacher]:
        if self.attach_errors:
            raise self.attach_errors.popleft()
        [server] = [server for server in self.made if server.url == url]

        def refuse(told: Trajectory) -> RefusalReason | None:
            return self.refuse(told) if server.stands else RefusalReason.UNAVAILABLE

        self.scorers[url] = scorer = FakeTeacher([], f"teacher at {url}", refuse)
        self.log.append(f"connect {url}")
        try:
            yield scorer
        finally:
            self.log.append(f"disconnect {url}")

    async def pool(self, num_servers: int = 1, budget: RestartBudget | None = None) -> TeacherPool:
        """An open pool."""
        pool = TeacherPool(
            self.make,
            self.attach,
            num_servers=num_servers,
            budget=budget or restart_budget(2),
            tell=self.told,
        )
        await pool.open()
        return pool


async def score(pool: TeacherPool, told: Trajectory) -> TeacherResult:
    return await asyncio.wait_for(pool.score(told), 5)


def reason(result: TeacherResult) -> RefusalReason | None:
    return result.reason if isinstance(result, TeacherRefusal) else None


@pytest.fixture
async def servers() -> Servers:
    return Servers()


async def test_siblings_share_a_server_and_groups_are_spread(servers: Servers) -> None:
    pool = await servers.pool(3)
    for group in range(30):
        for member in range(3):
            assert isinstance(await score(pool, told_of(group, member)), TeacherScore)
    asked = [{line.split(".")[0] for line in t.log} for t in servers.scorers.values()]
    assert sum(len(groups) for groups in asked) == 30
    assert set.union(*asked) == {f"score {group:06d}" for group in range(30)}
    assert min(len(groups) for groups in asked) >= 4
    assert pool.teacher_id == "teacher at http://0.0"


async def test_a_dead_server_is_started_once_for_all_that_wait_for_it(servers: Servers) -> None:
    pool = await servers.pool(budget=restart_budget(1))
    servers.made[0].stands = False
    results = await asyncio.gather(*(score(pool, told_of(g)) for g in range(5)))
    assert all(isinstance(result, TeacherScore) for result in results)
    assert [server.url for server in servers.made] == ["http://0.0", "http://0.1"]
    assert [len(scorer.log) for scorer in servers.scorers.values()] == [5, 5]
    assert servers.told.lines == [
        ("engine_lost", "teacher-0", "http://0.0 is gone"),
        ("engine_restarted", "teacher-0", ""),
    ]
    assert servers.log == ["connect http://0.0", "connect http://0.1", "disconnect http://0.0"]


async def test_a_server_that_does_not_answer_is_ended_before_another_takes_its_place(
    servers: Servers,
) -> None:
    """One that hangs still holds the place, its device and its memory."""
    pool = await servers.pool()
    former = servers.made[0]
    former.stands = False
    make, ended = servers.make, []

    async def watching(index: int) -> FakeServer:
        ended.append(former.num_ends)
        return await make(index)

    pool._make = watching
    assert isinstance(await score(pool, told_of(0)), TeacherScore)
    assert ended == [1]


async def test_only_the_server_that_died_is_started(servers: Servers) -> None:
    pool = await servers.pool(3)
    servers.made[1].stands = False
    results = [await score(pool, told_of(group)) for group in range(12)]
    assert all(isinstance(result, TeacherScore) for result in results)
    assert [server.url for server in servers.made[3:]] == ["http://1.1"]


async def test_the_refusal_of_a_living_server_stands(servers: Servers) -> None:
    pool = await servers.pool()
    servers.refuse = lambda told: RefusalReason.UNAVAILABLE
    assert reason(await score(pool, told_of(0))) is RefusalReason.UNAVAILABLE
    assert (len(servers.made), len(servers.scorers["http://0.0"].log)) == (1, 1)
    assert servers.told.lines == []


@pytest.mark.parametrize("other", [r for r in RefusalReason if r is not RefusalReason.UNAVAILABLE])
async def test_another_refusal_stands_whatever_became_of_the_server(
    servers: Servers, other: RefusalReason
) -> None:
    pool = await servers.pool()

    def dies(told: Trajectory) -> RefusalReason:
        servers.made[0].stands = False
        return other

    servers.refuse = dies
    assert reason(await score(pool, told_of(0))) is other
    assert len(servers.made) == 1


async def test_beyond_the_budget_a_dead_server_stays_dead(servers: Servers) -> None:
    clock = FakeClock()
    pool = await servers.pool(budget=restart_budget(1, clock))
    servers.made[0].stands = False
    assert isinstance(await score(pool, told_of(0)), TeacherScore)
    servers.made[1].stands = False
    assert reason(await score(pool, told_of(1))) is RefusalReason.UNAVAILABLE
    assert len(servers.made) == 2
    clock.time = 100.0
    assert isinstance(await score(pool, told_of(2)), TeacherScore)


async def test_living_servers_cost_no_budget(servers: Servers) -> None:
    pool = await servers.pool(budget=restart_budget(1))
    servers.refuse = lambda told: RefusalReason.UNAVAILABLE
    for group in range(3):
        await score(pool, told_of(group))
    servers.refuse, servers.made[0].stands = lambda told: None, False
    assert isinstance(await score(pool, told_of(3)), TeacherScore)


async def test_a_start_that_fails_leaves_the_refusal_and_is_tried_for_the_next(
    servers: Servers,
) -> None:
    pool = await servers.pool()
    servers.made[0].stands = False
    servers.start_errors.append(EngineLostError("no GPU"))
    assert reason(await score(pool, told_of(0))) is RefusalReason.UNAVAILABLE
    assert servers.told.lines[-1] == ("engine_lost", "teacher-0", "it did not start: no GPU")
    assert isinstance(await score(pool, told_of(1)), TeacherScore)
    assert servers.told.lines[-1][0] == "engine_restarted"


async def test_a_server_that_cannot_be_used_is_ended(servers: Servers) -> None:
    pool = await servers.pool()
    servers.made[0].stands = False
    servers.attach_errors.append(TokenizerMismatchError("another tokenizer"))
    assert reason(await score(pool, told_of(0))) is RefusalReason.UNAVAILABLE
    assert servers.made[1].num_ends == 1
    why = "it did not start: the teacher server http://0.1 cannot be used: another tokenizer"
    assert servers.told.lines[-1] == ("engine_lost", "teacher-0", why)


async def test_a_pool_that_cannot_connect_does_not_open(servers: Servers) -> None:
    servers.attach_errors.append(TokenizerMismatchError("another tokenizer"))
    with pytest.raises(EngineError, match=r"http://0\.0 cannot be used: another tokenizer"):
        await servers.pool()
    assert servers.made[0].num_ends == 1


async def test_those_who_ask_meanwhile_wait_for_the_restart(servers: Servers) -> None:
    pool = await servers.pool(budget=restart_budget(1))
    make, may_start = servers.make, asyncio.Event()

    async def slow(index: int) -> FakeServer:
        servers.log.append("starting")
        await may_start.wait()
        return await make(index)

    pool._make = slow
    servers.made[0].stands = False
    first = asyncio.create_task(score(pool, told_of(0)))
    await until(lambda: "starting" in servers.log)
    late = asyncio.create_task(score(pool, told_of(1)))
    await until(lambda: len(servers.scorers["http://0.0"].log) == 2)
    assert not first.done()
    assert not late.done()
    may_start.set()
    assert all(isinstance(r, TeacherScore) for r in await asyncio.gather(first, late))
    assert servers.log.count("starting") == 1


async def test_closing_disconnects_and_ends_every_server(servers: Servers) -> None:
    pool = await servers.pool(2)
    servers.made[0].stands = False
    await asyncio.gather(*(score(pool, told_of(group)) for group in range(12)))
    await pool.close()
    await pool.close()
    urls = {"http://0.0", "http://0.1", "http://1.0"}
    assert {line.split()[1] for line in servers.log if line.startswith("disconnect")} == urls
    assert len(servers.log) == 6
    assert [server.num_ends for server in servers.made] == [1, 1, 1]


async def test_a_teacher_without_a_model_cannot_be_served() -> None:
    from pathlib import Path

    host = TeacherHost(run_config(), Path("unused"))
    with pytest.raises(ConfigError, match=r"no teacher\.model to serve"):
        await host.start("127.0.0.1")
