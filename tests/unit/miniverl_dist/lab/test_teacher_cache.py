from __future__ import annotations

import dataclasses
import hashlib
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from miniverl_dist.errors import (
    BatchError,
    ChecksumError,
    ConfigError,
    MiniverlError,
    RecordError,
    StaleCacheError,
)
from miniverl_dist.lab import cache_files
from miniverl_dist.lab.teacher_cache import (
    MAX_SHARD_BYTES,
    CacheIdentity,
    TeacherCache,
    content_key,
)
from miniverl_dist.schemas.targets import TeacherContext, TopKTargets, TrajectoryTargets
from tests.support.stored_targets import KEY, arrays, filled, identity, targets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "teacher-cache"


def fresh(folder: Path, **options: int) -> TeacherCache:
    return TeacherCache.open(folder, identity(), create=True, **options)


def shards(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("shard-*"))


class TestRoundTrip:
    @pytest.mark.parametrize("rows", [0, 1, 7])
    @pytest.mark.parametrize("width", [0, 1, 5])
    def test_get_after_put_is_what_a_reload_gives(
        self, folder: Path, rows: int, width: int
    ) -> None:
        cache, made = fresh(folder), targets("ep/α \"'", version=3, rows=rows, width=width)
        cache.put(made, KEY)
        before = arrays(cache.get(made.trajectory_id, KEY, 3))
        cache.flush()
        assert arrays(cache.get(made.trajectory_id, KEY, 3)) == before
        reloaded = TeacherCache.open(folder, identity(), create=False)
        assert arrays(reloaded.get(made.trajectory_id, KEY, 3)) == before

    def test_only_reals_are_rounded_and_to_float32(self, folder: Path) -> None:
        cache, made = fresh(folder), targets("a")
        cache.put(made, KEY)
        found = cache.get("a", KEY, 0)
        assert found is not None
        assert found.top_k is not None
        assert made.top_k is not None
        np.testing.assert_array_equal(found.positions, made.positions)
        np.testing.assert_array_equal(found.top_k.token_ids, made.top_k.token_ids)
        assert (found.num_candidates, found.policy_version) == (made.num_candidates, 0)
        for name in ("logprobs", "tail_logprobs", "entropies"):
            stored, original = getattr(found.top_k, name), getattr(made.top_k, name)
            assert stored.dtype == np.float64
            np.testing.assert_array_equal(stored, original.astype(np.float32).astype(np.float64))
            finite = np.isfinite(original)
            error = np.abs(stored[finite] - original[finite])
            assert error.max() > 0
            assert (error <= 2.0**-24 * np.abs(original[finite])).all()

    @given(
        sizes=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=8),
        shard_bytes=st.integers(1, 3000),
    )
    def test_any_entries_in_any_shards(
        self, tmp_path_factory: pytest.TempPathFactory, sizes: list[Any], shard_bytes: int
    ) -> None:
        folder = tmp_path_factory.mktemp("any") / "teacher-cache"
        cache = fresh(folder, shard_bytes=shard_bytes)
        made = [targets(f"t{i}", rows=m, width=k) for i, (m, k) in enumerate(sizes)]
        for one in made:
            cache.put(one, KEY)
        before = [arrays(cache.get(one.trajectory_id, KEY, 0)) for one in made]
        cache.flush()
        reloaded = TeacherCache.read(folder)
        assert [arrays(reloaded.get(one.trajectory_id, KEY, 0)) for one in made] == before
        assert reloaded.validate() == []
        assert len(reloaded) == len(made)

    def test_safetensors_reads_the_shards(self, folder: Path) -> None:
        cache = filled(folder, num_versions=1, per_version=3)
        tensors = load_file(folder / "shard-000000.safetensors")
        assert len(tensors) == 15
        for member in range(3):
            found = cache.get(f"ep-0.{member}", KEY, 0)
            assert found is not None
            assert found.top_k is not None
            for name in ("token_ids", "logprobs", "tail_logprobs", "entropies"):
                stored = tensors[f"ep-0.{member}/{name}"]
                assert stored.dtype == (np.int32 if name == "token_ids" else np.float32)
                np.testing.assert_array_equal(stored, getattr(found.top_k, name))
            np.testing.assert_array_equal(tensors[f"ep-0.{member}/positions"], found.positions)

    def test_a_trajectory_that_is_not_there_is_none(self, folder: Path) -> None:
        assert filled(folder).get("other", KEY, 0) is None

    def test_the_same_puts_give_the_same_bytes(self, tmp_path: Path) -> None:
        made = [filled(tmp_path / name) for name in ("a", "b")]
        assert len(made) == 2
        for name in [*shards(tmp_path / "a"), "index.json"]:
            assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


class TestPut:
    def test_the_newest_replaces_the_former(self, folder: Path) -> None:
        cache = fresh(folder)
        for seed in (1, 2):  # the second one while the first is in memory
            cache.put(targets("a", seed=seed), KEY)
        cache.flush()
        cache.put(targets("a", seed=3, version=4), KEY)
        cache.flush()
        reloaded = TeacherCache.read(folder)
        assert len(reloaded) == 1
        expected = TeacherCache.open(folder.with_name("other"), identity(), create=True)
        expected.put(targets("a", seed=3, version=4), KEY)
        assert arrays(reloaded.get("a", KEY, 4)) == arrays(expected.get("a", KEY, 4))

    def test_what_is_stored_already_is_not_written_again(self, folder: Path) -> None:
        cache = filled(folder)
        before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
        cache.put(targets("ep-0.0", rows=2), KEY)
        cache.flush()
        assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before

    def test_going_back_to_what_is_stored_forgets_what_was_to_replace_it(
        self, folder: Path
    ) -> None:
        cache = filled(folder)
        before = arrays(cache.get("ep-0.0", KEY, 0))
        cache.put(targets("ep-0.0", rows=2, seed=9), KEY)
        assert arrays(cache.get("ep-0.0", KEY, 0)) != before
        cache.put(targets("ep-0.0", rows=2), KEY)
        assert arrays(cache.get("ep-0.0", KEY, 0)) == before

    def test_a_full_shard_is_written_without_a_flush(self, folder: Path) -> None:
        cache = fresh(folder, shard_bytes=4000)
        most = 0
        for number in range(40):
            cache.put(targets(f"t{number:02d}"), KEY)
            most = max(most, len(cache) - len(TeacherCache.read(folder)))
        assert most < 10  # entries in memory
        assert len(shards(folder)) >= 5
        sizes = [(folder / name).stat().st_size for name in shards(folder)]
        assert max(sizes) < 4000 + 800

    def test_reading_an_entry_needs_nothing_else_of_its_shard(self, folder: Path) -> None:
        cache = filled(folder, num_versions=1, per_version=30)
        path = folder / "shard-000000.safetensors"
        entry = cache_files.read_index(folder).entries[7]
        place = slice(entry.start, entry.start + entry.num_bytes)
        whole, blank = path.read_bytes(), bytearray(path.stat().st_size)
        blank[place] = whole[place]
        path.write_bytes(bytes(blank))
        assert cache.get(entry.trajectory_id, KEY, 0) is not None
        assert len(cache.validate()) == 29

    def test_only_top_k_rows_are_stored(self, folder: Path) -> None:
        text = TeacherContext(np.arange(4), np.array([1, 2]))
        made = TrajectoryTargets("a", 0, np.array([3, 4]), 2, context=text)
        with pytest.raises(BatchError, match="'a' are a teacher's text"):
            fresh(folder).put(made, KEY)

    def test_more_tokens_than_the_identity_says(self, folder: Path) -> None:
        with pytest.raises(BatchError, match="keep 6 tokens a row, the cache is for top_k 5"):
            fresh(folder).put(targets("a", width=6), KEY)

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("token_ids", 2**31, "token_ids go from .* to 2147483648, expected 32 bits"),
            ("logprobs", -1e300, "logprobs reach 1e.300: not nats"),
        ],
    )
    def test_numbers_that_do_not_fit(
        self, folder: Path, name: str, value: float, message: str
    ) -> None:
        rows = targets("a", rows=9).top_k
        assert rows is not None
        fields = {f.name: getattr(rows, f.name).copy() for f in dataclasses.fields(rows)}
        fields[name][-1, 0] = value
        fields["tail_logprobs"][-1] = np.log1p(-np.exp(fields["logprobs"][-1]).sum())
        made = dataclasses.replace(targets("a", rows=9), top_k=TopKTargets(**fields))
        cache = fresh(folder)
        with pytest.raises(BatchError, match=message):
            cache.put(made, KEY)
        assert len(cache) == 0

    @pytest.mark.parametrize("size", [0, MAX_SHARD_BYTES + 1])
    def test_shards_of_any_size_are_not_offered(self, folder: Path, size: int) -> None:
        with pytest.raises(ConfigError, match="shard_bytes"):
            fresh(folder, shard_bytes=size)
        assert not folder.exists()


class TestContentKey:
    BASE = ([1, 2, 3], [4, 5], "hybrid:0.25:seed=1")

    @pytest.mark.parametrize(
        "other",
        [
            ([1, 2], [3, 4, 5], "hybrid:0.25:seed=1"),
            ([1, 2, 4], [4, 5], "hybrid:0.25:seed=1"),
            ([1, 2, 3], [4, 6], "hybrid:0.25:seed=1"),
            ([1, 2, 3], [4, 5], "hybrid:0.25:seed=2"),
        ],
    )
    def test_everything_counts(self, other: tuple[list[int], list[int], str]) -> None:
        assert content_key(*self.BASE) != content_key(*other)

    def test_it_is_the_same_everywhere(self) -> None:
        words = struct.pack("<Q3qQ2q", 3, 1, 2, 3, 2, 4, 5) + b"hybrid:0.25:seed=1"
        assert content_key(*self.BASE) == hashlib.sha256(words).hexdigest()
        assert content_key(np.array([1, 2, 3], np.int32), (4, 5), self.BASE[2]) == content_key(
            *self.BASE
        )


def flip(path: Path, where: int) -> None:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    path.write_bytes(bytes(data))


OTHER_IDENTITIES: dict[str, object] = {
    "teacher": "other",
    "teacher_checksum": "d" * 64,
    "student_fingerprint": "d" * 64,
    "teacher_fingerprint": "d" * 64,
    "mode": "privileged_context",
    "rendering": "raw",
    "top_k": 6,
    "temperature": 0.5,
    "selection": "tool_and_final",
}


class TestStale:
    @pytest.mark.parametrize("flushed", [True, False])
    def test_another_policy_version_or_text(self, folder: Path, flushed: bool) -> None:
        cache = fresh(folder)
        cache.put(targets("a", version=3), KEY)
        if flushed:
            cache.flush()
        for version in (2, 4):
            with pytest.raises(
                StaleCacheError, match=rf"policy_version found 3, expected {version}"
            ):
                cache.get("a", KEY, version)
        other = content_key([1], [2], "x")
        with pytest.raises(StaleCacheError, match=f"content_key found {KEY}, expected {other}"):
            cache.get("a", other, 3)

    @pytest.mark.parametrize(("field", "value"), OTHER_IDENTITIES.items())
    @pytest.mark.parametrize("create", [True, False])
    def test_another_identity(self, folder: Path, field: str, value: object, create: bool) -> None:
        filled(folder)
        other = identity(**{field: value})
        found = getattr(identity(), field)
        with pytest.raises(StaleCacheError) as caught:
            TeacherCache.open(folder, other, create=create)
        assert f"{field} found {found!r}, expected {value!r}" in str(caught.value)
        assert str(caught.value).count("expected") == 1
        assert TeacherCache.read(folder).identity == identity()

    def test_every_field_of_the_identity_is_tried(self) -> None:
        assert set(CacheIdentity.model_fields) == set(OTHER_IDENTITIES)


class TestOpen:
    def test_nothing_is_made_where_nothing_is_wanted(self, folder: Path) -> None:
        with pytest.raises(RecordError, match=r"holds no teacher cache: it has no index.json"):
            TeacherCache.open(folder, identity(), create=False)
        assert not folder.exists()

    def test_an_empty_cache_is_one(self, folder: Path) -> None:
        fresh(folder)
        reloaded = TeacherCache.open(folder, identity(), create=False)
        assert (len(reloaded), reloaded.validate()) == (0, [])

    def test_opening_again_keeps_what_is_there(self, folder: Path) -> None:
        filled(folder)
        cache = fresh(folder)
        cache.put(targets("new"), KEY)
        cache.flush()
        assert len(TeacherCache.read(folder)) == 7

    def test_shards_that_lost_their_index_are_not_removed(self, folder: Path) -> None:
        filled(folder)
        (folder / "index.json").unlink()
        with pytest.raises(RecordError, match="shards of a teacher cache but no index"):
            fresh(folder)
        assert len(shards(folder)) == 3


class TestCrash:
    """What a process that dies leaves behind."""

    @pytest.mark.parametrize("call", ["put", "flush", "prune"])
    def test_at_any_file_operation_the_former_cache_stays(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
    ) -> None:
        """Dies before the n-th change of the disk, for every n."""
        for number in range(100):
            folder = tmp_path / str(number) / "teacher-cache"
            cache = filled(folder)
            cache.put(targets("ep-0.0", rows=3, seed=5), KEY)  # prune has a shard to rewrite
            former = {
                name: (folder / name).read_bytes() for name in [*shards(folder), "index.json"]
            }
            with Dying(monkeypatch, number) as death:
                if call == "flush":
                    cache.flush()
                elif call == "prune":
                    cache.prune(max_bytes=2500)
                else:
                    cache._shard_bytes = 1
                    cache.put(targets("b"), KEY)
            reloaded = TeacherCache.read(folder)
            assert reloaded.validate() == []
            if death.happened and (folder / "index.json").read_bytes() == former["index.json"]:
                assert {name: (folder / name).read_bytes() for name in former} == former
            reloaded.put(targets("later"), KEY)
            reloaded.flush()
            assert TeacherCache.read(folder).validate() == []
            assert not [path for path in folder.iterdir() if path.name.endswith(".tmp")]
            assert len(shards(folder)) == TeacherCache.read(folder).stats().num_shards
            if not death.happened:
                assert number > 5
                return
        pytest.fail("never got through")

    def test_a_stray_shard_is_ignored_and_then_removed(self, folder: Path) -> None:
        cache = filled(folder)
        for name in ("shard-000003.safetensors", ".shard-000003.safetensors.ab12.tmp", "mine.txt"):
            (folder / name).write_bytes(b"half a sha")
        reloaded = TeacherCache.read(folder)
        assert (reloaded.validate(), len(reloaded)) == ([], 6)
        cache.put(targets("new"), KEY)
        cache.flush()
        assert TeacherCache.read(folder).validate() == []
        assert sorted(path.name for path in folder.iterdir()) == [
            "index.json", "mine.txt", *[f"shard-00000{n}.safetensors" for n in range(4)],
        ]  # fmt: skip

    def test_a_full_disk_loses_nothing(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        cache = filled(folder)
        cache.put(targets("new"), KEY)
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", no_space)
            with pytest.raises(RecordError, match="no space left"):
                cache.flush()
        assert len(TeacherCache.read(folder)) == 6
        cache.flush()
        assert len(TeacherCache.read(folder)) == 7
        assert TeacherCache.read(folder).validate() == []


def no_space(_: int) -> None:
    raise OSError(28, "No space left on device")


class Killed(BaseException):
    """Not an exception that anything catches: the process is gone."""


class Dying:
    """Ends what is inside before its ``number``-th sync, rename or removal."""

    def __init__(self, patch: pytest.MonkeyPatch, number: int) -> None:
        self._patch, self._left, self.happened = patch, number, False

    def __enter__(self) -> Dying:
        self._context = self._patch.context()
        patch = self._context.__enter__()
        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink")):
            patch.setattr(owner, name, self._counted(getattr(owner, name)))
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self._context.__exit__(None, None, None)
        return kind is Killed

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if self._left == 0:
                self.happened = True
                raise Killed
            self._left -= 1
            return real(*arguments, **options)

        return call


class TestPrune:
    def test_versions(self, folder: Path) -> None:
        cache = filled(folder, num_versions=5)
        size = sum(path.stat().st_size for path in folder.glob("shard-*"))
        pruned = cache.prune(keep_versions=2)
        left = sum(path.stat().st_size for path in folder.glob("shard-*"))
        assert (pruned.num_entries, pruned.versions, pruned.num_bytes) == (
            6, (0, 1, 2), size - left,
        )  # fmt: skip
        assert shards(folder) == ["shard-000003.safetensors", "shard-000004.safetensors"]
        for found in (cache, TeacherCache.read(folder)):
            assert found.stats().entries_by_version == {3: 2, 4: 2}
            assert found.get("ep-2.0", KEY, 2) is None
            assert found.get("ep-3.0", KEY, 3) is not None

    def test_a_shard_is_written_anew_without_its_old_entries(self, folder: Path) -> None:
        cache = fresh(folder)
        for version in (0, 1):
            for member in range(3):
                cache.put(targets(f"ep-{version}.{member}", version=version), KEY)
        cache.flush()
        before = {m: arrays(cache.get(f"ep-1.{m}", KEY, 1)) for m in range(3)}
        assert cache.prune(keep_versions=1).num_entries == 3
        assert shards(folder) == ["shard-000001.safetensors"]
        reloaded = TeacherCache.read(folder)
        assert {m: arrays(reloaded.get(f"ep-1.{m}", KEY, 1)) for m in range(3)} == before
        assert reloaded.validate() == []
        assert load_file(folder / shards(folder)[0]).keys() == {
            f"ep-1.{m}/{name}"
            for m in range(3)
            for name in ("positions", "token_ids", "logprobs", "tail_logprobs", "entropies")
        }

    @pytest.mark.parametrize("per_shard", [1, 3, 7])
    def test_bytes(self, tmp_path: Path, per_shard: int) -> None:
        """The largest number of newest entries that fits, measured on the disk, for every limit."""
        sizes: dict[int, int] = {}
        for limit in [0, 100, *range(700, 9000, 450), 10**6]:
            folder = tmp_path / str(limit) / "teacher-cache"
            cache = fresh(folder)
            for number in range(7):
                # Put in another order than that of the versions.
                version = (number * 3) % 7
                cache.put(targets(f"t{version}", version=version, rows=3), KEY)
                if number % per_shard == per_shard - 1:
                    cache.flush()
            pruned = cache.prune(max_bytes=limit)
            kept = sorted(cache.stats().entries_by_version)
            assert kept == list(range(7 - len(kept), 7))
            assert pruned.versions == tuple(range(7 - len(kept)))
            size = sum(path.stat().st_size for path in folder.glob("shard-*"))
            assert size == cache.stats().num_bytes <= limit
            sizes[len(kept)] = size
            if len(kept) < 7:
                bigger = sizes.get(len(kept) + 1)
                assert bigger is None or bigger > limit
            assert TeacherCache.read(folder).validate() == []
        assert {0, 7} < sizes.keys()
        assert list(sizes) == sorted(sizes)

    def test_space_of_replaced_entries_is_freed(self, folder: Path) -> None:
        cache = filled(folder, num_versions=1)
        cache.put(targets("ep-0.0", version=0, seed=8), KEY)
        cache.flush()
        stats = cache.stats()
        assert stats.num_replaced_bytes > 4 * 2 * 13
        pruned = cache.prune(keep_versions=9)
        assert (pruned.num_entries, pruned.num_bytes) == (0, stats.num_replaced_bytes)
        assert cache.stats().num_replaced_bytes == 0
        assert TeacherCache.read(folder).validate() == []

    def test_what_is_in_memory_is_kept_too(self, folder: Path) -> None:
        cache = filled(folder)
        cache.put(targets("new", version=3), KEY)
        assert cache.prune(keep_versions=1).num_entries == 6
        assert TeacherCache.read(folder).get("new", KEY, 3) is not None

    def test_a_name_is_never_used_twice(self, folder: Path) -> None:
        cache = filled(folder)
        cache.prune(max_bytes=0)
        assert shards(folder) == []
        reopened = fresh(folder)
        reopened.put(targets("new"), KEY)
        reopened.flush()
        assert shards(folder) == ["shard-000003.safetensors"]

    def test_damage_stops_it(self, folder: Path) -> None:
        cache = filled(folder)
        cache.put(targets("ep-2.0", version=2, seed=8), KEY)
        cache.flush()
        entry = next(
            e for e in cache_files.read_index(folder).entries if e.trajectory_id == "ep-2.1"
        )
        flip(folder / entry.shard, entry.start)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        with pytest.raises(ChecksumError, match=r"ep-2\.1"):
            cache.prune(keep_versions=1)
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({}, "found neither"),
            ({"keep_versions": 0}, "keep_versions 0, expected at least 1"),
            ({"max_bytes": -1}, "max_bytes -1, expected at least 0"),
        ],
    )
    def test_what_makes_no_sense(self, folder: Path, options: dict[str, int], message: str) -> None:
        cache = filled(folder)
        with pytest.raises(ConfigError, match=message):
            cache.prune(**options)
        assert len(cache) == 6


def test_stats(folder: Path) -> None:
    cache = filled(folder, num_versions=2, per_version=3)
    stats = cache.stats()
    assert (stats.num_entries, stats.num_shards, stats.num_rows) == (6, 2, 2 * (2 + 3 + 4))
    assert stats.num_candidates == 2 * (5 + 7 + 9)
    assert stats.queried_position_ratio == pytest.approx(18 / 42)
    assert stats.num_bytes == sum(path.stat().st_size for path in folder.glob("shard-*"))
    assert stats.num_replaced_bytes == 0
    assert stats.entries_by_version == {0: 3, 1: 3}
    assert stats.identity == identity()
    empty = fresh(folder.with_name("empty")).stats()
    assert (empty.queried_position_ratio, empty.num_entries) == (0.0, 0)


def test_the_index_on_disk_is_compared(folder: Path) -> None:
    cache, other = filled(folder), TeacherCache.read(folder)
    assert other.is_current()
    cache.prune(keep_versions=1)
    assert cache.is_current()
    assert not other.is_current()
    flip(folder / "index.json", 100)
    with pytest.raises(MiniverlError):
        other.is_current()
