from __future__ import annotations

import random
from pathlib import Path

import pytest

from miniverl_dist.errors import ChecksumError
from miniverl_dist.ports import Assignment, ScoredGroup, ScoredTrajectory
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal
from miniverl_dist.schemas.trajectory import Termination
from miniverl_dist.training.journal import Journal
from tests.fakes import ByteTokenizer, ok_call, teacher_score, trajectory


def batch() -> list[ScoredGroup]:
    """Two groups: a score, a refusal, a harness fault, and no teacher at all."""
    groups = []
    for ticket in (4, 5):
        place = Assignment(ticket=ticket, task_id=f"t{ticket}", prefix_calls=1, tail_calls=2)
        told = trajectory("α call", place=place, reward=1 / 3, calls=[ok_call("f", x=[0.1, None])])
        refusal = TeacherRefusal(
            trajectory_id="x", reason=RefusalReason.UNAVAILABLE, detail="breaker open"
        )
        broken = trajectory(place=place, termination=Termination.ENGINE_ERROR)
        members = (
            ScoredTrajectory(trajectory=told, teacher=teacher_score(told, ByteTokenizer())),
            ScoredTrajectory(trajectory=told, teacher=refusal),
            ScoredTrajectory(trajectory=broken),
        )
        groups.append(ScoredGroup(assignment=place, members=members, num_publishes=3))
    return groups


def lines(groups: list[ScoredGroup] | None) -> list[str]:
    return [group.model_dump_json() for group in groups or []]


def test_a_batch_comes_back_bit_by_bit(tmp_path: Path) -> None:
    journal, groups = Journal(tmp_path / "journal"), batch()
    journal.write(7, groups)
    read = Journal(tmp_path / "journal").read(7)
    assert read is not None
    assert lines(read) == lines(groups)
    for old, new in zip(groups, read, strict=True):
        for a, b in zip(old.members, new.members, strict=True):
            assert (
                a.trajectory.rollout_logprobs.tobytes() == b.trajectory.rollout_logprobs.tobytes()
            )
            assert a.teacher == b.teacher


def test_a_step_that_was_not_written_is_none(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    assert journal.read(0) is None
    journal.write(1, batch())
    assert journal.read(0) is None


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    journal.write(0, batch())
    journal.write(0, batch()[:1])
    assert len(journal.read(0) or []) == 1


def test_clear_forgets_committed_steps_and_leaves_everything_else_alone(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (0, 1, 2, 1_000_000):
        journal.write(step, batch())
    (tmp_path / "notes.txt").write_text("mine")
    journal.clear(before_step=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-000002.json",
        "step-1000000.json",
    ]
    Journal(tmp_path / "none yet").clear(before_step=5)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    journal, path = Journal(tmp_path), tmp_path / "step-000003.json"
    journal.write(3, batch())
    original = path.read_bytes()
    draw = random.Random(0)
    head = original.index(b"\n") + 1
    for where in [*range(head), *draw.sample(range(head, len(original)), 150)]:
        flipped = bytearray(original)
        flipped[where] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(flipped))
        with pytest.raises(ChecksumError, match=r"journal/step-000003\.json differs"):
            journal.read(3)


@pytest.mark.parametrize("kept", [0, 10, 81, 500])
def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path, kept: int) -> None:
    Journal(tmp_path).write(0, batch())
    path = tmp_path / "step-000000.json"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ChecksumError, match="delete it to sample that step again"):
        Journal(tmp_path).read(0)


def test_batches_behind_a_step_that_is_sampled_anew_are_forgotten(tmp_path: Path) -> None:
    journal = Journal(tmp_path)
    for step in (0, 1, 2):
        journal.write(step, batch())
    journal.write(1, batch())
    assert journal.read(0) is not None
    assert journal.read(2) is None
    assert journal.verify() == 2
