"""Target sources: which rows, who is asked, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from miniverl_dist.config.lab import SelectionConfig
from miniverl_dist.errors import TeacherError, UnspellableBytesError
from miniverl_dist.lab.sources import (
    RowChoice,
    StoredTeacher,
    TeacherTexts,
    TextLimit,
    WrittenTargets,
)
from miniverl_dist.lab.teacher_cache import CacheIdentity, TeacherCache
from miniverl_dist.ports import TargetAnswer
from miniverl_dist.schemas.targets import TeacherContext, TopKTargets, TrajectoryTargets
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal
from miniverl_dist.schemas.trajectory import Trajectory
from tests.fakes import trajectory

IDENTITY = CacheIdentity(
    teacher="t",
    teacher_checksum="0" * 64,
    student_fingerprint="1" * 64,
    teacher_fingerprint="2" * 64,
    mode="standard",
    rendering="raw",
    top_k=2,
    temperature=1.0,
    selection="all_model_tokens:seed=0",
)


@dataclass(frozen=True)
class View:
    """A teacher whose text is the student's with two tokens in front, and who has every second
    written token as one of its own."""

    told: Trajectory

    @property
    def context_ids(self) -> NDArray[np.int64]:
        return np.array([900, 901, *self.told.token_ids])

    @property
    def student_positions(self) -> NDArray[np.int64]:
        return np.arange(1, len(self.told.token_ids), 2)

    @property
    def teacher_positions(self) -> NDArray[np.int64]:
        return self.student_positions + 2


def choice(kind: str = "all_model_tokens", ratio: float = 0.25) -> RowChoice:
    selection = SelectionConfig.model_validate({"kind": kind, "ratio": ratio})
    return RowChoice(selection, 0, lambda told: told.loss_mask)


def texts(max_tokens: int = 999, refused: list[TeacherRefusal] | None = None) -> TeacherTexts:
    refused = [] if refused is None else refused
    return TeacherTexts(choice(), View, limit=TextLimit(max_tokens), on_refused=refused.append)


@dataclass
class Teacher:
    """Knows how often it was loaded, and what it was asked."""

    loads: int = 0
    asked: list[int] = field(default_factory=list)

    @contextmanager
    def load(self) -> Iterator[Teacher]:
        self.loads += 1
        yield self

    def top_k(self, context: TeacherContext) -> TopKTargets:
        rows = len(context.positions)
        self.asked.append(rows)
        return TopKTargets(
            np.tile([3, 5], (rows, 1)),
            np.log(np.tile([1 / 3, 1 / 7], (rows, 1))),
            np.log(np.full(rows, 1 - 1 / 3 - 1 / 7)),
            np.ones(rows),
        )


def stored(teacher: Teacher, tmp_path: Path, source: TeacherTexts | None = None) -> StoredTeacher:
    cache = TeacherCache.open(tmp_path / "teacher-cache", IDENTITY, create=True)
    return StoredTeacher(source or texts(), teacher.load, cache, str(choice()))


def answered(found: Mapping[str, TargetAnswer]) -> dict[str, TrajectoryTargets]:
    """Nothing was refused."""
    assert all(isinstance(answer, TrajectoryTargets) for answer in found.values())
    return {k: answer for k, answer in found.items() if isinstance(answer, TrajectoryTargets)}


def told(text: str = "abcdef", member: int = 0, version: int = 0) -> Trajectory:
    return trajectory(text, member=member, version=version)


async def test_written_tokens_are_their_own_targets() -> None:
    one = told()
    found = await WrittenTargets(choice()).targets([one])
    rows = found[one.trajectory_id]
    assert rows.positions.tolist() == np.flatnonzero(one.loss_mask).tolist()
    assert rows.num_candidates == 7
    assert rows.top_k is None
    assert rows.context is None
    half = await WrittenTargets(choice("uniform_ratio", 0.4)).targets(
        [told(member=i) for i in range(40)]
    )
    chosen = sum(len(rows.positions) for rows in half.values())
    assert 0.25 * 280 < chosen < 0.55 * 280
    assert {rows.num_candidates for rows in half.values()} == {7}


async def test_rows_are_written_tokens_that_both_have() -> None:
    one = told()
    rows = answered(await texts().targets([one]))[one.trajectory_id]
    mask = np.array(one.loss_mask)
    expected = [i for i in range(1, len(mask), 2) if mask[i]]
    assert rows.positions.tolist() == expected
    assert rows.context is not None
    assert rows.context.positions.tolist() == [place + 2 for place in expected]
    assert rows.num_candidates == mask.sum()


async def test_the_selection_leaves_rows_out() -> None:
    some = choice("uniform_ratio", 0.5)
    source = TeacherTexts(some, View, limit=TextLimit(999))
    many = [told("abcdefghij", member=i) for i in range(20)]
    every = answered(await texts().targets(many))
    found = answered(await source.targets(many))
    for one in many:
        rows, all_rows = found[one.trajectory_id], every[one.trajectory_id]
        chosen = some.among(one, all_rows.positions)
        assert rows.positions.tolist() == all_rows.positions[chosen].tolist()
        assert rows.context is not None
        assert rows.context.positions.tolist() == (rows.positions + 2).tolist()
    assert (
        0
        < sum(len(rows.positions) for rows in found.values())
        < sum(len(rows.positions) for rows in every.values())
    )


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_text_that_is_too_long_is_refused_with_reason_limit_and_length(
    is_stored: bool, tmp_path: Path
) -> None:
    refused: list[TeacherRefusal] = []
    short, long = told("a"), told("a" * 50, member=1)
    limit = len(short.token_ids) + 2
    source = texts(limit, refused)
    asked = stored(Teacher(), tmp_path, source) if is_stored else source
    found = dict(await asked.targets([short, long]))
    refusal = found.pop(long.trajectory_id)
    assert answered(found).keys() == {short.trajectory_id}
    assert refused == [refusal]
    assert refusal == TeacherRefusal(
        trajectory_id=long.trajectory_id,
        reason=RefusalReason.TOO_LONG,
        detail=f"{len(long.token_ids) + 2} teacher tokens, the limit is {limit} "
        "(teacher.max_prefill_tokens)",
    )


@pytest.mark.parametrize("is_stored", [False, True])
async def test_a_text_that_the_teacher_cannot_spell_is_refused(
    is_stored: bool, tmp_path: Path
) -> None:
    def view(one: Trajectory) -> View:
        if one.trajectory_id == told(member=1).trajectory_id:
            raise UnspellableBytesError("no token for byte 0xf0")
        return View(one)

    source = TeacherTexts(choice(), view, limit=TextLimit(999))
    asked = stored(Teacher(), tmp_path, source) if is_stored else source
    found = dict(await asked.targets([told(), told(member=1)]))
    refusal = found.pop(told(member=1).trajectory_id)
    assert answered(found).keys() == {told().trajectory_id}
    assert isinstance(refusal, TeacherRefusal)
    assert (refusal.reason, refusal.detail) == (RefusalReason.REJECTED, "no token for byte 0xf0")


async def test_no_token_to_train_on_is_neither_an_answer_nor_a_refusal() -> None:
    refused: list[TeacherRefusal] = []
    none = RowChoice(SelectionConfig(), 0, lambda told: [False] * len(told.token_ids))
    source = TeacherTexts(none, View, limit=TextLimit(1), on_refused=refused.append)
    assert await source.targets([told()]) == {}
    assert refused == []


class TestStored:
    async def test_each_episode_is_asked_about_once(self, tmp_path: Path) -> None:
        teacher, episodes = Teacher(), [told(member=i) for i in range(3)]
        source = stored(teacher, tmp_path)
        first = await source.targets([*episodes, episodes[0]])
        assert (teacher.loads, len(teacher.asked)) == (1, 3)
        again = await source.targets(episodes[::-1])
        assert (teacher.loads, len(teacher.asked)) == (1, 3)
        self.require_equal(first, again)

    async def test_what_was_asked_outlives_the_process_bit_for_bit(self, tmp_path: Path) -> None:
        teacher, one = Teacher(), told()
        first = await stored(teacher, tmp_path).targets([one])
        later = await stored(teacher, tmp_path).targets([one])
        assert teacher.loads == 1
        self.require_equal(first, later)

    async def test_another_episode_of_the_same_name_is_asked_about(self, tmp_path: Path) -> None:
        teacher = Teacher()
        source = stored(teacher, tmp_path)
        await source.targets([told("abcdef")])
        await source.targets([told("uvwxyz")])
        await source.targets([told("uvwxyz", version=4)])
        assert teacher.loads == 3

    async def test_nothing_to_ask_loads_nobody(self, tmp_path: Path) -> None:
        teacher = Teacher()
        assert await stored(teacher, tmp_path).targets([]) == {}
        assert teacher.loads == 0

    async def test_old_versions_are_let_go(self, tmp_path: Path) -> None:
        cache = TeacherCache.open(tmp_path / "teacher-cache", IDENTITY, create=True)
        source = StoredTeacher(texts(), Teacher().load, cache, "all", keep_versions=2)
        for version in range(4):
            await source.targets([told(member=version, version=version)])
        assert sorted(cache.stats().entries_by_version) == [2, 3]

    async def test_a_store_that_forgets_is_an_error(self) -> None:
        class Sieve:
            def get(self, name: str, key: str, version: int) -> TrajectoryTargets | None:
                return None

            def put(self, targets: TrajectoryTargets, key: str) -> None:
                pass

            def flush(self) -> None:
                pass

            def prune(self, *, keep_versions: int | None = None) -> None:
                pass

        source = StoredTeacher(texts(), Teacher().load, Sieve(), "all")
        with pytest.raises(TeacherError, match="lost the targets"):
            await source.targets([told()])

    @staticmethod
    def require_equal(one: object, other: object) -> None:
        assert isinstance(one, dict)
        assert isinstance(other, dict)
        assert one.keys() == other.keys()
        for name, rows in one.items():
            for field_name in ("token_ids", "logprobs", "tail_logprobs", "entropies"):
                np.testing.assert_array_equal(
                    getattr(rows.top_k, field_name), getattr(other[name].top_k, field_name)
                )
