"""Stored episodes: nothing of them counts as sampled, and their order hangs on the place alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from miniverl_dist.errors import ConfigError, RecordError, TokenizerMismatchError
from miniverl_dist.lab.demonstrations import (
    ReadableIds,
    StoredEpisodes,
    as_demonstration,
    read_episodes,
)
from miniverl_dist.ports import Assignment, ScoredTrajectory
from miniverl_dist.schemas.trajectory import Termination, Trajectory
from tests.fakes import ByteTokenizer, trajectory

FINGERPRINT = ByteTokenizer().fingerprint
BYTES = ReadableIds("bytes", FINGERPRINT, range(259), frozenset({FINGERPRINT}))


def place(ticket: int, task_id: str = "a") -> Assignment:
    return Assignment(ticket=ticket, task_id=task_id, prefix_calls=0, tail_calls=1)


def episodes(count: int, task_id: str = "a") -> list[Trajectory]:
    return [trajectory(f"{task_id}{i}", place=place(0, task_id), member=i) for i in range(count)]


def test_a_demonstration_holds_no_sampled_token() -> None:
    told = as_demonstration(trajectory("abc", version=3))
    assert not any(told.loss_mask)
    assert np.isnan(told.rollout_logprobs).all()
    assert told.sampled_spans == ()
    assert told.token_ids == trajectory("abc").token_ids
    Trajectory.model_validate_json(told.model_dump_json())  # still a record that holds


async def test_siblings_differ_and_an_epoch_holds_each_once() -> None:
    source = StoredEpisodes(episodes(6), seed=1, group_size=3)
    told = [(await source.rollout(place(t), m)).trajectory_id for t in (0, 1) for m in range(3)]
    assert len(set(told)) == 6
    again = [(await source.rollout(place(t), m)).trajectory_id for t in (2, 3) for m in range(3)]
    assert set(again) == set(told)
    assert again != told


async def test_the_same_place_gives_the_same_episode() -> None:
    one, other = (StoredEpisodes(episodes(6), seed=1, group_size=3) for _ in range(2))
    for ticket in (5, 0, 3):
        a, b = await one.rollout(place(ticket), 2), await other.rollout(place(ticket), 2)
        assert a.token_ids == b.token_ids
        assert a.group_id == place(ticket).group_id


async def test_tasks_are_kept_apart() -> None:
    source = StoredEpisodes([*episodes(2), *episodes(2, "b")], seed=1, group_size=1)
    assert source.task_ids == ("a", "b")
    assert (await source.rollout(place(0, "b"), 0)).task_id == "b"
    with pytest.raises(ConfigError, match="no episode of task 'c'"):
        await source.rollout(place(0, "c"), 0)


class TestFile:
    def write(self, tmp_path: Path, *told: Trajectory) -> Path:
        path = tmp_path / "trajectories.jsonl"
        lines = [ScoredTrajectory(trajectory=one).model_dump_json() for one in told]
        path.write_text("\n".join(lines) + "\n")
        return path

    def read(self, path: Path, *, only_passed: bool = True) -> list[Trajectory]:
        return read_episodes(path, BYTES, only_passed=only_passed)

    def test_only_what_passed_under_names_of_its_own(self, tmp_path: Path) -> None:
        good, bad = trajectory("a", passed=True), trajectory("b")
        lost = trajectory("c", passed=True, termination=Termination.DEADLINE)
        path = self.write(tmp_path, good, bad, lost, good)
        assert [one.trajectory_id for one in self.read(path)] == [
            f"{good.trajectory_id}@1",
            f"{good.trajectory_id}@4",
        ]
        assert len(self.read(path, only_passed=False)) == 3

    def test_nothing_to_learn_from(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="only_passed leaves out"):
            self.read(self.write(tmp_path, trajectory("b")))
        with pytest.raises(ConfigError, match=rf"cannot read {tmp_path}/none\.jsonl"):
            self.read(tmp_path / "none.jsonl")

    def test_a_broken_line_is_named(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, trajectory("a", passed=True))
        path.write_text(path.read_text() + '{"trajectory": 3}\n')
        with pytest.raises(RecordError, match=r"line 2: trajectory: found 3"):
            self.read(path)

    def test_ids_of_another_tokenizer(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, trajectory("a", passed=True))
        foreign = replace(BYTES, fingerprint="0" * 64, same_base=frozenset())
        found = (
            r"line 1: token ids of vocabulary .* leave the run's student-vocabulary\.json beside"
        )
        with pytest.raises(TokenizerMismatchError, match=found):
            read_episodes(path, foreign, only_passed=True)

    def test_ids_of_another_part_of_the_same_vocabulary(self, tmp_path: Path) -> None:
        """What counts is that the student has every id, not that both declared the same set."""
        told = trajectory("a", passed=True)
        path = self.write(tmp_path, told)
        other = replace(BYTES, fingerprint="0" * 64)
        [read] = read_episodes(path, other, only_passed=True)
        assert read.token_ids == told.token_ids
        assert read.tokenizer_fingerprint == "0" * 64
        lacking = replace(other, ids=set(range(259)) - {ord("a")})
        found = r"line 1: token ids \[97\] \(1 in all\) are not in the student's vocabulary bytes"
        with pytest.raises(TokenizerMismatchError, match=found):
            read_episodes(path, lacking, only_passed=True)

    @pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\x85", "\x0b", "\x1c"])
    def test_a_separator_within_a_text_ends_no_line(self, tmp_path: Path, separator: str) -> None:
        told = [trajectory(f"a{separator}b", passed=True), trajectory("c", passed=True)]
        path = self.write(tmp_path, *told)
        assert [one.token_ids for one in self.read(path)] == [one.token_ids for one in told]

    def test_a_line_that_was_cut_is_shown_in_part(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, trajectory("a" * 500, passed=True))
        path.write_bytes(path.read_bytes()[:-300])
        with pytest.raises(RecordError, match=r"line 1: .*…") as caught:
            self.read(path)
        assert len(str(caught.value)) < 300
