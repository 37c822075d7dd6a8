"""Whatever happens to its hosts, every episode is played, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import pytest

from actors.rollout_pool import RolloutPool
from miniverl_dist.errors import (
    ConfigError,
    DeadlineError,
    EngineError,
    EngineLostError,
    PublishError,
    StudentLostError,
)
from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.trajectory import Trajectory
from tests.fakes import FakeClock
from tests.support.pools import FakeHost, Told, restart_budget, until


def place(ticket: int) -> Assignment:
    return Assignment(ticket=ticket, task_id="a", prefix_calls=0, tail_calls=1)


class Hosts:
    """Makes hosts and admits them, as the cluster does; a test may let either fail or wait."""

    def __init__(self) -> None:
        self.made: dict[str, FakeHost] = {}
        self.admitted: list[str] = []
        self.discarded: list[str] = []
        self.told = Told()
        self.start_errors: deque[Exception] = deque()
        self.admit_errors: deque[Exception] = deque()
        self.may_start, self.may_admit = asyncio.Event(), asyncio.Event()
        self.may_start.set()
        self.may_admit.set()
        self.num_starts = 0
        self.gate: asyncio.Event | None = None
        """Episodes of hosts that are made from now on wait for it."""

    async def make(self, index: int, num_restarts: int) -> FakeHost:
        self.num_starts += 1
        await self.may_start.wait()
        if num_restarts and self.start_errors:
            raise self.start_errors.popleft()
        host = FakeHost(f"{index}.{num_restarts}", self.gate)
        assert host.name not in self.made, "a name must be unique within a run"
        self.made[host.name] = host
        return host

    async def admit(self, host: FakeHost) -> None:
        assert not host.played, "it has played before it had the weights"
        await self.may_admit.wait()
        if self.admit_errors:
            raise self.admit_errors.popleft()
        self.admitted.append(host.name)

    async def pool(self, num_hosts: int = 2, **changes: Any) -> RolloutPool[FakeHost]:
        """An open pool."""
        options = {"budget": restart_budget(2), "deadline_s": 5.0} | changes
        pool = RolloutPool(
            self.make,
            self.admit,
            num_hosts=num_hosts,
            tell=self.told,
            discard=self.discarded.append,
            **options,
        )
        await pool.open()
        return pool

    def played(self) -> dict[str, list[tuple[str, int]]]:
        """Host -> episodes begun there."""
        return {
            name: [(group, member) for _, group, member in host.played]
            for name, host in self.made.items()
        }


def player(played: Trajectory) -> str:
    return played.messages[1].content.removeprefix("by ")


async def play(pool: RolloutPool[FakeHost], ticket: int, member: int = 0) -> str:
    """Which host played it in the end; an error rather than for ever."""
    source = pool.source("training")
    return player(await asyncio.wait_for(source.rollout(place(ticket), member), 60))


def begin(pool: RolloutPool[FakeHost], ticket: int, member: int = 0) -> asyncio.Task[str]:
    return asyncio.create_task(play(pool, ticket, member))


async def names_in_rotation(pool: RolloutPool[FakeHost]) -> set[str]:
    return {await play(pool, ticket) for ticket in range(6)}


@pytest.fixture
async def hosts() -> Hosts:
    return Hosts()


class TestRotation:
    async def test_siblings_go_to_one_host_and_groups_take_turns(self, hosts: Hosts) -> None:
        pool = await hosts.pool(3)
        await asyncio.gather(*(play(pool, ticket, m) for m in range(3) for ticket in range(6)))
        siblings = [(0, 3), (1, 4), (2, 5)]
        assert {name: set(played) for name, played in hosts.played().items()} == {
            f"{index}.0": {(f"{ticket:06d}.0", m) for ticket in tickets for m in range(3)}
            for index, tickets in enumerate(siblings)
        }
        # Published to as one, before the first episode: nothing is admitted one by one.
        assert (hosts.admitted, hosts.told.lines) == ([], [])

    async def test_the_kind_of_episode_reaches_the_host(self, hosts: Hosts) -> None:
        pool = await hosts.pool(1)
        await pool.source("evaluation").rollout(place(4), 7)
        await pool.source("training").rollout(place(5), 0)
        assert hosts.made["0.0"].played == [
            ("evaluation", "000004.0", 7),
            ("training", "000005.0", 0),
        ]

    async def test_an_error_of_the_episode_itself_is_no_loss(self, hosts: Hosts) -> None:
        class Failing(FakeHost):
            async def play(self, *arguments: object) -> Trajectory:
                raise EngineError("the prompt is too long")

        pool = await hosts.pool(1)
        pool._rotation[0] = Failing("0.0")
        with pytest.raises(EngineError, match="too long"):
            await play(pool, 0)
        assert (hosts.told.lines, pool._restarts) == ([], {})


class TestLoss:
    async def test_the_episodes_of_a_lost_host_are_played_again_elsewhere(
        self, hosts: Hosts
    ) -> None:
        hosts.gate = asyncio.Event()
        hosts.may_admit.clear()
        pool = await hosts.pool(2)
        episodes = [begin(pool, 0, member) for member in range(3)]
        await until(lambda: len(hosts.made["0.0"].played) == 3)
        hosts.made["0.0"].die()
        await until(lambda: len(hosts.made["1.0"].played) == 3)
        hosts.gate.set()
        assert await asyncio.gather(*episodes) == ["1.0"] * 3
        assert hosts.played()["1.0"] == hosts.played()["0.0"]
        assert hosts.discarded == ["0.0"]
        assert hosts.told.lines == [("engine_lost", "0.0", "0.0 is gone")]
        await pool.close()

    async def test_peer_30_a_restarted_host_plays_again_after_it_has_the_weights(
        self, hosts: Hosts
    ) -> None:
        pool = await hosts.pool(2)
        hosts.may_admit.clear()
        hosts.made["0.0"].die()
        assert await play(pool, 0) == "1.0"
        await until(lambda: "0.1" in hosts.made)
        # It stands, but holds nothing yet.
        assert await names_in_rotation(pool) == {"1.0"}
        assert hosts.told.names == [("engine_lost", "0.0")]
        hosts.may_admit.set()
        await until(lambda: hosts.told.names[-1] == ("engine_restarted", "0.1"))
        assert hosts.admitted == ["0.1"]
        assert await names_in_rotation(pool) == {"0.1", "1.0"}
        assert hosts.made["0.0"].num_ends == 1

    async def test_several_episodes_of_one_lost_host_spend_one_restart(self, hosts: Hosts) -> None:
        hosts.gate = asyncio.Event()
        pool = await hosts.pool(1, budget=restart_budget(1))
        episodes = [begin(pool, ticket) for ticket in range(4)]
        await until(lambda: len(hosts.made["0.0"].played) == 4)
        hosts.gate = None
        hosts.made["0.0"].die()
        assert await asyncio.gather(*episodes) == ["0.1"] * 4
        assert hosts.told.names == [("engine_lost", "0.0"), ("engine_restarted", "0.1")]
        assert hosts.num_starts == 2

    async def test_a_host_that_is_lost_again_at_once_is_restarted_again(self, hosts: Hosts) -> None:
        pool = await hosts.pool(1, budget=restart_budget(3))
        for number in range(3):
            hosts.made[f"0.{number}"].die()
            assert await play(pool, 0) == f"0.{number + 1}"
        assert hosts.admitted == ["0.1", "0.2", "0.3"]
        assert pool._restarts == {}

    async def test_all_hosts_lost_together_come_back_together(self, hosts: Hosts) -> None:
        pool = await hosts.pool(2)
        for host in list(hosts.made.values()):
            host.die()
        assert {await play(pool, ticket) for ticket in (0, 1)} <= {"0.1", "1.1"}
        await until(lambda: len(hosts.admitted) == 2)
        assert await names_in_rotation(pool) == {"0.1", "1.1"}

    async def test_an_episode_that_takes_too_long_costs_the_host(self, hosts: Hosts) -> None:
        hosts.gate = asyncio.Event()
        pool = await hosts.pool(1, deadline_s=0.02)
        hosts.gate = None
        assert await play(pool, 0) == "0.1"
        lost = ("engine_lost", "0.0", "an episode took longer than 0.02 s")
        assert hosts.told.lines[0] == lost
        assert hosts.made["0.0"].num_ends == 1


class TestQuarantine:
    async def test_a_host_that_did_not_confirm_is_restarted(self, hosts: Hosts) -> None:
        pool = await hosts.pool(2)
        hosts.may_admit.clear()
        pool.quarantine("1.0", "checksum abc, expected def")
        assert await names_in_rotation(pool) == {"0.0"}
        hosts.may_admit.set()
        await until(lambda: hosts.admitted == ["1.1"])
        assert hosts.told.lines[0] == ("engine_lost", "1.0", "checksum abc, expected def")
        assert hosts.made["1.0"].num_ends == 1
        assert await names_in_rotation(pool) == {"0.0", "1.1"}

    async def test_a_name_that_has_left_already_costs_nothing(self, hosts: Hosts) -> None:
        pool = await hosts.pool(1)
        pool.quarantine("0.0", "late")
        pool.quarantine("0.0", "late")
        await until(lambda: hosts.admitted == ["0.1"])
        pool.quarantine("0.0", "late")
        assert await names_in_rotation(pool) == {"0.1"}
        assert len(hosts.told.lines) == 2


class TestBudget:
    async def test_with_other_hosts_standing_the_run_goes_on(self, hosts: Hosts) -> None:
        pool = await hosts.pool(2, budget=restart_budget(0))
        hosts.made["0.0"].die()
        assert await names_in_rotation(pool) == {"1.0"}
        await until(lambda: not pool._restarts)
        assert hosts.num_starts == 2
        assert hosts.made["0.0"].num_ends == 1

    async def test_with_none_left_everybody_is_told(self, hosts: Hosts) -> None:
        hosts.gate = asyncio.Event()
        pool = await hosts.pool(1, budget=restart_budget(1))
        hosts.start_errors.append(EngineError("no GPU"))
        episodes = [begin(pool, ticket) for ticket in range(3)]
        await until(lambda: len(hosts.made["0.0"].played) == 3)
        hosts.made["0.0"].die()
        found = await asyncio.gather(*episodes, return_exceptions=True)
        assert [type(error) for error in found] == [EngineError] * 3
        assert "no rollout actor is left, and there are no more 1 restarts in 100 s" in str(found)
        with pytest.raises(EngineError, match="no rollout actor is left"):
            await play(pool, 9)  # nor does one wait who comes later

    async def test_the_budget_is_shared_by_all_hosts(self, hosts: Hosts) -> None:
        pool = await hosts.pool(3, budget=restart_budget(2))
        for name in ("0.0", "1.0", "2.0"):
            pool.quarantine(name, "it went")
        await until(lambda: not pool._restarts)
        assert hosts.admitted == ["0.1", "1.1"]
        assert await names_in_rotation(pool) == {"0.1", "1.1"}

    async def test_the_window_slides(self, hosts: Hosts) -> None:
        clock = FakeClock()
        pool = await hosts.pool(1, budget=restart_budget(1, clock))
        hosts.made["0.0"].die()
        assert await play(pool, 0) == "0.1"
        clock.time = 100.0
        hosts.made["0.1"].die()
        assert await play(pool, 0) == "0.2"

    @pytest.mark.parametrize(
        "error",
        [EngineLostError("no GPU"), DeadlineError("too late"), ConfigError("no such file")],
        ids=lambda error: type(error).__name__,
    )
    async def test_a_start_that_fails_is_tried_again(self, hosts: Hosts, error: Exception) -> None:
        pool = await hosts.pool(1)
        hosts.start_errors.append(error)
        hosts.made["0.0"].die()
        assert await play(pool, 0) == "0.2"
        assert hosts.told.lines[1][2] == f"it did not start: {error}"
        assert hosts.told.names[2:] == [("engine_restarted", "0.2")]

    async def test_a_host_that_does_not_take_the_weights_is_ended_and_tried_again(
        self, hosts: Hosts
    ) -> None:
        pool = await hosts.pool(1)
        hosts.admit_errors.append(PublishError("checksum abc"))
        hosts.made["0.0"].die()
        assert await play(pool, 0) == "0.2"
        assert hosts.made["0.1"].num_ends == 1
        assert hosts.told.lines[1:] == [
            ("engine_lost", "0.1", "it did not take the weights: checksum abc"),
            ("engine_restarted", "0.2", ""),
        ]

    async def test_a_former_host_that_cannot_be_ended_is_replaced_all_the_same(
        self, hosts: Hosts
    ) -> None:
        class Stubborn(FakeHost):
            async def end(self) -> None:
                raise EngineLostError("its node is gone")

        pool = await hosts.pool(1)
        pool._rotation[0] = stubborn = Stubborn("0.0")
        stubborn.die()
        assert await play(pool, 0) == "0.1"


class TestClose:
    async def test_it_ends_every_host_that_stands(self, hosts: Hosts) -> None:
        pool = await hosts.pool(2)
        await pool.close()
        assert [host.num_ends for host in hosts.made.values()] == [1, 1]
        await pool.close()
        assert [host.num_ends for host in hosts.made.values()] == [1, 1]

    @pytest.mark.parametrize("where", ["start", "admit"])
    async def test_during_a_restart_it_leaves_no_task_and_no_host(
        self, hosts: Hosts, where: str
    ) -> None:
        before = asyncio.all_tasks()
        pool = await hosts.pool(1)
        (hosts.may_start if where == "start" else hosts.may_admit).clear()
        hosts.made["0.0"].die()
        waiting = begin(pool, 0)
        await until(lambda: hosts.num_starts == 2 if where == "start" else "0.1" in hosts.made)
        await pool.close()
        with pytest.raises(EngineError, match="no rollout actor is left"):
            await asyncio.wait_for(waiting, 60)
        assert asyncio.all_tasks() - before == set()
        assert [host.num_ends for host in hosts.made.values()] == [1] * len(hosts.made)

    async def test_before_a_restart_has_begun_it_leaves_nobody_waiting(self, hosts: Hosts) -> None:
        pool = await hosts.pool(1)
        pool.quarantine("0.0", "late")
        await pool.close()
        with pytest.raises(EngineError, match="no rollout actor is left"):
            await play(pool, 0)
        assert hosts.num_starts == 1

    async def test_hosts_that_end_while_they_play_are_not_started_anew(self, hosts: Hosts) -> None:
        before = asyncio.all_tasks()
        hosts.gate = asyncio.Event()
        pool = await hosts.pool(2)
        episodes = [begin(pool, ticket) for ticket in range(2)]
        await until(lambda: all(host.played for host in hosts.made.values()))
        await pool.close()
        found = await asyncio.gather(*episodes, return_exceptions=True)
        assert [type(error) for error in found] == [EngineError] * 2
        assert asyncio.all_tasks() - before == set()
        assert (hosts.num_starts, hosts.told.lines) == (2, [])

    async def test_an_episode_that_is_abandoned_while_it_waits_harms_nobody(
        self, hosts: Hosts
    ) -> None:
        pool = await hosts.pool(1)
        hosts.may_start.clear()
        hosts.made["0.0"].die()
        waiting = [begin(pool, ticket) for ticket in range(3)]
        await until(lambda: hosts.num_starts == 2)
        waiting[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting[0]
        hosts.may_start.set()
        assert await asyncio.gather(*waiting[1:]) == ["0.1", "0.1"]
        assert [group for group, _ in hosts.played()["0.1"]] == ["000001.0", "000002.0"]

    async def test_an_episode_that_is_abandoned_while_it_plays_costs_no_host(
        self, hosts: Hosts
    ) -> None:
        hosts.gate = asyncio.Event()
        pool = await hosts.pool(1)
        playing = begin(pool, 0)
        await until(lambda: hosts.made["0.0"].played)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing
        hosts.gate.set()
        assert await play(pool, 1) == "0.0"
        assert hosts.told.lines == []


async def test_a_student_that_is_lost_meanwhile_ends_the_attempt_and_not_the_pool(
    hosts: Hosts,
) -> None:
    pool = await hosts.pool(1)
    hosts.admit_errors.append(StudentLostError("the student's ranks have ended"))
    hosts.made["0.0"].die()
    assert await play(pool, 0) == "0.2"
