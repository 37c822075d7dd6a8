from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from miniverl_dist.errors import ChecksumError, ResumeError
from miniverl_dist.ports import Assignment, ScoredGroup, ScoredTrajectory
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal
from miniverl_dist.schemas.trajectory import Termination
from miniverl_dist.training.journal import Journal, require_lags
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


def opened(folder: Path, digest: str = "c" * 64) -> Journal:
    return Journal(folder, digest)


def lines(groups: list[ScoredGroup] | None) -> list[str]:
    return [group.model_dump_json() for group in groups or []]


def test_a_batch_comes_back_bit_by_bit(tmp_path: Path) -> None:
    journal, groups = opened(tmp_path / "journal"), batch()
    journal.write(7, 17, groups)
    read = opened(tmp_path / "journal").read(7, 17)
    assert read is not None
    assert lines(read) == lines(groups)
    for old, new in zip(groups, read, strict=True):
        for a, b in zip(old.members, new.members, strict=True):
            assert (
                a.trajectory.rollout_logprobs.tobytes() == b.trajectory.rollout_logprobs.tobytes()
            )
            assert a.teacher == b.teacher


def test_a_step_that_was_not_written_is_none(tmp_path: Path) -> None:
    journal = opened(tmp_path / "journal")
    assert journal.read(0, 10) is None
    journal.write(1, 11, batch())
    assert journal.read(0, 10) is None


def test_writing_a_step_again_replaces_it(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.write(0, 10, batch())
    journal.write(0, 10, batch()[:1])
    assert len(journal.read(0, 10) or []) == 1


def test_clear_forgets_committed_steps_and_leaves_everything_else_alone(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for step in (0, 1, 2, 1_000_000):
        journal.write(step, 10 + step, batch())
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "step-000000-copy.json").write_text("{}")
    journal.clear(before_step=2)
    assert journal.verify() == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-000000-copy.json",
        "step-000002.json",
        "step-1000000.json",
    ]
    opened(tmp_path / "none yet").clear(before_step=5)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    journal, path = opened(tmp_path), tmp_path / "step-000003.json"
    journal.write(3, 13, batch())
    original = path.read_bytes()
    draw = random.Random(0)
    head = original.index(b"\n") + 1
    for where in [*range(head), *draw.sample(range(head, len(original)), 150)]:
        flipped = bytearray(original)
        flipped[where] ^= 1 << draw.randrange(8)
        path.write_bytes(bytes(flipped))
        with pytest.raises(ChecksumError, match=r"journal/step-000003\.json differs"):
            journal.read(3, 13)


@pytest.mark.parametrize("kept", [0, 10, 81, 500])
def test_a_file_that_was_cut_off_is_damaged(tmp_path: Path, kept: int) -> None:
    opened(tmp_path).write(0, 10, batch())
    path = tmp_path / "step-000000.json"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ChecksumError, match="remove it to sample that step again"):
        opened(tmp_path).read(0, 10)


def test_batches_behind_a_step_that_is_sampled_anew_are_forgotten(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    for step in (0, 1, 2):
        journal.write(step, 10 + step, batch())
    journal.write(1, 11, batch())
    assert journal.read(0, 10) is not None
    assert journal.read(2, 12) is None
    assert journal.verify() == 2


class TestWhoseBatch:
    """The head says it, under the same checksum as the groups."""

    def test_two_files_that_change_places_are_refused(self, tmp_path: Path) -> None:
        journal = opened(tmp_path)
        for step in (1, 2):
            journal.write(step, 10 + step, batch())
        first, second = tmp_path / "step-000001.json", tmp_path / "step-000002.json"
        first.rename(tmp_path / "aside")
        second.rename(first)
        (tmp_path / "aside").rename(second)
        found = r"journal/step-000001\.json holds the batch of step 2, expected step 1: remove it"
        with pytest.raises(ResumeError, match=found):
            journal.read(1, 11)
        with pytest.raises(ResumeError, match=found):
            journal.verify()

    def test_a_file_of_another_run_is_refused(self, tmp_path: Path) -> None:
        opened(tmp_path, "a" * 64).write(1, 11, batch())
        found = r"step-000001\.json belongs to a run of config a{12}, this one is c{12}: remove it"
        with pytest.raises(ResumeError, match=found):
            opened(tmp_path).read(1, 11)
        with pytest.raises(ResumeError, match=found):
            opened(tmp_path).verify()

    def test_a_batch_for_another_student_is_refused(self, tmp_path: Path) -> None:
        opened(tmp_path).write(1, 11, batch())
        found = r"was sampled for policy version 11, but the student is at 12 before step 1"
        with pytest.raises(ResumeError, match=found):
            opened(tmp_path).read(1, 12)

    @pytest.mark.parametrize("version", [10, 11])
    def test_versions_rise_with_the_steps(self, tmp_path: Path, version: int) -> None:
        journal = opened(tmp_path)
        journal.write(9, 11, batch())
        journal.write(10, version, batch())
        with pytest.raises(ResumeError, match=rf"version {version}, step 9 before it of 11"):
            journal.verify()

    def test_a_file_without_a_head_names_the_remedy(self, tmp_path: Path) -> None:
        opened(tmp_path).write(0, 0, batch())
        path = tmp_path / "step-000000.json"
        groups = path.read_bytes().split(b"\n", 2)[2]
        seal = json.dumps({"sha256": hashlib.sha256(groups).hexdigest()}).encode()
        path.write_bytes(seal + b"\n" + groups)
        found = "another version wrote it: finish the run with that version, or remove journal/"
        with pytest.raises(ResumeError, match=found):
            opened(tmp_path).read(0, 0)


@pytest.mark.parametrize(("lag", "is_fine"), [(-1, False), (0, True), (2, True), (3, False)])
def test_a_lag_that_the_run_cannot_have_had_is_refused(lag: int, is_fine: bool) -> None:
    groups = batch()
    if is_fine:
        require_lags(groups, [0, lag], 2, step=7)
        return
    found = rf"group 000005\.0 of step 7 has policy lag {lag}, expected 0 to 2"
    with pytest.raises(ResumeError, match=found):
        require_lags(groups, [0, lag], 2, step=7)
