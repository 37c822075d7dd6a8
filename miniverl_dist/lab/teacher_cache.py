"""The teacher cache: top-k targets on disk, so that a teacher is asked once; torch-free.

Life of a cache: ``put`` collects entries in memory, ``flush`` (and ``put`` itself, when a shard is
full) writes them as one shard and then replaces the index. Shards never change; a shard that the
index does not name does not exist. So a crash at any point leaves the former index and everything
it names. Offline runs fill a cache once; online runs put each step's targets and prune old
versions.

On disk, numbers are float32. ``get`` decodes those bytes also for entries that are still in memory:
a loss computed from a cache is the same before and after a reload, bit for bit, and differs from
one computed from the teacher's float64 by that rounding.

One process writes a cache: the one that holds the run directory's lock.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self

import numpy as np
from numpy.typing import NDArray

from miniverl_dist.errors import (
    BatchError,
    ConfigError,
    RecordError,
    StaleCacheError,
)
from miniverl_dist.lab.cache_files import (
    INDEX_FILE,
    CacheIdentity,
    CacheIndex,
    EntryRecord,
    ShardRecord,
    StoredEntry,
    decode,
    encode,
    load_entry,
    read_entry,
    read_index,
    seal_index,
    shard_header,
    shard_name,
    shard_problems,
    shard_size,
)
from miniverl_dist.observability.run_dir import disk_errors, write_atomic
from miniverl_dist.schemas.messages import FrozenModel
from miniverl_dist.schemas.targets import TrajectoryTargets

__all__ = ["CacheIdentity", "CacheStats", "Pruned", "TeacherCache", "content_key"]

TEACHER_CACHE: Final = "teacher-cache"
"""Folder in a run directory."""
MAX_SHARD_BYTES: Final = 64 << 20
"""A shard of tiny entries is mostly header, and readers of safetensors accept 100 MB of one."""
_OURS = re.compile(r"shard-[0-9]{6,12}\.safetensors|\.(shard-|index\.json)[^/]*\.tmp")


class CacheStats(FrozenModel):
    """What a cache holds."""

    identity: CacheIdentity
    num_entries: int
    num_rows: int
    num_candidates: int
    queried_position_ratio: float
    """Rows per candidate; 0 for an empty cache."""
    num_shards: int
    num_bytes: int
    """Of all shards, headers and replaced entries included."""
    num_replaced_bytes: int
    """Of entries that others have replaced; ``prune`` frees them."""
    entries_by_version: dict[int, int]
    """Policy version -> entries."""


class Pruned(FrozenModel):
    """What ``prune`` has removed."""

    num_entries: int
    num_bytes: int
    """Freed on disk."""
    versions: tuple[int, ...]
    """Policy versions of which nothing is left."""


def content_key(
    token_ids: Sequence[int] | NDArray[np.int64],
    teacher_ids: Sequence[int] | NDArray[np.int64],
    selection: str,
) -> str:
    """SHA-256 (hex) of what targets depend on beside the cache's identity.

    Args:
        token_ids: Of the trajectory, the student's.
        teacher_ids: Of the text that the teacher reads.
        selection: Selector with its parameters and seed.
    """
    digest = hashlib.sha256()
    for part in (np.asarray(token_ids, "<i8"), np.asarray(teacher_ids, "<i8")):
        digest.update(len(part).to_bytes(8, "little") + part.tobytes())
    digest.update(selection.encode())
    return digest.hexdigest()


class TeacherCache:
    """Targets by trajectory id; use ``open`` or ``read``."""

    def __init__(
        self, folder: Path, index: CacheIndex, *, shard_bytes: int = MAX_SHARD_BYTES
    ) -> None:
        if not 0 < shard_bytes <= MAX_SHARD_BYTES:
            raise ConfigError(
                f"teacher cache: shard_bytes {shard_bytes}, expected 1 .. {MAX_SHARD_BYTES}"
            )
        self._folder = folder
        self._index = index
        self._entries = {entry.trajectory_id: entry for entry in index.entries}
        self._shard_bytes = shard_bytes
        self._pending: dict[str, tuple[EntryRecord, bytes]] = {}
        self._pending_bytes = 0

    @classmethod
    def open(
        cls,
        folder: Path,
        identity: CacheIdentity,
        *,
        create: bool,
        shard_bytes: int = MAX_SHARD_BYTES,
    ) -> Self:
        """Open a cache of this identity; its index is read, its shards are not.

        Args:
            folder: The run's ``teacher-cache``.
            identity: What targets are made with now.
            create: Make an empty cache where there is none.
            shard_bytes: A shard is written as soon as it has about so many bytes, header included;
                no more than that and one entry is held in memory.

        Raises:
            StaleCacheError: the cache was made with something else; the message names the fields.
            RecordError: there is no cache, or the index is not one.
            ChecksumError: the index is damaged.
        """
        if create and not (folder / INDEX_FILE).exists():
            cache = cls(folder, CacheIndex(identity=identity), shard_bytes=shard_bytes)
            _make(folder, cache._index)
            return cache
        index = read_index(folder)
        found, expected = index.identity.model_dump(), identity.model_dump()
        if changed := [name for name in expected if found[name] != expected[name]]:
            different = "; ".join(
                f"{name} found {found[name]!r}, expected {expected[name]!r}" for name in changed
            )
            raise StaleCacheError(
                f"{folder.name}/ was made with other settings: {different}. Use those settings, or "
                "a new run directory"
            )
        return cls(folder, index, shard_bytes=shard_bytes)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Open a cache of any identity, to look at it or to prune it.

        Raises:
            RecordError: there is no cache, or the index is not one.
            ChecksumError: the index is damaged.
        """
        return cls(folder, read_index(folder))

    @property
    def identity(self) -> CacheIdentity:
        """What all entries were made with."""
        return self._index.identity

    def __len__(self) -> int:
        return len(self._entries.keys() | self._pending.keys())

    def put(self, targets: TrajectoryTargets, content_key: str) -> None:
        """Take in one trajectory's targets; they replace any former ones of that trajectory.

        Raises:
            BatchError: not top-k rows, more than top_k tokens a row, or numbers that do not fit.
            RecordError: a full shard could not be written; the entry is kept in memory.
        """
        record, data = self._encoded(targets, content_key)
        if replaced := self._pending.pop(record.trajectory_id, None):
            self._pending_bytes -= shard_size([replaced[0]])
        stored = self._entries.get(record.trajectory_id)
        if stored is not None and _record(stored) == record:
            return
        self._pending[record.trajectory_id] = record, data
        self._pending_bytes += shard_size([record])
        if self._pending_bytes >= self._shard_bytes:
            self.flush()

    def get(
        self, trajectory_id: str, content_key: str, policy_version: int
    ) -> TrajectoryTargets | None:
        """The targets of a trajectory; None where there are none.

        Raises:
            StaleCacheError: they were made for another policy version or from other texts.
            ChecksumError: they are damaged.
            RecordError: they cannot be read.
        """
        pending = self._pending.get(trajectory_id)
        record = pending[0] if pending else self._entries.get(trajectory_id)
        if record is None:
            return None
        for name, expected in (("policy_version", policy_version), ("content_key", content_key)):
            found = getattr(record, name)
            if found != expected:
                raise StaleCacheError(
                    f"{self._folder.name}/, entry {trajectory_id!r}: {name} found {found}, "
                    f"expected {expected}: made for another episode; ask the teacher again"
                )
        if pending:
            return decode(*pending)
        assert isinstance(record, StoredEntry)
        return load_entry(self._folder, record)

    def flush(self) -> None:
        """Bring everything that was put to the disk: the shard first, then the index.

        Raises:
            RecordError: the disk is full or cannot be written. What was there before is intact,
                what was put is still in memory.
        """
        if not self._pending:
            return
        number = self._index.next_shard
        shard, stored = self._write_shard(number, list(self._pending.values()))
        former = [e for key, e in self._entries.items() if key not in self._pending]
        self._replace_index((*self._index.shards, shard), [*former, *stored], number + 1)
        self._pending, self._pending_bytes = {}, 0

    def stats(self) -> CacheStats:
        """Counts and sizes, from the index alone; what is not flushed is left out."""
        entries = self._entries.values()
        versions = Counter(entry.policy_version for entry in entries)
        num_rows = sum(entry.num_rows for entry in entries)
        num_candidates = sum(entry.num_candidates for entry in entries)
        num_bytes = self._num_bytes()
        return CacheStats(
            identity=self.identity,
            num_entries=len(entries),
            num_rows=num_rows,
            num_candidates=num_candidates,
            queried_position_ratio=num_rows / num_candidates if num_candidates else 0.0,
            num_shards=len(self._index.shards),
            num_bytes=num_bytes,
            num_replaced_bytes=num_bytes - _size(list(entries)),
            entries_by_version=dict(sorted(versions.items())),
        )

    def validate(self) -> list[str]:
        """Read everything; one line per damaged entry, or per shard that is damaged elsewhere."""
        by_shard = _grouped(self._entries.values())
        return [
            line
            for shard in self._index.shards
            for line in shard_problems(self._folder, shard, by_shard.get(shard.name, []))
        ]

    def is_current(self) -> bool:
        """Whether the index on disk is still the one that this cache has read or written.

        Raises:
            RecordError: there is none any more.
            ChecksumError: it has been damaged since.
        """
        return read_index(self._folder) == self._index

    def prune(self, *, keep_versions: int | None = None, max_bytes: int | None = None) -> Pruned:
        """Remove old entries and the space of replaced ones.

        A shard that has lost only some of its entries is written anew without them.

        Args:
            keep_versions: Keep the entries of so many newest policy versions.
            max_bytes: Then remove the oldest entries (by policy version, then by age) until the
                shards are no larger.

        Raises:
            ConfigError: neither is given, or one is too small.
            ChecksumError: an entry that is to be kept is damaged; nothing was removed.
            RecordError: the disk cannot be written; nothing was removed.
        """
        if keep_versions is None and max_bytes is None:
            raise ConfigError("prune: say how many versions or bytes to keep, found neither")
        if keep_versions is not None and keep_versions < 1:
            raise ConfigError(f"prune: keep_versions {keep_versions}, expected at least 1")
        if max_bytes is not None and max_bytes < 0:
            raise ConfigError(f"prune: max_bytes {max_bytes}, expected at least 0")
        self.flush()
        former, num_bytes = list(self._entries.values()), self._num_bytes()
        versions = sorted({entry.policy_version for entry in former})
        newest = set(versions if keep_versions is None else versions[-keep_versions:])
        kept = sorted(
            (entry for entry in former if entry.policy_version in newest),
            key=lambda entry: entry.policy_version,
        )
        if max_bytes is not None:
            kept = _newest_within(kept, max_bytes)
        self._keep(kept)
        left = {entry.policy_version for entry in kept}
        return Pruned(
            num_entries=len(former) - len(kept),
            num_bytes=num_bytes - self._num_bytes(),
            versions=tuple(version for version in versions if version not in left),
        )

    def _num_bytes(self) -> int:
        return sum(shard.num_bytes for shard in self._index.shards)

    def _encoded(self, targets: TrajectoryTargets, content_key: str) -> tuple[EntryRecord, bytes]:
        rows = targets.top_k
        if rows is None:
            raise BatchError(
                f"targets of {targets.trajectory_id!r} are a teacher's text: only top-k rows are "
                "stored"
            )
        width = rows.token_ids.shape[1]
        if width > self.identity.top_k:
            raise BatchError(
                f"targets of {targets.trajectory_id!r} keep {width} tokens a row, the cache is for "
                f"top_k {self.identity.top_k}"
            )
        data = encode(rows, targets.positions)
        record = EntryRecord(
            trajectory_id=targets.trajectory_id,
            content_key=content_key,
            policy_version=targets.policy_version,
            num_candidates=targets.num_candidates,
            num_rows=len(rows),
            width=width,
            sha256=hashlib.sha256(data).hexdigest(),
        )
        decode(record, data)  # rounding must not have made them other than targets
        return record, data

    def _write_shard(
        self, number: int, parts: Sequence[tuple[EntryRecord, bytes]]
    ) -> tuple[ShardRecord, list[StoredEntry]]:
        name = shard_name(number)
        head, starts = shard_header([record for record, _ in parts])
        data = head + b"".join(payload for _, payload in parts)
        write_atomic(self._folder / name, data)
        shard = ShardRecord(name=name, num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())
        stored = [
            StoredEntry(**record.model_dump(), shard=name, start=start)
            for (record, _), start in zip(parts, starts, strict=True)
        ]
        return shard, stored

    def _replace_index(
        self, shards: Sequence[ShardRecord], entries: Sequence[StoredEntry], next_shard: int
    ) -> None:
        index = CacheIndex(
            identity=self.identity,
            next_shard=next_shard,
            shards=tuple(shards),
            entries=tuple(entries),
        )
        write_atomic(self._folder / INDEX_FILE, seal_index(index))
        self._index = index
        self._entries = {entry.trajectory_id: entry for entry in entries}
        named = {shard.name for shard in shards}
        for path in self._folder.iterdir():
            # Left by a crash, or no longer wanted.
            if _OURS.fullmatch(path.name) and path.name not in named:
                path.unlink(missing_ok=True)

    def _keep(self, kept: Sequence[StoredEntry]) -> None:
        """Reduce the cache to these entries; the index is replaced once, at the end."""
        shards: list[ShardRecord] = []
        entries: list[StoredEntry] = []
        number = self._index.next_shard
        by_shard = _grouped(kept)
        for shard in self._index.shards:
            live = by_shard.get(shard.name, [])
            if live and shard_size(live) < shard.num_bytes:
                parts = [(_record(entry), read_entry(self._folder, entry)) for entry in live]
                shard, live = self._write_shard(number, parts)
                number += 1
            if live:
                shards.append(shard)
                entries += live
        self._replace_index(shards, entries, number)


def _make(folder: Path, index: CacheIndex) -> None:
    """An empty cache; the index comes first, so that shards never stand without one."""
    if folder.exists() and any(folder.glob("shard-*")):
        raise RecordError(
            f"{folder} holds shards of a teacher cache but no {INDEX_FILE}: restore it, or remove "
            "the folder to ask the teacher again"
        )
    with disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / INDEX_FILE, seal_index(index))


def _record(entry: StoredEntry) -> EntryRecord:
    return EntryRecord(**entry.model_dump(exclude={"shard", "start"}))


def _grouped(entries: Iterable[StoredEntry]) -> dict[str, list[StoredEntry]]:
    """Entries by shard, in the order of their bytes."""
    by_shard: dict[str, list[StoredEntry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.start):
        by_shard.setdefault(entry.shard, []).append(entry)
    return by_shard


def _size(entries: Sequence[StoredEntry]) -> int:
    """Bytes of shards that hold these entries and nothing else."""
    return sum(shard_size(live) for live in _grouped(entries).values())


def _newest_within(entries: list[StoredEntry], max_bytes: int) -> list[StoredEntry]:
    """As many of the last entries as fit into ``max_bytes`` of shards."""
    sizes: dict[tuple[str, int], int] = {}

    def size(live: list[StoredEntry]) -> int:
        # Entries go in one order, so their number says which ones of a shard are left.
        key = (live[0].shard, len(live))
        if key not in sizes:
            sizes[key] = shard_size(live)
        return sizes[key]

    def is_small(first: int) -> bool:
        return sum(map(size, _grouped(entries[first:]).values())) <= max_bytes

    return entries[bisect_left(range(len(entries)), True, key=is_small) :]
