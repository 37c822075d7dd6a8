"""The record of what a batch made of its tokens: of those that were emitted, and of no others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from miniverl_dist.errors import RecordError
from miniverl_dist.ports import Assignment, ScoredGroup, ScoredTrajectory
from miniverl_dist.schemas.token_analysis import TokenAnalysis
from miniverl_dist.training.batch_builder import BuiltBatch, build_batch
from tests.fake_world import byte_ends
from tests.fakes import ByteTokenizer, run_config, teacher_score, trajectory

TEACHER = ByteTokenizer((b"ab",), name="teacher")


def built(*, with_score: bool = True, analysed: int = 1, num_groups: int = 1) -> BuiltBatch:
    groups = []
    for ticket in range(num_groups):
        place = Assignment(ticket=ticket, task_id="a", prefix_calls=0, tail_calls=1)
        told = [
            trajectory("abc", place=place, member=i, reward=float(i), context_after="seen")
            for i in (0, 1)
        ]
        members = tuple(
            ScoredTrajectory(
                trajectory=one, teacher=teacher_score(one, TEACHER) if with_score else None
            )
            for one in told
        )
        groups.append(ScoredGroup(assignment=place, members=members, num_publishes=1))
    changes: dict[str, Any] = {"objective": "grpo_opd"} if with_score else {}
    return build_batch(groups, run_config(**changes, loop={"analysed_groups": analysed}), byte_ends)


def test_emitted_tokens_and_no_others() -> None:
    found = built()
    assert found.batch is not None
    assert len(found.analysis) == 2
    told = trajectory("abc", member=1, context_after="seen")
    one = found.analysis[1]
    written = np.flatnonzero(told.loss_mask)
    assert one.positions == tuple(written.tolist())
    assert one.token_ids == tuple(told.token_ids[i] for i in written)
    assert set(one.kinds) == {"assistant_text"}
    here = slice(*found.batch.sequence_starts[1:3])
    assert one.advantages == tuple(found.batch.advantages[here][written].tolist())


def test_units_are_those_of_the_alignment() -> None:
    one = built().analysis[0]
    # The student spells a, b, c and the turn end; the teacher ab, c and its own.
    assert one.units[:3] == (0, 0, 1)
    assert len(one.unit_reverse_kl) == max(u for u in one.units if u is not None) + 1
    weights = [w for w in one.opd_weights if w is not None]
    assert len(weights) == sum(unit is not None for unit in one.units)


def test_without_a_teacher_there_are_no_units() -> None:
    one = built(with_score=False).analysis[0]
    assert set(one.units) == {None}
    assert set(one.opd_weights) == {None}
    assert one.unit_reverse_kl == ()
    assert any(one.advantages)


@pytest.mark.parametrize(("analysed", "count"), [(0, 0), (1, 2), (2, 4), (9, 6)])
def test_as_many_groups_as_asked_for(analysed: int, count: int) -> None:
    assert len(built(analysed=analysed, num_groups=3).analysis) == count


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"positions": (2, 1, 3, 4)}, "positions must rise"),
        ({"advantages": (0.0,)}, "1 advantages for 4 positions"),
        ({"units": (0, 9, None, None)}, "units 0 .. 9, but"),
        ({"positions": (0, 1, 2, 3)}, "greater than or equal to 1"),
    ],
)
def test_what_contradicts_itself_is_refused(changes: dict[str, Any], words: str) -> None:
    fields = built().analysis[0].model_dump() | changes
    with pytest.raises((ValidationError, RecordError), match=words):
        TokenAnalysis.model_validate(fields)
