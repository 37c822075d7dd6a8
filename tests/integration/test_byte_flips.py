"""One byte of a cache or a checkpoint is another one: it is found, wherever it is."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.errors import CheckpointError, ChecksumError, RecordError
from miniverl_dist.lab.cache_files import read_index
from miniverl_dist.lab.teacher_cache import TeacherCache
from miniverl_dist.schemas.run_state import RunState
from miniverl_dist.training.checkpoint import commit, verify
from tests.support.stored_targets import KEY, arrays, filled
from tests.support.toy import random_batch, tiny_backend

NUM_FLIPS = 500


class Damaged:
    """Files of a folder, one byte of which is changed and put back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = [(p, p.read_bytes()) for p in sorted(folder.rglob("*")) if p.is_file()]

    def flips(self) -> st.SearchStrategy[tuple[int, int, int]]:
        """File, place and change; every file is as likely as any other."""
        return st.sampled_from(range(len(self._files))).flatmap(
            lambda file: st.tuples(
                st.just(file),
                st.integers(0, len(self._files[file][1]) - 1),
                st.integers(1, 255),
            )
        )

    def flip(self, file: int, place: int, change: int) -> None:
        path, data = self._files[file]
        self._write(path, place, data[place] ^ change)

    def restore(self, file: int, place: int) -> None:
        path, data = self._files[file]
        self._write(path, place, data[place])

    def every(self, name: str) -> Iterator[tuple[int, int, int]]:
        """Each place of a file; the changes run through all values."""
        for number, (path, data) in enumerate(self._files):
            if path.name == name:
                for place in range(len(data)):
                    yield number, place, 1 + place % 255

    def swaps(self, name: str, found: bytes, other: bytes) -> Iterator[tuple[int, int, int]]:
        """Each place of a file where ``found`` stands, to become ``other``."""
        for number, place, _ in self.every(name):
            if self._files[number][1][place] == found[0]:
                yield number, place, found[0] ^ other[0]

    @staticmethod
    def _write(path: Path, place: int, value: int) -> None:
        with path.open("r+b") as file:
            file.seek(place)
            file.write(bytes([value]))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    folder = tmp_path_factory.mktemp("cache") / "teacher-cache"
    filled(folder, num_versions=3, per_version=4)
    return Damaged(folder)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Damaged:
    """A commit of a toy student after one update."""
    backend = tiny_backend()
    backend.update(random_batch(0))

    async def save(directory: Path) -> None:
        backend.save(directory)

    state = RunState(
        step=1,
        policy_version=backend.policy_version,
        num_publishes=2,
        next_ticket=4,
        curriculum={"tail_calls": {"task é": 1}, "rate": 1e-7},
        counters={"dropped": 0},
        file_positions={"metrics.jsonl": 10},
        config_digest="d" * 64,
        seed=0,
        warmup_done=True,
    )
    folder = tmp_path_factory.mktemp("checkpoints")
    return Damaged(asyncio.run(commit(folder, "step-000001", state, save)))


def check_cache(damaged: Damaged, before: dict[str, dict[str, bytes]]) -> None:
    """It is found by a validation, and no entry is ever read as another one."""
    try:
        cache = TeacherCache.read(damaged.folder)
    except (ChecksumError, RecordError):
        return
    assert cache.validate()
    for trajectory_id, former in before.items():
        version = int(trajectory_id.removeprefix("ep-").split(".")[0])
        try:
            found = cache.get(trajectory_id, KEY, version)
        except ChecksumError as error:
            message = str(error)
        else:
            assert arrays(found) == former
            continue
        assert trajectory_id in message


def contents(damaged: Damaged) -> dict[str, dict[str, bytes]]:
    cache = TeacherCache.read(damaged.folder)
    entries = read_index(damaged.folder).entries
    assert len(entries) == 12
    return {
        entry.trajectory_id: arrays(cache.get(entry.trajectory_id, KEY, entry.policy_version))
        for entry in entries
    }


def check_checkpoint(damaged: Damaged) -> None:
    with pytest.raises((ChecksumError, CheckpointError)):
        verify(damaged.folder)


def test_a_flipped_byte_of_a_cache_is_found(cache: Damaged) -> None:
    before = contents(cache)
    assert TeacherCache.read(cache.folder).validate() == []

    @settings(max_examples=NUM_FLIPS, database=None)
    @given(cache.flips())
    def one(flip: tuple[int, int, int]) -> None:
        cache.flip(*flip)
        try:
            check_cache(cache, before)
        finally:
            cache.restore(*flip[:2])

    one()
    assert TeacherCache.read(cache.folder).validate() == []


def test_a_flipped_byte_of_a_checkpoint_is_found(checkpoint: Damaged) -> None:
    verify(checkpoint.folder)

    @settings(max_examples=NUM_FLIPS, database=None)
    @given(checkpoint.flips())
    def one(flip: tuple[int, int, int]) -> None:
        checkpoint.flip(*flip)
        try:
            check_checkpoint(checkpoint)
        finally:
            checkpoint.restore(*flip[:2])

    one()
    verify(checkpoint.folder)


def test_every_byte_of_what_names_the_others(cache: Damaged, checkpoint: Damaged) -> None:
    """The index and the manifest are read as JSON, which has bytes without a meaning."""
    for flip in cache.every("index.json"):
        cache.flip(*flip)
        with pytest.raises((ChecksumError, RecordError)):
            TeacherCache.read(cache.folder)
        cache.restore(*flip[:2])
    for flip in checkpoint.every("checkpoint.json"):
        checkpoint.flip(*flip)
        check_checkpoint(checkpoint)
        checkpoint.restore(*flip[:2])


@pytest.mark.parametrize(("found", "other"), [(b" ", b"\t"), (b"\n", b" "), (b"e", b"E")])
def test_bytes_that_mean_the_same_are_others(
    checkpoint: Damaged, found: bytes, other: bytes
) -> None:
    swaps = list(checkpoint.swaps("checkpoint.json", found, other))
    assert len(swaps) > 20
    for flip in swaps:
        checkpoint.flip(*flip)
        check_checkpoint(checkpoint)
        checkpoint.restore(*flip[:2])
    verify(checkpoint.folder)
