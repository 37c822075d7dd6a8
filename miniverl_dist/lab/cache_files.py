"""The teacher cache as bytes: entries, shards and index; numpy only, no code in a load path.

A shard is a safetensors file whose tensors lie entry by entry, so that one range of bytes is one
entry and is read alone. The index names every range with its SHA-256 and begins with its own.
Whatever a file says is checked before it is used as a length, a place or a name.

Shapes: m rows of an entry, k kept tokens.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NoReturn, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter, ValidationError, model_validator

from miniverl_dist.config.base import NonNegativeInt, PositiveFloat, PositiveInt
from miniverl_dist.errors import BatchError, ChecksumError, MiniverlError, RecordError
from miniverl_dist.schemas.messages import FrozenModel
from miniverl_dist.schemas.targets import TopKTargets, TrajectoryTargets

INDEX_FILE: Final = "index.json"
FORMAT_VERSION: Final = 1
MAX_HEADER_BYTES: Final = 100_000_000
"""What readers of safetensors accept."""
_INDEX_HEAD, _INDEX_MIDDLE, _INDEX_END = b'{"sha256":"', b'","index":', b"}\n"
_NUM_DIGEST_CHARS = 64
_BLOCK_BYTES = 1 << 20
_SHARD_PATTERN = r"^shard-[0-9]{6,12}\.safetensors$"

Header = Mapping[str, tuple[str, tuple[int, ...], int, int]]
"""Tensor name -> dtype, shape, first byte and end, both counted from the file's beginning."""
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
ShardName = Annotated[str, Field(pattern=_SHARD_PATTERN)]
"""Never a path: nothing outside the cache's folder can be named."""


class CacheIdentity(FrozenModel):
    """What all targets of a cache were made with: another value means other targets."""

    teacher: str
    teacher_checksum: str
    """Of the teacher's weights."""
    student_fingerprint: str
    """Of the student's tokenizer: positions and ids are the student's."""
    teacher_fingerprint: str
    mode: Literal["standard", "privileged_context"]
    rendering: Literal["native", "raw", "verbatim"]
    top_k: PositiveInt
    temperature: PositiveFloat
    selection: str
    """Selector with its parameters and seed, for instance ``uniform_ratio:0.25:seed=3``."""


class EntryRecord(FrozenModel):
    """One trajectory's targets: whose they are, their size and their SHA-256."""

    trajectory_id: str
    content_key: Sha256
    policy_version: NonNegativeInt
    num_candidates: NonNegativeInt
    num_rows: NonNegativeInt
    width: NonNegativeInt
    """k."""
    sha256: Sha256

    @property
    def num_bytes(self) -> int:
        """Payload: positions, tails and entropies once, ids and logprobs k times, 4 bytes each."""
        return 4 * self.num_rows * (3 + 2 * self.width)

    def tensors(self) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Name, safetensors dtype and shape of each tensor, in the order of their bytes."""
        rows, kept = (self.num_rows,), (self.num_rows, self.width)
        yield f"{self.trajectory_id}/positions", "I32", rows
        yield f"{self.trajectory_id}/token_ids", "I32", kept
        yield f"{self.trajectory_id}/logprobs", "F32", kept
        yield f"{self.trajectory_id}/tail_logprobs", "F32", rows
        yield f"{self.trajectory_id}/entropies", "F32", rows


class StoredEntry(EntryRecord):
    """An entry in a shard."""

    shard: ShardName
    start: Annotated[int, Field(ge=8)]
    """First byte, counted from the beginning of the file."""


class ShardRecord(FrozenModel):
    """One shard with its size and SHA-256."""

    name: ShardName
    num_bytes: NonNegativeInt
    sha256: Sha256


class CacheIndex(FrozenModel):
    """``index.json``: the only way into the shards; what it does not name does not exist."""

    format_version: Literal[1] = FORMAT_VERSION
    identity: CacheIdentity
    next_shard: NonNegativeInt = 0
    """Number of the next shard. A name is never used twice: a reader with an older index then
    finds a shard as it was, or none."""
    shards: tuple[ShardRecord, ...] = ()
    entries: tuple[StoredEntry, ...] = ()

    @model_validator(mode="after")
    def _check(self) -> Self:
        sizes = {shard.name: shard.num_bytes for shard in self.shards}
        if len(sizes) != len(self.shards):
            raise RecordError(f"{INDEX_FILE} names a shard twice")
        if any(shard_number(name) >= self.next_shard for name in sizes):
            raise RecordError(f"{INDEX_FILE}: next_shard {self.next_shard} is taken already")
        if len({entry.trajectory_id for entry in self.entries}) != len(self.entries):
            raise RecordError(f"{INDEX_FILE} has two entries of one trajectory")
        for entry in self.entries:
            where = f"{INDEX_FILE}: entry {entry.trajectory_id!r}"
            if entry.shard not in sizes:
                raise RecordError(f"{where} is in {entry.shard}, which is no shard of the index")
            if entry.start + entry.num_bytes > sizes[entry.shard]:
                raise RecordError(
                    f"{where} takes bytes {entry.start} .. {entry.start + entry.num_bytes} of "
                    f"{entry.shard}, which has {sizes[entry.shard]}"
                )
            if entry.width > self.identity.top_k:
                raise RecordError(
                    f"{where} keeps {entry.width} tokens a row, expected at most top_k "
                    f"{self.identity.top_k}"
                )
        return self


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:06d}.safetensors"


def shard_number(name: str) -> int:
    """Inverse of ``shard_name``."""
    return int(name.removeprefix("shard-").removesuffix(".safetensors"))


def encode(targets: TopKTargets, positions: NDArray[np.int64]) -> bytes:
    """An entry's bytes: little-endian int32 and float32, rounded to nearest.

    A logprob moves by at most 2**-24 of its size (4e-7 nats at -6).

    Raises:
        BatchError: an id, a position or a logprob does not fit.
    """
    integers, floats = np.iinfo(np.int32), np.finfo(np.float32)
    parts: list[bytes] = []
    for name, whole in (("positions", positions), ("token_ids", targets.token_ids)):
        if whole.size and not integers.min <= whole.min() <= whole.max() <= integers.max:
            raise BatchError(f"{name} go from {whole.min()} to {whole.max()}, expected 32 bits")
        parts.append(whole.astype("<i4").tobytes())
    for name in ("logprobs", "tail_logprobs", "entropies"):
        real = getattr(targets, name)
        if (np.isfinite(real) & (np.abs(real) > floats.max)).any():
            raise BatchError(f"{name} reach {np.abs(real[np.isfinite(real)]).max()}: not nats")
        parts.append(real.astype("<f4").tobytes())
    return b"".join(parts)


def decode(record: EntryRecord, data: bytes) -> TrajectoryTargets:
    """The targets that ``data`` (of the record's length) holds.

    Raises:
        BatchError: the bytes are no targets.
    """
    words = np.frombuffer(data, dtype="<i4")
    shapes = [shape for _, _, shape in record.tensors()]
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    parts = zip(np.split(words, ends[:-1]), shapes, strict=True)
    positions, ids, *reals = (part.reshape(shape) for part, shape in parts)
    # Foreign bytes may be infinities or NaN: the checks of the targets refuse them by their mass.
    with np.errstate(over="ignore", invalid="ignore"):
        logprobs, tails, entropies = (real.view("<f4").astype(np.float64) for real in reals)
        return TrajectoryTargets(
            record.trajectory_id,
            record.policy_version,
            positions.astype(np.int64),
            record.num_candidates,
            TopKTargets(ids.astype(np.int64), logprobs, tails, entropies),
        )


def shard_header(records: Sequence[EntryRecord]) -> tuple[bytes, list[int]]:
    """What stands before the data, and where each entry begins in the file."""
    header: dict[str, dict[str, Any]] = {}
    offsets, end = [], 0
    for record in records:
        offsets.append(end)
        for name, dtype, shape in record.tensors():
            start, end = end, end + 4 * math.prod(shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    head = struct.pack("<Q", len(text)) + text
    return head, [len(head) + offset for offset in offsets]


def shard_size(records: Sequence[EntryRecord]) -> int:
    """Bytes of a shard that holds these entries and nothing else."""
    return len(shard_header(records)[0]) + sum(record.num_bytes for record in records)


def read_header(path: Path) -> Header:
    """What a shard says of itself.

    Raises:
        RecordError: the file is no safetensors file.
    """
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(num_bytes - 8, MAX_HEADER_BYTES):
            raise RecordError(
                f"{path.name}: a header of {length} bytes in a file of {num_bytes}, expected one "
                f"of at most {MAX_HEADER_BYTES}"
            )
        text = file.read(length)
    refuse_repeated_keys(text, path.name)
    try:
        tensors = _HEADER.validate_json(text)
    except ValidationError as error:
        _raise_invalid(error, f"{path.name}, header")
    data = 8 + length
    return {
        name: (t.dtype, t.shape, data + t.data_offsets[0], data + t.data_offsets[1])
        for name, t in tensors.items()
    }


def read_entry(folder: Path, entry: StoredEntry) -> bytes:
    """The bytes of one entry; the rest of the shard is not read.

    Raises:
        ChecksumError: the shard is missing or cut, or the bytes differ from their checksum.
        RecordError: it cannot be read.
    """
    path = folder / entry.shard
    where = _place(folder, entry)
    remedy = f"remove {folder.name}/ to ask the teacher again"
    end = entry.start + entry.num_bytes
    if not path.is_file():
        raise ChecksumError(f"{where}: the file is missing; {remedy}")
    if (size := path.stat().st_size) < end:
        raise ChecksumError(
            f"{where}: ends at byte {end}, the file has {size}: it was cut; {remedy}"
        )
    try:
        with path.open("rb") as file:
            file.seek(entry.start)
            data = file.read(entry.num_bytes)
    except OSError as error:
        raise RecordError(f"{where}: cannot be read: {error.strerror or error}") from None
    found = hashlib.sha256(data).hexdigest()
    if found != entry.sha256:
        raise ChecksumError(
            f"{where}: SHA-256 {found[:12]}, expected {entry.sha256[:12]}; the file is damaged: "
            f"{remedy}"
        )
    return data


def load_entry(folder: Path, entry: StoredEntry) -> TrajectoryTargets:
    """The targets of one entry.

    Raises:
        ChecksumError: as ``read_entry``.
        RecordError: it cannot be read, or holds no targets although its checksum is right.
    """
    data = read_entry(folder, entry)
    try:
        return decode(entry, data)
    except BatchError as error:
        raise RecordError(f"{_place(folder, entry)}: holds no targets: {error}") from error


def shard_problems(
    folder: Path, shard: ShardRecord, entries: Sequence[StoredEntry]
) -> Iterator[str]:
    """One line per damaged entry of a shard, or one for damage outside of all entries."""
    num_damaged = 0
    for entry in entries:
        try:
            load_entry(folder, entry)
        except MiniverlError as error:
            num_damaged += 1
            yield str(error)
    damage = _damage(folder, shard)
    if damage is None:
        yield from _header_problems(folder, shard.name, entries)
    elif not num_damaged:
        yield f"{folder.name}/{shard.name}: {damage}; its {len(entries)} entries are intact"


def _header_problems(folder: Path, name: str, entries: Sequence[StoredEntry]) -> Iterator[str]:
    """Where the header, by which other readers read, contradicts the index, by which we do."""
    try:
        header = read_header(folder / name)
    except RecordError as error:
        yield f"{folder.name}/{error}"
        return
    for entry in entries:
        if problem := _contradiction(header, entry):
            yield f"{_place(folder, entry)}: {problem}"


def _place(folder: Path, entry: StoredEntry) -> str:
    return f"{folder.name}/{entry.shard}, entry {entry.trajectory_id!r}"


def _damage(folder: Path, shard: ShardRecord) -> str | None:
    """Why a shard is not the file that was written; None where it is."""
    path = folder / shard.name
    if not path.is_file():
        return "the file is missing"
    if (size := path.stat().st_size) != shard.num_bytes:
        return f"{size} bytes, expected {shard.num_bytes}"
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    found = digest.hexdigest()
    if found == shard.sha256:
        return None
    return f"SHA-256 {found[:12]}, expected {shard.sha256[:12]}"


def _contradiction(header: Header, entry: StoredEntry) -> str | None:
    start = entry.start
    for name, dtype, shape in entry.tensors():
        expected = (dtype, shape, start, start + 4 * math.prod(shape))
        if header.get(name) != expected:
            return f"tensor {name!r} is {header.get(name)} in the header, {expected} in the index"
        start = expected[3]
    return None


def seal_index(index: CacheIndex) -> bytes:
    """The index as a file: one JSON object that begins with the SHA-256 of all that follows."""
    body = index.model_dump_json().encode() + _INDEX_END
    return _INDEX_HEAD + hashlib.sha256(body).hexdigest().encode() + _INDEX_MIDDLE + body


def read_index(folder: Path) -> CacheIndex:
    """Read and check ``index.json``; the shards are not looked at.

    Raises:
        RecordError: there is none, it cannot be read, or it is no index of a teacher cache.
        ChecksumError: it differs from its own checksum.
    """
    where = f"{folder.name}/{INDEX_FILE}"
    try:
        data = (folder / INDEX_FILE).read_bytes()
    except FileNotFoundError:
        raise RecordError(f"{folder} holds no teacher cache: it has no {INDEX_FILE}") from None
    except OSError as error:
        raise RecordError(f"cannot read {where}: {error.strerror or error}") from None
    head = len(_INDEX_HEAD) + _NUM_DIGEST_CHARS
    body = data[head + len(_INDEX_MIDDLE) :]
    found = hashlib.sha256(body).hexdigest().encode()
    if data[:head] != _INDEX_HEAD + found or data[head : -len(body)] != _INDEX_MIDDLE:
        raise ChecksumError(
            f"{where} differs from its checksum: it is damaged, or no index of a teacher cache; "
            f"remove {folder.name}/ to ask the teacher again"
        )
    text = body.removesuffix(_INDEX_END)
    refuse_repeated_keys(text, where)
    try:
        return CacheIndex.model_validate_json(text)
    except ValidationError as error:
        _raise_invalid(error, where)


def refuse_repeated_keys(text: bytes, where: str) -> None:
    """Readers differ in which of two equal keys counts, so there must not be any.

    Raises:
        RecordError: a key stands twice in one object, or the text is no JSON.
    """

    def check(pairs: list[tuple[str, object]]) -> None:
        keys: set[str] = set()
        for key, _ in pairs:
            if key in keys:
                raise RecordError(f"{where}: key {key[:80]!r} stands twice in one object")
            keys.add(key)

    try:
        json.loads(text, object_pairs_hook=check)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"{where}: not valid JSON: {error}") from None


class _Tensor(FrozenModel):
    dtype: str
    shape: tuple[NonNegativeInt, ...]
    data_offsets: tuple[NonNegativeInt, NonNegativeInt]


_HEADER = TypeAdapter(dict[str, _Tensor])


def _raise_invalid(error: ValidationError, where: str) -> NoReturn:
    first = error.errors()[0]
    place = ".".join(map(str, first["loc"])) or "the whole"
    raise RecordError(
        f"{where}: {place}: {first['msg']}, found {repr(first['input'])[:80]}"
    ) from None
