from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from actors.publish import RayWeightStore
from actors.weight_transfer import RemoteEngine, RemoteRank
from miniverl_dist.config.cluster import PublishConfig
from miniverl_dist.errors import EngineLostError, PublishError, StudentLostError
from miniverl_dist.schemas.weights import NamedArrays, weights_checksum
from rollout_server.inbox import BucketMessage
from tests.support.weight_ends import PlainEngine, PlainRank, some_weights

DEADLINE_S = 10.0
SHORT_S = 4.0
"""For tests in which something hangs: they take this long."""

WEIGHTS = some_weights()
NAMES = list(WEIGHTS)
HALVES = ({name: WEIGHTS[name] for name in NAMES[:2]}, {name: WEIGHTS[name] for name in NAMES[2:]})


def store(
    ranks: Sequence[RemoteRank],
    engines: Sequence[RemoteEngine],
    *,
    told: list[tuple[str, str]] | None = None,
    deadline_s: float = DEADLINE_S,
    transport: str = "object_store",
) -> RayWeightStore:
    notes = [] if told is None else told
    return RayWeightStore(
        lambda: ranks,
        engines,
        PublishConfig.model_validate({"transport": transport}),
        deadline_s=deadline_s,
        on_quarantine=lambda engine, reason: notes.append((engine, reason)),
    )


def same(found: NamedArrays, expected: NamedArrays) -> bool:
    return weights_checksum(found) == weights_checksum(expected)


async def settle() -> None:
    """Let everything run that can."""
    for _ in range(100):
        await asyncio.sleep(0)
    await asyncio.sleep(0.02)


async def test_every_engine_gets_what_all_ranks_hold_together() -> None:
    ranks = [
        PlainRank({"a": np.arange(3)}, {}, {"b": np.ones(2)}),
        PlainRank({}, {"c": np.zeros((2, 2))}, {"d": np.array(1.5)}, rank=1),
        PlainRank({}, {}, {}, rank=2),
    ]
    whole = {"a": np.arange(3), "b": np.ones(2), "c": np.zeros((2, 2)), "d": np.array(1.5)}
    engines = [PlainEngine("x"), PlainEngine("y")]
    receipt = await store(ranks, engines).publish(1)
    assert (receipt.policy_version, receipt.checksum) == (1, weights_checksum(whole))
    assert (receipt.engines, receipt.quarantined) == (("x", "y"), ())
    assert all(same(engine.weights, whole) for engine in engines)


async def test_the_next_bucket_is_gathered_while_the_former_is_received() -> None:
    log: list[str] = []
    rank, engine = PlainRank(*HALVES, log=log), PlainEngine("x", log)
    await store([rank], [engine]).publish(1)
    added = log.index("x added 0")
    assert log[:added].count("rank 0 next") == 2
    # One ahead, not two: no more than two buckets are ever in flight.
    assert log[added : log.index("x added 1")].count("rank 0 next") == 1
    assert log.index("rank 0 close") < log.index("x finish")


async def test_a_rank_is_not_two_buckets_ahead_of_a_slow_engine() -> None:
    rank = PlainRank({"a": np.ones(1)}, {"b": np.ones(1)}, {"c": np.ones(1)}, {"d": np.ones(1)})
    engine = PlainEngine("x")
    engine.hangs_in = "add"
    publishing = asyncio.create_task(store([rank], [engine], deadline_s=SHORT_S).publish(1))
    await asyncio.sleep(SHORT_S / 4)
    assert rank.backend.num_exported == 2
    with pytest.raises(PublishError, match="no engine confirmed policy version 1"):
        await publishing


Break = Callable[[PlainEngine], None]


def raising(method: str, error: Exception) -> Break:
    return lambda engine: engine.faults.update({method: error})


def setting(**values: Any) -> Break:
    return lambda engine: engine.__dict__.update(values)


def hanging(method: str) -> Break:
    return setting(hangs_in=method)


LATE = "within [0-9.]+ s of 4 s .deadlines.publish_s."


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (setting(corrupts=True), "^checksum [0-9a-f]{12}, expected [0-9a-f]{12}$"),
        (setting(version_shift=-1), "^version 0, expected 1$"),
        (setting(version_shift=1), "^version 2, expected 1$"),
        (raising("begin", EngineLostError("it died")), "^it died$"),
        (raising("add", EngineLostError("it died")), "^it died$"),
        (raising("add", PublishError("too short")), "^too short$"),
        (raising("finish", PublishError("shapes do not fit")), "^shapes do not fit$"),
        (hanging("begin"), "did not begin " + LATE),
        (hanging("add"), "did not take bucket 0 " + LATE),
        (hanging("finish"), "did not confirm " + LATE),
    ],
)
async def test_an_engine_that_does_not_confirm_leaves_the_rotation(
    fault: Break, reason: str
) -> None:
    told: list[tuple[str, str]] = []
    bad, good = PlainEngine("bad"), PlainEngine("good")
    fault(bad)
    rank = PlainRank(*HALVES)
    deadline_s = SHORT_S if bad.hangs_in else DEADLINE_S
    weights = store([rank], [bad, good], told=told, deadline_s=deadline_s)
    receipt = await weights.publish(1)
    assert (receipt.engines, receipt.quarantined) == (("good",), ("bad",))
    assert same(good.weights, WEIGHTS)
    [(name, why)] = told
    assert name == "bad"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(why)
    # And nothing is asked of it any more.
    bad.log.clear()
    rank.backend.policy_version = 2
    again = await weights.publish(2)
    assert (again.engines, again.quarantined, bad.log) == (("good",), (), [])


async def test_engines_that_hang_one_after_the_other_leave_time_for_the_last() -> None:
    engines = [PlainEngine(name) for name in "abcd"]
    for engine, method in zip(engines, ("begin", "add", "finish"), strict=False):
        engine.hangs_in = method
    started_s = asyncio.get_running_loop().time()
    receipt = await store([PlainRank(*HALVES)], engines, deadline_s=SHORT_S).publish(1)
    assert receipt.engines == ("d",)
    assert asyncio.get_running_loop().time() - started_s < 2 * SHORT_S


async def test_no_engine_left_is_an_error_that_names_every_reason() -> None:
    first, second = PlainEngine("a"), PlainEngine("b")
    first.version_shift, second.faults["add"] = 1, EngineLostError("it died")
    with pytest.raises(
        PublishError,
        match="no engine confirmed policy version 1: b: it died; a: version 2, expected 1",
    ):
        await store([PlainRank(*HALVES)], [first, second]).publish(1)


@pytest.mark.parametrize("method", ["open", "next", "close"])
async def test_a_dead_rank_ends_the_publish_and_no_engine_is_blamed(method: str) -> None:
    told: list[tuple[str, str]] = []
    dead, engine = PlainRank(*HALVES, rank=1), PlainEngine("x")
    dead.faults[method] = StudentLostError("rank 1 is gone")
    # What an engine reads from a dead rank is gone as well.
    engine.faults["add"] = EngineLostError("object lost")
    weights = store([PlainRank({}, {}), dead], [engine], told=told)
    with pytest.raises(StudentLostError, match="rank 1 is gone"):
        await weights.publish(1)
    assert (told, weights.rotation, engine.engine.weight_version) == ([], ("x",), -1)


class Prompt(PlainEngine):
    """Takes no time at all: a real inbox waits for a thread, which a short deadline may not."""

    async def begin(self, policy_version: int) -> None:
        pass

    async def add(self, message: BucketMessage) -> None:
        pass


@pytest.mark.parametrize("method", ["open", "next", "close"])
async def test_a_rank_that_hangs_is_lost_at_the_deadline(method: str) -> None:
    hanging_rank = PlainRank(*HALVES, rank=1)
    hanging_rank.hangs_in = method
    weights = store([PlainRank({}, {}), hanging_rank], [Prompt("x")], deadline_s=0.05)
    with pytest.raises(StudentLostError, match=r"ranks did not .* 0\.05 s \(deadlines\.publish_s"):
        await weights.publish(1)


async def test_a_rebuilt_student_is_asked_for_its_new_ranks() -> None:
    ranks = [PlainRank(*HALVES)]
    ranks[0].faults["next"] = StudentLostError("rank 0 is gone")
    weights = store(ranks, [PlainEngine("x")])
    with pytest.raises(StudentLostError):
        await weights.publish(1)
    ranks[0] = PlainRank(*HALVES)
    assert (await weights.publish(1)).engines == ("x",)


async def test_ranks_of_another_version_publish_nothing() -> None:
    rank, engine = PlainRank(*HALVES), PlainEngine("x")
    with pytest.raises(PublishError, match="rank 0 holds policy version 1, asked to publish 2"):
        await store([rank], [engine]).publish(2)
    assert engine.engine.weight_version == -1


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (PlainRank({}, rank=1), "1 of 2 ranks have no bucket 1 while the others do"),
        (PlainRank({}, {"half": np.ones(1)}, rank=1), "two ranks sent 'half'"),
    ],
    ids=["fewer buckets", "the same tensor"],
)
async def test_ranks_that_contradict_each_other(other: PlainRank, message: str) -> None:
    halves = ({"matrix": np.ones(1), "half": np.ones(1)}, {})
    # The engine refuses a tensor that comes twice; it is the ranks' fault all the same.
    with pytest.raises(PublishError, match=message):
        await store([PlainRank(*halves), other], [PlainEngine("x")]).publish(1)


async def test_a_discarded_engine_is_no_longer_published_to() -> None:
    told: list[tuple[str, str]] = []
    lost, good = PlainEngine("lost"), PlainEngine("good")
    lost.faults["begin"] = EngineLostError("it died")
    weights = store([PlainRank(*HALVES)], [lost, good], told=told)
    weights.discard("lost")
    assert (await weights.publish(1)).quarantined == ()
    assert told == []


async def test_an_engine_discarded_during_a_publish_stays_out() -> None:
    engine, good = PlainEngine("x"), PlainEngine("good")
    weights = store([PlainRank(*HALVES)], [engine, good])
    publishing = asyncio.create_task(weights.publish(1))
    await asyncio.sleep(0)
    weights.discard("x")
    assert (await publishing).engines == ("good",)


class TestAdmit:
    async def test_the_published_weights_are_sent_again_to_it_alone(self) -> None:
        rank, old, back = PlainRank(*HALVES), PlainEngine("old"), PlainEngine("back")
        weights = store([rank], [old])
        await weights.publish(1)
        old.log.clear()
        await weights.admit(back)
        assert weights.rotation == ("old", "back")
        assert (same(back.weights, WEIGHTS), back.engine.weight_version) == (True, 1)
        assert old.log == []
        rank.backend.policy_version = 2
        assert (await weights.publish(2)).engines == ("old", "back")

    @pytest.mark.parametrize(
        ("fault", "reason"),
        [
            (setting(corrupts=True), "back: checksum"),
            (setting(version_shift=1), "back: version 2, expected 1"),
            (hanging("add"), "back: did not take bucket 0"),
            (raising("begin", EngineLostError("it died")), "back: it died"),
        ],
    )
    async def test_peer_30_not_before_it_has_confirmed(self, fault: Break, reason: str) -> None:
        told: list[tuple[str, str]] = []
        back = PlainEngine("back")
        fault(back)
        deadline_s = SHORT_S if back.hangs_in else DEADLINE_S
        weights = store(
            [PlainRank(*HALVES)], [PlainEngine("old")], told=told, deadline_s=deadline_s
        )
        await weights.publish(1)
        with pytest.raises(PublishError, match=reason):
            await weights.admit(back)
        assert (weights.rotation, told) == (("old",), [])

    async def test_before_the_first_publish_it_waits_for_that(self) -> None:
        weights, back = store([PlainRank(*HALVES)], [PlainEngine("old")]), PlainEngine("back")
        admitting = asyncio.create_task(weights.admit(back))
        await settle()
        assert not admitting.done()
        assert (await weights.publish(1)).engines == ("old", "back")
        await admitting

    @pytest.mark.parametrize("is_labelled", [True, False], ids=["new version", "same version"])
    async def test_where_the_student_has_moved_on_it_waits_for_the_next_publish(
        self, is_labelled: bool
    ) -> None:
        rank, back = PlainRank(*HALVES), PlainEngine("back")
        weights = store([rank], [PlainEngine("old")])
        await weights.publish(1)
        changed = {"matrix": np.ones((3, 4), dtype=np.float32)}
        rank.backend.buckets = [changed]
        rank.backend.policy_version = 2 if is_labelled else 1
        admitting = asyncio.create_task(weights.admit(back))
        await settle()
        assert (admitting.done(), back.engine.weight_version) == (False, -1)
        rank.backend.policy_version = 2
        receipt = await weights.publish(2)
        await admitting
        assert (receipt.engines, weights.rotation) == (("old", "back"), ("old", "back"))
        assert same(back.weights, changed)

    async def test_a_busy_student_is_not_a_lost_one(self) -> None:
        rank, back = PlainRank(*HALVES), PlainEngine("back")
        weights = store([rank], [PlainEngine("old")], deadline_s=SHORT_S / 2)
        await weights.publish(1)
        rank.hangs_in = "open"
        admitting = asyncio.create_task(weights.admit(back))
        await asyncio.sleep(SHORT_S * 0.6)
        assert not admitting.done()
        rank.hangs_in = None
        rank.backend.policy_version = 2
        assert (await weights.publish(2)).engines == ("old", "back")
        await admitting

    async def test_a_publish_takes_along_an_engine_that_is_being_admitted(self) -> None:
        rank, back = PlainRank(*HALVES), PlainEngine("back")
        weights = store([rank], [PlainEngine("old")])
        await weights.publish(1)
        back.hangs_in = "add"
        admitting = asyncio.create_task(weights.admit(back))
        await settle()
        back.hangs_in = None
        rank.backend.policy_version = 2
        receipt = await asyncio.wait_for(weights.publish(2), DEADLINE_S * 0.4)
        await admitting
        assert receipt.engines == ("old", "back")
        assert back.engine.weight_version == 2

    async def test_one_that_fails_in_a_publish_is_told_so_and_not_quarantined(self) -> None:
        told: list[tuple[str, str]] = []
        weights = store([PlainRank(*HALVES)], [PlainEngine("old")], told=told)
        back = PlainEngine("back")
        back.corrupts = True
        admitting = asyncio.create_task(weights.admit(back))
        await settle()
        assert (await weights.publish(1)).quarantined == ()
        with pytest.raises(PublishError, match="back: checksum"):
            await admitting
        assert told == []

    @pytest.mark.parametrize("is_gone", [True, False], ids=["no ranks", "a dead rank"])
    async def test_a_lost_student_is_waited_for_and_the_engine_not_blamed(
        self, is_gone: bool
    ) -> None:
        ranks, back = [PlainRank(*HALVES)], PlainEngine("back")
        is_rebuilding = False

        def current() -> list[PlainRank]:
            if is_rebuilding:
                raise StudentLostError("the student is being rebuilt")
            return ranks

        weights = RayWeightStore(
            current, [PlainEngine("old")], PublishConfig(), deadline_s=DEADLINE_S
        )
        await weights.publish(1)
        is_rebuilding = is_gone
        ranks[0].faults["close"] = StudentLostError("rank 0 is gone")
        back.faults["add"] = EngineLostError("object lost")
        admitting = asyncio.create_task(weights.admit(back))
        await settle()
        assert not admitting.done()
        is_rebuilding, ranks[0] = False, PlainRank(*HALVES)
        back.faults.clear()
        assert (await weights.publish(1)).engines == ("old", "back")
        await admitting

    async def test_given_up_while_waiting_it_is_not_in_rotation(self) -> None:
        weights = store([PlainRank(*HALVES)], [PlainEngine("old")])
        admitting = asyncio.create_task(weights.admit(PlainEngine("back")))
        await settle()
        admitting.cancel()
        await settle()
        assert (await weights.publish(1)).engines == ("old",)

    async def test_a_publish_without_engines_waits_for_one_to_come_back(self) -> None:
        weights = store([PlainRank(*HALVES)], [])
        publishing = asyncio.create_task(weights.publish(1))
        await settle()
        assert not publishing.done()
        await weights.admit(PlainEngine("back"))
        assert (await publishing).engines == ("back",)

    async def test_but_not_for_ever(self) -> None:
        with pytest.raises(PublishError, match=r"none came back within half of 0\.04 s"):
            await store([PlainRank(*HALVES)], [], deadline_s=0.04).publish(1)


class Broadcaster(PlainRank):
    """A rank that notes whom it builds its group with, and can fail to send."""

    def __init__(self, rank: int, *buckets: dict[str, NDArray[Any]]) -> None:
        super().__init__(*buckets, rank=rank)
        self.members: list[tuple[str, ...]] = []

    async def connect(self, address: Any) -> None:
        self.members.append(address.engines)
        await super().connect(address)

    async def next(self) -> BucketMessage | None:
        if self.backend.num_exported and "flush" in self.faults:
            raise self.faults.pop("flush")
        return await super().next()


class TestBroadcast:
    async def test_groups_are_built_one_by_one_in_the_order_of_the_ranks(self) -> None:
        ranks = [Broadcaster(0, *HALVES), Broadcaster(1, {}, {})]
        engines = [PlainEngine("x"), PlainEngine("y")]
        weights = store(ranks, engines, transport="broadcast")
        await weights.publish(1)
        for engine in engines:
            assert [address.sender for address in engine.addresses] == [0, 1]
            assert [address.engines for address in engine.addresses] == [("x", "y")] * 2
        assert len({address.generation for address in engines[0].addresses}) == 2

    async def test_a_group_that_breaks_twice_though_all_answer_ends_the_publish(self) -> None:
        engine = PlainEngine("x")
        engine.faults["add"] = PublishError("no route to host")
        weights = store([Broadcaster(0, *HALVES)], [engine], transport="broadcast")
        with pytest.raises(PublishError, match="every engine answers, but twice: no route to host"):
            await weights.publish(1)

    async def test_a_sender_that_fails_in_its_group_tries_again(self) -> None:
        rank, bad, good = Broadcaster(0, *HALVES), PlainEngine("bad"), PlainEngine("good")
        bad.hangs_in = "add"
        weights = store([rank], [bad, good], deadline_s=SHORT_S, transport="broadcast")
        rank.faults["flush"] = PublishError("bad did not take bucket 0")
        assert (await weights.publish(1)).engines == ("good",)

    async def test_groups_stand_until_the_engines_change(self) -> None:
        rank, old, back = Broadcaster(0, *HALVES), PlainEngine("old"), PlainEngine("back")
        weights = store([rank], [old], transport="broadcast")
        await weights.publish(1)
        await weights.publish(1)
        assert rank.members == [("old",)]
        await weights.admit(back)
        await weights.publish(1)
        assert rank.members == [("old",), ("back",), ("old", "back")]

    @pytest.mark.parametrize("method", ["connect", "add"])
    @pytest.mark.parametrize("is_dead", [True, False], ids=["dead", "hangs"])
    async def test_a_group_that_lost_an_engine_is_built_anew_without_it(
        self, method: str, is_dead: bool
    ) -> None:
        told: list[tuple[str, str]] = []
        rank, bad, good = Broadcaster(0, *HALVES), PlainEngine("bad"), PlainEngine("good")
        if is_dead:
            bad.faults[method] = EngineLostError("it died")
        else:
            bad.hangs_in = method
        # What the others of a broken group find.
        good.faults[method], good.recovers = PublishError("connection closed by peer"), True
        deadline_s = DEADLINE_S if is_dead else SHORT_S
        weights = store(
            [rank], [bad, good], told=told, deadline_s=deadline_s, transport="broadcast"
        )
        receipt = await weights.publish(1)
        assert rank.members == [("bad", "good"), ("good",)]
        assert (receipt.engines, receipt.quarantined) == (("good",), ("bad",))
        assert [name for name, _ in told] == ["bad"]
        assert same(good.weights, WEIGHTS)
