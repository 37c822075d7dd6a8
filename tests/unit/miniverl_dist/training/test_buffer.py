from __future__ import annotations

import asyncio
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import DeadlineError, EngineError
from miniverl_dist.ports import Assignment, ScoredGroup
from miniverl_dist.training.buffer import BufferSizes, GroupBuffer
from tests.fakes import FakeCurriculum, group, trajectory


def sizes(
    num_groups: int = 2, lag: int = 0, refills: int = 2, deadline_s: float = 5.0
) -> BufferSizes:
    return BufferSizes(num_groups, lag, refills, deadline_s)


def filled(place: Assignment, *, num_publishes: int = 0, version: int = 0) -> ScoredGroup:
    return group(place, [trajectory(place=place, version=version)], num_publishes=num_publishes)


async def open_places(buffer: GroupBuffer) -> list[Assignment]:
    """All assignments that are handed out at this moment."""
    found: list[Assignment] = []
    while True:
        asking = asyncio.ensure_future(buffer.next_assignment())
        await asyncio.sleep(0)
        if not asking.done():
            asking.cancel()
            return found
        found.append(asking.result())


def tickets(groups: list[ScoredGroup]) -> list[int]:
    return [found.assignment.ticket for found in groups]


class TestSlots:
    @pytest.mark.parametrize(("lag", "num_groups"), [(0, 1), (0, 3), (1, 2), (3, 2)])
    async def test_capacity_is_the_staleness_bound(self, lag: int, num_groups: int) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(num_groups, lag))
        places = await open_places(buffer)
        assert [p.ticket for p in places] == list(range((lag + 1) * num_groups))

    async def test_slots_are_freed_by_release_only(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes())
        for place in await open_places(buffer):
            buffer.put(filled(place))
        assert await open_places(buffer) == []
        await buffer.take(2)
        assert await open_places(buffer) == []
        buffer.note_publish(1)
        assert await open_places(buffer) == []
        buffer.release(1, trained=True)
        assert [p.ticket for p in await open_places(buffer)] == [2, 3]

    async def test_release_refuses_a_publish_that_is_not_confirmed(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(), num_tickets=2)
        for place in await open_places(buffer):
            buffer.put(filled(place))
        await buffer.take(2)
        with pytest.raises(ValueError, match="release after publish 1, but 0 are confirmed"):
            buffer.release(1, trained=False)
        buffer.release(0, trained=False)
        assert [p.ticket for p in await open_places(buffer)] == [2, 3]

    async def test_assignments_are_drawn_when_the_slot_opens(self) -> None:
        curriculum = FakeCurriculum()
        buffer = GroupBuffer(curriculum, sizes())
        curriculum.tail_calls = 7  # committed after the slots were opened
        first = await open_places(buffer)
        assert [p.tail_calls for p in first] == [1, 1]
        for place in first:
            buffer.put(filled(place))
        await buffer.take(2)
        buffer.note_publish(1)
        curriculum.tail_calls = 8
        buffer.release(1, trained=True)
        curriculum.tail_calls = 9
        assert [p.tail_calls for p in await open_places(buffer)] == [8, 8]

    async def test_no_more_tickets_than_the_run_needs(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(2, 1), next_ticket=4, num_tickets=7)
        places = await open_places(buffer)
        assert [p.ticket for p in places] == [4, 5, 6]
        for place in places:
            buffer.put(filled(place))
        await buffer.take(2)
        buffer.release(0, trained=True)
        assert await open_places(buffer) == []

    async def test_an_empty_batch_hands_out_as_many_more(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(), num_tickets=2)
        for expected in ([0, 1], [2, 3], [4, 5]):
            places = await open_places(buffer)
            assert [p.ticket for p in places] == expected
            for place in places:
                buffer.put(filled(place))
            assert tickets(await buffer.take(2)) == expected
            buffer.release(0, trained=False)

    async def test_next_ticket_is_the_first_that_was_not_trained_on(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(), next_ticket=6, num_tickets=8)
        assert buffer.next_ticket == 6
        for place in await open_places(buffer):
            buffer.put(filled(place))
        await buffer.take(2)
        assert buffer.next_ticket == 6
        buffer.release(0, trained=True)
        assert buffer.next_ticket == 8

    async def test_a_worker_gets_the_lowest_ticket_that_is_open(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(3))
        places = [await buffer.next_assignment() for _ in range(3)]
        buffer.drop(filled(places[2]), "late")
        buffer.drop(filled(places[0]), "later")
        assert [(await buffer.next_assignment()).group_id for _ in range(2)] == [
            "000000.1",
            "000002.1",
        ]


class TestOrder:
    async def test_peer_37_the_order_is_fifo_not_that_of_completion(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(3))
        places = await open_places(buffer)
        taking = asyncio.ensure_future(buffer.take(3))
        for index in (2, 1):
            buffer.put(filled(places[index]))
            await asyncio.sleep(0)
        assert not taking.done()
        buffer.put(filled(places[0]))
        assert tickets(await taking) == [0, 1, 2]

    async def test_peer_38_a_dropped_group_is_replaced_in_its_place_a_bounded_number_of_times(
        self,
    ) -> None:
        told: list[tuple[str, str]] = []
        buffer = GroupBuffer(
            FakeCurriculum(),
            sizes(2, refills=2),
            on_drop=lambda place, reason: told.append((place.group_id, reason)),
        )
        first, second = await open_places(buffer)
        buffer.put(filled(second))
        assert buffer.drop(filled(first), "flat")
        again = await buffer.next_assignment()
        assert (again.ticket, again.attempt, again.task_id) == (0, 1, "task1")
        assert buffer.drop(filled(again), "flat still")
        last = await buffer.next_assignment()
        assert not buffer.drop(filled(last), "flat for ever")
        assert await open_places(buffer) == []
        buffer.put(filled(last))
        groups = await buffer.take(2)
        assert [g.assignment.group_id for g in groups] == ["000000.2", "000001.0"]
        assert told == [("000000.0", "flat"), ("000000.1", "flat still")]
        assert buffer.counters.refilled == 2

    async def test_a_place_is_filled_once(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes())
        first, _ = await open_places(buffer)
        buffer.drop(filled(first), "flat")
        for use in (lambda: buffer.put(filled(first)), lambda: buffer.drop(filled(first), "flat")):
            with pytest.raises(KeyError, match=r"no open place for group 000000\.0"):
                use()

    @settings(deadline=None, max_examples=120)
    @given(
        st.integers(1, 4), st.integers(0, 3), st.integers(0, 2), st.integers(0, 2**31), st.data()
    )
    def test_no_completion_order_changes_the_sequence(
        self, num_groups: int, lag: int, refills: int, seed: int, data: st.DataObject
    ) -> None:
        num_steps = data.draw(st.integers(1, 5))
        taken, assigned = asyncio.run(play(num_groups, lag, refills, seed, num_steps))
        assert [p.ticket for p in taken] == list(range(num_steps * num_groups))
        # What a place is assigned first depends on committed steps alone.
        batches_ahead = lag + 1
        for place in assigned:
            opened_after = max(0, place.ticket // num_groups - batches_ahead + 1)
            assert place.tail_calls == 1 + opened_after, place


async def play(
    num_groups: int, lag: int, refills: int, seed: int, num_steps: int
) -> tuple[list[Assignment], list[Assignment]]:
    """Train on fakes in a random order of completions and drops; what was taken and assigned."""
    draw = random.Random(seed)
    curriculum = FakeCurriculum()
    buffer = GroupBuffer(
        curriculum, sizes(num_groups, lag, refills), num_tickets=num_steps * num_groups
    )
    flying: list[Assignment] = []
    taken: list[Assignment] = []
    assigned: list[Assignment] = []
    unreleased: set[int] = set()
    for step in range(num_steps):
        taking = asyncio.ensure_future(buffer.take(num_groups))
        while not taking.done():
            new = await open_places(buffer)
            assigned += [place for place in new if place.attempt == 0]
            flying += new
            unreleased |= {place.ticket for place in new}
            assert len(unreleased) <= (lag + 1) * num_groups
            if flying:
                place = flying.pop(draw.randrange(len(flying)))
                published = buffer.num_publishes
                if draw.random() > 0.3 or not buffer.drop(filled(place), "as drawn"):
                    buffer.put(filled(place, num_publishes=published, version=step))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        groups = taking.result()
        taken += [found.assignment for found in groups]
        assert all(buffer.lag(found) <= lag for found in groups)
        buffer.note_publish(step + 1)
        curriculum.advance(groups)
        buffer.release(step + 1, trained=True)
        unreleased -= {found.assignment.ticket for found in groups}
    return taken, assigned


class TestLag:
    def test_it_counts_publishes_since_the_oldest_span(self) -> None:
        buffer = GroupBuffer(
            FakeCurriculum(), sizes(), num_publishes=3, publish_of_version={8: 2, 16: 3}
        )
        place = Assignment(ticket=0, task_id="a", prefix_calls=0, tail_calls=1)
        fresh, old = trajectory(version=16), trajectory(version=8)
        assert buffer.lag(group(place, [fresh], num_publishes=3)) == 0
        assert buffer.lag(group(place, [fresh, old], num_publishes=3)) == 1
        buffer.note_publish(24)
        assert buffer.lag(group(place, [fresh, old], num_publishes=3)) == 2

    def test_peer_35_after_a_resume_it_is_not_inflated(self) -> None:
        resumed = GroupBuffer(
            FakeCurriculum(), sizes(), num_publishes=40, publish_of_version={320: 40}
        )
        place = Assignment(ticket=80, task_id="a", prefix_calls=0, tail_calls=1)
        assert resumed.lag(group(place, [trajectory(version=320)], num_publishes=40)) == 0

    def test_an_unknown_version_counts_from_the_start_of_the_group(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(), num_publishes=5)
        place = Assignment(ticket=0, task_id="a", prefix_calls=0, tail_calls=1)
        assert buffer.lag(group(place, [trajectory(version=99)], num_publishes=3)) == 2

    async def test_a_group_that_is_too_stale_at_take_is_replaced_in_its_place(self) -> None:
        told: list[str] = []
        buffer = GroupBuffer(
            FakeCurriculum(),
            sizes(2, lag=1),
            num_publishes=1,
            publish_of_version={0: 1},
            on_drop=lambda place, reason: told.append(reason),
        )
        places = await open_places(buffer)
        for version in (1, 2):
            buffer.note_publish(version)
        for index, version in enumerate((0, 1, 2, 2)):
            buffer.put(filled(places[index], version=version))
        taking = asyncio.ensure_future(buffer.take(2))
        again = await buffer.next_assignment()
        assert (again.ticket, again.attempt) == (0, 1)
        assert told == ["policy lag 2 > 1"]
        assert not taking.done()
        buffer.put(filled(again, version=2))
        assert [g.assignment.group_id for g in await taking] == ["000000.1", "000001.0"]
        assert (buffer.counters.too_stale, buffer.counters.refilled) == (1, 1)

    async def test_peer_38_an_engine_that_keeps_old_weights_is_not_asked_for_ever(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(1), num_publishes=1, publish_of_version={0: 1})
        buffer.note_publish(1)
        taking = asyncio.ensure_future(buffer.take(1))
        for _ in range(4):
            buffer.put(filled(await buffer.next_assignment(), version=0))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        with pytest.raises(
            EngineError, match=r"000000\.4 was sampled 4 times .* keeps old weights"
        ):
            await taking


async def test_take_gives_up_in_words() -> None:
    buffer = GroupBuffer(FakeCurriculum(), sizes(2, deadline_s=0.02))
    first, second = await open_places(buffer)
    buffer.put(filled(first))
    with pytest.raises(DeadlineError, match=r"only 1 of 2 groups arrived within 0\.02 s"):
        await buffer.take(2)
    buffer.put(filled(second))
    assert tickets(await buffer.take(2)) == [0, 1]


class TestEach:
    """Groups are handed on as they arrive, while the batch is awaited."""

    async def test_in_the_order_of_arrival_with_their_places(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(3, 1))
        places = await open_places(buffer)
        seen: list[tuple[int, int]] = []

        async def each(place: int, group: ScoredGroup) -> None:
            seen.append((place, group.assignment.ticket))

        taking = asyncio.ensure_future(buffer.take(3, each))
        for ticket in (4, 2, 0, 3, 1):  # 3 and 4 are of the next batch
            buffer.put(filled(places[ticket]))
            for _ in range(4):
                await asyncio.sleep(0)
        assert tickets(await taking) == [0, 1, 2]
        assert seen == [(2, 2), (0, 0), (1, 1)]

    async def test_one_at_a_time_and_in_fifo_order_where_several_are_there(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(3))
        for place in reversed(await open_places(buffer)):
            buffer.put(filled(place))
        running, seen = 0, []

        async def each(place: int, group: ScoredGroup) -> None:
            nonlocal running
            running += 1
            assert running == 1
            await asyncio.sleep(0)
            running -= 1
            seen.append(place)

        await buffer.take(3, each)
        assert seen == [0, 1, 2]

    async def test_a_group_that_is_too_stale_is_never_handed_on(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes(), publish_of_version={0: 0, 1: 1})
        first, second = await open_places(buffer)
        buffer.note_publish(1)
        buffer.put(filled(first, num_publishes=0, version=0))
        buffer.put(filled(second, num_publishes=1, version=1))
        seen: list[str] = []

        async def each(place: int, group: ScoredGroup) -> None:
            seen.append(group.assignment.group_id)

        taking = asyncio.ensure_future(buffer.take(2, each))
        again = await buffer.next_assignment()
        for _ in range(4):
            await asyncio.sleep(0)
        buffer.put(filled(again, num_publishes=1, version=1))
        assert [g.assignment.group_id for g in await taking] == ["000000.1", "000001.0"]
        assert seen == ["000001.0", "000000.1"]

    async def test_its_failure_ends_the_wait(self) -> None:
        buffer = GroupBuffer(FakeCurriculum(), sizes())
        buffer.put(filled((await open_places(buffer))[1]))

        async def each(place: int, group: ScoredGroup) -> None:
            raise EngineError("broken")

        with pytest.raises(EngineError, match="broken"):
            await buffer.take(2, each)
        assert [t for t in asyncio.all_tasks() if t is not asyncio.current_task()] == []
