"""Ranks commit together or not at all; one that differs from the others costs the whole group."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from actors.student_pool import InProcessStudentPool, RankPool
from miniverl_dist.errors import (
    BatchError,
    PlacementError,
    StudentLostError,
    UpdateError,
)
from miniverl_dist.schemas.batch import SftBatch, UpdateResult
from tests.fakes import FakeClock
from tests.support.pools import Answer, FakeRanks, answers, hangs, raises, restart_budget

BATCH: Any = object()
"""The pool hands batches on unread."""
SFT = SftBatch(np.array([1, 2]), np.array([0, 2]), np.array([False, True]))


def result(version: int, loss: float = 0.5) -> UpdateResult:
    return UpdateResult(version, 1, {"loss": loss})


class Starts:
    """Starts groups; the n-th start gives the n-th group, or raises the n-th error."""

    def __init__(self, *outcomes: FakeRanks | Exception) -> None:
        self._outcomes = list(outcomes)

    async def __call__(self) -> FakeRanks:
        outcome = self._outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome


async def pool(
    *outcomes: FakeRanks | Exception,
    max_restarts: int = 2,
    deadline_s: float = 5.0,
    agreement_s: float = 5.0,
    clock: FakeClock | None = None,
) -> RankPool[FakeRanks]:
    """An open pool."""
    opened = RankPool(
        Starts(*outcomes),
        restart_budget(max_restarts, clock),
        deadline_s=deadline_s,
        agreement_s=agreement_s,
    )
    await opened.open()
    return opened


async def is_gone(students: RankPool[FakeRanks], ranks: FakeRanks) -> bool:
    """Whether the group was ended and cannot be asked any more."""
    with pytest.raises(StudentLostError, match="a rebuild comes first"):
        _ = students.group
    num_asked = len(ranks.asked)
    with pytest.raises(StudentLostError, match="a rebuild comes first"):
        await students.update(BATCH)
    return ranks.num_ends == 1 and len(ranks.asked) == num_asked


class TestAgreement:
    async def test_all_ranks_are_asked_and_the_first_one_speaks(self, tmp_path: Path) -> None:
        ranks = FakeRanks(answers(result(3, 0.25)), answers(result(3, 9.0)))
        students = await pool(ranks)
        assert (await students.update(BATCH)).metrics == {"loss": 0.25}
        assert students.policy_version == 3
        ranks.ranks = answers({"loss": 1.0}), answers({"loss": 2.0})
        assert await students.sft_update(SFT, 0.1) == {"loss": 1.0}
        ranks.ranks = answers(np.array([1.0])), answers(np.array([2.0]))
        assert (await students.logprobs(BATCH)).tolist() == [1.0]
        ranks.ranks = answers(None), answers(None)
        await students.finish_warmup()
        await students.save(tmp_path)
        await students.load(tmp_path, 7)
        assert students.policy_version == 7
        assert ranks.asked == [
            ("update", BATCH),
            ("sft_update", SFT, 0.1),
            ("logprobs", BATCH),
            ("finish_warmup",),
            ("save", tmp_path),
            ("load", tmp_path, 7),
        ]
        assert ranks.num_ends == 0

    async def test_a_dead_rank_is_reported_at_once_and_ends_the_others(self) -> None:
        let_go: list[str] = []
        dead = raises(StudentLostError("rank 1 is gone"))
        ranks = FakeRanks(hangs(let_go), dead, hangs(let_go))
        students = await pool(ranks, agreement_s=1e9)
        with pytest.raises(StudentLostError, match="failed to update: rank 1 is gone"):
            await asyncio.wait_for(students.update(BATCH), 5)
        await asyncio.sleep(0)
        assert let_go == ["let go", "let go"]
        assert await is_gone(students, ranks)

    async def test_what_all_ranks_raise_is_raised_as_it_is_and_nothing_is_lost(self) -> None:
        errors = [UpdateError(f"the loss is not finite, says rank {rank}") for rank in range(3)]
        ranks = FakeRanks(
            *(raises(error, after_s=0.01 * rank) for rank, error in enumerate(errors))
        )
        students = await pool(ranks)
        with pytest.raises(UpdateError) as caught:
            await students.update(BATCH)
        assert caught.value is errors[0]
        assert (ranks.num_ends, students.group) == (0, ranks)
        ranks.ranks = (answers(result(1)),) * 3
        assert (await students.update(BATCH)).policy_version == 1

    @pytest.mark.parametrize(
        ("others", "found"),
        [
            (answers(result(1)), "only 1 of 3 ranks failed to update, so they differ"),
            (hangs(), "only 1 of 3 ranks failed to update, so they differ"),
            (raises(BatchError("another"), after_s=0.01), "only 3 of 3 ranks failed"),
            (raises(StudentLostError("gone"), after_s=0.01), "only 3 of 3 ranks failed"),
        ],
        ids=["committed", "stuck", "another error", "died"],
    )
    async def test_ranks_that_differ_are_lost(self, others: Answer, found: str) -> None:
        first = UpdateError("the loss is not finite")
        ranks = FakeRanks(others, raises(first), others)
        students = await pool(ranks, agreement_s=0.05)
        with pytest.raises(StudentLostError, match=rf"{found}.*UpdateError: the loss") as caught:
            await asyncio.wait_for(students.update(BATCH), 5)
        assert caught.value.__cause__ is first
        assert await is_gone(students, ranks)

    async def test_a_rank_that_raises_what_no_rank_should_is_lost(self) -> None:
        """Nobody knows where such a rank stands, even if all raise the same."""
        ranks = FakeRanks(*(raises(RuntimeError("CUDA error")) for _ in range(2)))
        students = await pool(ranks)
        with pytest.raises(StudentLostError, match="failed to save: CUDA error"):
            await students.save(Path("x"))
        assert await is_gone(students, ranks)

    async def test_different_policy_versions_are_a_loss(self) -> None:
        ranks = FakeRanks(answers(result(4)), answers(result(5)), answers(result(4)))
        students = await pool(ranks)
        with pytest.raises(StudentLostError, match=r"different policy versions: \[4, 5\]"):
            await students.update(BATCH)
        assert await is_gone(students, ranks)


class TestDeadlines:
    @pytest.mark.parametrize(
        "call",
        [
            lambda students: students.sft_update(SFT, 0.1),
            lambda students: students.finish_warmup(),
            lambda students: students.logprobs(BATCH),
            lambda students: students.save(Path("x")),
            lambda students: students.load(Path("x"), 1),
        ],
        ids=["sft_update", "finish_warmup", "logprobs", "save", "load"],
    )
    async def test_every_other_call_is_bounded(
        self, call: Callable[[RankPool[FakeRanks]], Any]
    ) -> None:
        ranks = FakeRanks(answers({}), hangs(), hangs())
        students = await pool(ranks, deadline_s=0.02)
        with pytest.raises(StudentLostError, match=r"2 of 3 ranks took longer than 0\.02 s to "):
            await asyncio.wait_for(call(students), 5)
        assert students.policy_version == 0
        assert await is_gone(students, ranks)

    async def test_an_update_waits_as_long_as_the_loop_lets_it(self) -> None:
        let_go: list[str] = []

        async def slow() -> UpdateResult:
            await asyncio.sleep(0.05)
            return result(1)

        students = await pool(FakeRanks(slow, answers(result(1))), deadline_s=0.01)
        assert (await students.update(BATCH)).policy_version == 1
        students = await pool(FakeRanks(hangs(let_go)), deadline_s=0.01)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(students.update(BATCH), 0.05)
        await asyncio.sleep(0)
        assert let_go == ["let go"]


class TestRebuild:
    async def test_new_ranks_stand_at_version_0_until_they_have_loaded(self) -> None:
        first, second = FakeRanks(answers(result(5))), FakeRanks(answers(None))
        students = await pool(first, second)
        await students.update(BATCH)
        await students.rebuild()
        assert (first.num_ends, students.group, students.policy_version) == (1, second, 0)
        await students.load(Path("x"), 4)
        assert students.policy_version == 4

    async def test_ranks_that_were_ended_already_are_not_ended_again(self) -> None:
        first = FakeRanks(raises(StudentLostError("gone")))
        students = await pool(first, FakeRanks(answers(result(1))))
        with pytest.raises(StudentLostError):
            await students.update(BATCH)
        await students.rebuild()
        assert first.num_ends == 1
        assert (await students.update(BATCH)).policy_version == 1

    async def test_beyond_the_budget_nothing_is_started(self) -> None:
        groups = [FakeRanks(answers(result(1))) for _ in range(4)]
        clock = FakeClock()
        students = await pool(*groups, max_restarts=2, clock=clock)
        for _ in range(2):
            await students.rebuild()
        with pytest.raises(UpdateError, match="lost again, beyond 2 restarts in 100 s") as caught:
            await students.rebuild()
        # Otherwise the loop would take it for another loss, and rebuild for ever.
        assert not isinstance(caught.value, StudentLostError)
        assert [group.num_ends for group in groups] == [1, 1, 1, 0]
        clock.time = 100.0
        await students.rebuild()
        assert students.group is groups[3]

    async def test_ranks_that_do_not_come_up_end_the_run(self) -> None:
        lost = StudentLostError("rank 1 did not start within 600 s")
        students = await pool(FakeRanks(answers(None)), lost, lost, max_restarts=2)
        expected = "beyond 2 restarts in 100 s .*; the last start failed: rank 1 did not start"
        with pytest.raises(UpdateError, match=expected) as caught:
            await students.rebuild()
        assert not isinstance(caught.value, StudentLostError)
        with pytest.raises(StudentLostError, match="a rebuild comes first"):
            _ = students.group

    async def test_a_start_that_fails_is_tried_again_within_the_budget(self) -> None:
        lost, third = StudentLostError("rank 1 did not start"), FakeRanks(answers(None))
        students = await pool(FakeRanks(answers(None)), lost, third, max_restarts=2)
        await students.rebuild()
        assert students.group is third

    async def test_a_cluster_without_room_arrives_as_itself(self) -> None:
        students = await pool(FakeRanks(answers(None)), PlacementError("no node left"))
        with pytest.raises(PlacementError, match="no node left"):
            await students.rebuild()

    async def test_closing_twice_ends_once(self) -> None:
        ranks = FakeRanks(answers(None))
        students = await pool(ranks)
        await students.close()
        await students.close()
        assert await is_gone(students, ranks)


async def test_in_one_process_a_rebuild_is_granted_once() -> None:
    rank: Any = object()  # a rebuild asks nothing of it: the load that follows restores everything
    students = InProcessStudentPool(rank)
    await students.rebuild()
    with pytest.raises(UpdateError, match="stopped half way again") as caught:
        await students.rebuild()
    assert not isinstance(caught.value, StudentLostError)


class TestAccumulating:
    async def test_ranks_accumulate_and_commit_together(self) -> None:
        ranks = FakeRanks(answers(None), answers(None))
        students = await pool(ranks)
        await students.accumulate(BATCH, 2)
        await students.discard_accumulated()
        assert students.policy_version == 0
        ranks.ranks = answers(result(4, 0.25)), answers(result(4, 9.0))
        assert (await students.commit_accumulated()).metrics == {"loss": 0.25}
        assert students.policy_version == 4
        assert ranks.asked == [
            ("accumulate", BATCH, 2),
            ("discard_accumulated",),
            ("commit_accumulated",),
        ]

    async def test_ranks_that_differ_behind_the_step_are_lost(self) -> None:
        ranks = FakeRanks(answers(result(4)), answers(result(3)))
        students = await pool(ranks)
        with pytest.raises(StudentLostError, match=r"different policy versions: \[3, 4\]"):
            await students.commit_accumulated()
        assert await is_gone(students, ranks)

    async def test_an_error_that_one_rank_has_alone_costs_the_group(self) -> None:
        ranks = FakeRanks(answers(None), raises(UpdateError("not finite")))
        students = await pool(ranks)
        with pytest.raises(StudentLostError, match="only 1 of 2 ranks failed to accumulate"):
            await students.accumulate(BATCH, 0)
        assert await is_gone(students, ranks)

    async def test_in_this_process_they_are_the_ranks_own(self) -> None:
        class Rank:
            policy_version = 0

            def accumulate(self, batch: object, place: int) -> None:
                asked.append((batch, place))

            def commit_accumulated(self) -> UpdateResult:
                return result(1)

            def discard_accumulated(self) -> None:
                asked.append("discarded")

        asked: list[object] = []
        rank: Any = Rank()
        students = InProcessStudentPool(rank)
        await students.accumulate(BATCH, 3)
        await students.discard_accumulated()
        assert (await students.commit_accumulated()).policy_version == 1
        assert asked == [(BATCH, 3), "discarded"]
