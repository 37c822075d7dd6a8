"""The run directory: atomic whole files, append-only records, one writer at a time.

Whole files are replaced atomically and need no lock (a report may be written beside a running
run). Appending and truncating belong to the one process that holds the directory's lock; the
kernel releases it when that process dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import Any, Final, Self

from pydantic import BaseModel

from miniverl_dist.errors import ConfigError, MiniverlError, RecordError


class RecordFile(StrEnum):
    """Append-only JSONL files of a run."""

    METRICS = "metrics.jsonl"
    EVENTS = "events.jsonl"
    TRAJECTORIES = "trajectories.jsonl"
    """Trained episodes with the teacher's word on each (``ports.ScoredTrajectory``)."""
    EVAL_TRAJECTORIES = "eval_trajectories.jsonl"
    """``{"tag", "policy", "trajectory", "job"}`` per evaluation episode, as it has ended."""
    TOKEN_ANALYSIS = "token_analysis.jsonl"


MANIFEST: Final = "manifest.json"
ENVIRONMENT: Final = "environment.json"
EVALUATION: Final = "eval.json"
CONFIG_SUBMITTED: Final = "config.submitted.yaml"
CONFIG_VALIDATED: Final = "config.validated.yaml"
CONFIG_RESOLVED: Final = "config.resolved.yaml"
CHECKPOINTS: Final = "checkpoints"
CHECKPOINT_MARKER: Final = "checkpoint.json"
_LOCK: Final = ".lock"
_LOCK_TRIES: Final = 5
"""Whoever asks whether a run is being written holds its lock for a moment."""
_LOCK_PAUSE_S: Final = 0.02
_SIGNS_OF_A_RUN: Final = (MANIFEST, CONFIG_RESOLVED, RecordFile.METRICS, RecordFile.EVENTS)
_NO_SPACE: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


@contextmanager
def disk_errors(path: Path, error: type[MiniverlError] = RecordError) -> Iterator[None]:
    """Turn an ``OSError`` of writing ``path`` into ``error`` with a message that helps."""
    try:
        yield
    except OSError as cause:
        if cause.errno in _NO_SPACE:
            advice = "no space left (disk or quota): free some and resume"
        else:
            advice = os.strerror(cause.errno) if cause.errno else str(cause)
        raise error(
            f"cannot write {path}: {advice}. What was there before is unchanged."
        ) from cause


def write_atomic(path: Path, data: bytes, error: type[MiniverlError] = RecordError) -> None:
    """Replace ``path`` by ``data``, durably: readers see the old file or the new one.

    Raises:
        RecordError: (or ``error``) the file could not be written; the old one is intact.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    with disk_errors(path, error):
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Make the folder's entries (new names, renames) durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def to_json(value: object, where: str) -> str:
    """Compact JSON; refuses NaN and infinities, which are no JSON.

    Raises:
        RecordError: the value is not JSON.
    """
    try:
        return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise RecordError(f"{where}: not a JSON value: {error}") from None


class RunDirectory:
    """One run's folder. Use ``create`` or ``open``; ``close`` (or ``with``) gives the lock back."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock
        self._handles: dict[RecordFile, int] = {}

    @classmethod
    def create(cls, path: Path) -> Self:
        """Make the folder and lock it.

        Raises:
            ConfigError: it holds something already.
        """
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            raise ConfigError(
                f"run directory {path} exists and is not an empty folder: choose another one, "
                "continue that run with `miniverl-dist resume`, or remove it if it never started"
            )
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
        return cls(path, _acquire(path))

    @classmethod
    def open(cls, path: Path, *, writable: bool = False) -> Self:
        """Open an existing run, ``writable`` to append to it (takes the lock).

        Raises:
            ConfigError: not a run directory, or another process writes it.
        """
        if not any((path / name).is_file() for name in _SIGNS_OF_A_RUN):
            raise ConfigError(
                f"{path} is not a run directory: expected a folder with at least one of "
                f"{', '.join(_SIGNS_OF_A_RUN)}"
            )
        return cls(path, _acquire(path) if writable else None)

    @property
    def is_being_written(self) -> bool:
        """Whether some process holds the lock now."""
        if self._lock is not None:
            return True
        try:
            handle = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(handle)
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all files and give the lock back; safe to call twice."""
        while self._handles:
            os.close(self._handles.popitem()[1])
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def write_bytes(self, name: str, data: bytes) -> None:
        """Replace a whole file atomically."""
        write_atomic(self.path / name, data)

    def write_text(self, name: str, text: str) -> None:
        """Replace a whole file atomically (UTF-8)."""
        self.write_bytes(name, text.encode())

    def write_json(self, name: str, value: Mapping[str, Any] | BaseModel) -> None:
        """Replace a whole file atomically by indented JSON."""
        if isinstance(value, BaseModel):
            text = value.model_dump_json(indent=2)
        else:
            text = json.dumps(json.loads(to_json(value, name)), indent=2, ensure_ascii=False)
        self.write_text(name, text + "\n")

    def read_bytes(self, name: str) -> bytes:
        """A whole file. Raises ``RecordError`` when it is missing or unreadable."""
        path = self.path / name
        try:
            return path.read_bytes()
        except OSError as error:
            raise RecordError(f"cannot read {path}: {os.strerror(error.errno or 0)}") from None

    def read_json(self, name: str) -> dict[str, Any]:
        """A whole JSON file. Raises ``RecordError`` unless it is one JSON object."""
        return _json_object(self.read_bytes(name), str(self.path / name))

    def append(self, name: str, record: Mapping[str, Any] | BaseModel) -> None:
        """Append one line and hand it to the operating system.

        Raises:
            RecordError: undeclared file, no lock, not JSON, or it cannot be written (then the
                file is as before).
        """
        file = _declared(name)
        if isinstance(record, BaseModel):
            text = record.model_dump_json()
        else:
            text = to_json(dict(record), f"{self.path / file}")
        self._write_line(file, text.encode() + b"\n")

    def positions(self, names: Iterable[str]) -> dict[str, int]:
        """Length in bytes of each record file, made durable first (0 where there is none)."""
        found = {}
        for file in map(_declared, names):
            if file in self._handles:
                with disk_errors(self.path / file):
                    os.fsync(self._handles[file])
            path = self.path / file
            found[file.value] = path.stat().st_size if path.exists() else 0
        return found

    def truncate(self, positions: Mapping[str, int]) -> None:
        """Cut record files back to the lengths that a checkpoint names.

        Raises:
            RecordError: a file is shorter than its length; nothing has been cut then.
        """
        self._require_lock()
        wanted = {_declared(name): length for name, length in positions.items()}
        lengths = self.positions(wanted)
        for file, length in wanted.items():
            if lengths[file] < length:
                raise RecordError(
                    f"{self.path / file}: {lengths[file]} bytes, but the checkpoint was made with "
                    f"{length}: the file has been shortened since, restore it"
                )
        for file, length in wanted.items():
            if lengths[file] > length:
                with disk_errors(self.path / file):
                    os.truncate(self.path / file, length)

    def trim(self, name: str) -> None:
        """Remove the unfinished last line that a killed writer has left, if there is one."""
        self._require_lock()
        file = _declared(name)
        if file not in self._handles and (self.path / file).exists():
            with disk_errors(self.path / file):
                self._handles[file] = _open_for_append(self.path / file)

    def iter_jsonl(self, name: str) -> Iterator[dict[str, Any]]:
        """Records of a file one by one; a missing file has none.

        Raises:
            RecordError: at the first line that is cut off or is not a JSON object.
        """
        path = self.path / _declared(name)
        if not path.exists():
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                yield parse_json_line(line, f"{path}, line {number}")

    def read_jsonl(self, name: str) -> list[dict[str, Any]]:
        """All records of a file. Raises ``RecordError`` as ``iter_jsonl`` does."""
        return list(self.iter_jsonl(name))

    def _require_lock(self) -> None:
        if self._lock is None:
            raise RecordError(f"{self.path} is open for reading only")

    def _write_line(self, file: RecordFile, line: bytes) -> None:
        self._require_lock()
        path = self.path / file
        if file not in self._handles:
            with disk_errors(path):
                self._handles[file] = _open_for_append(path)
        handle = self._handles[file]
        start = os.fstat(handle).st_size
        with disk_errors(path):
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(handle, rest) :]
            except OSError:
                with suppress(OSError):
                    os.ftruncate(handle, start)
                raise


def _declared(name: str) -> RecordFile:
    try:
        return RecordFile(name)
    except ValueError:
        raise RecordError(
            f"{name!r} is not a record file of a run; declared are {', '.join(RecordFile)}"
        ) from None


@contextmanager
def locked(folder: Path, what: str) -> Iterator[None]:
    """Hold a folder's lock; the kernel gives it back when the process dies.

    Args:
        folder: It exists.
        what: It is, for the error.

    Raises:
        ConfigError: another process holds it.
    """
    handle = _acquire(folder, what)
    try:
        yield
    finally:
        os.close(handle)


def _acquire(path: Path, what: str = "run directory") -> int:
    """File descriptor that holds the folder's lock until it is closed or the process dies."""
    with disk_errors(path / _LOCK):
        handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    for tries_left in reversed(range(_LOCK_TRIES)):
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if tries_left:
                time.sleep(_LOCK_PAUSE_S)
        else:
            return handle
    os.close(handle)
    raise ConfigError(f"{what} {path} is being written by another process: wait for it or stop it")


def _open_for_append(path: Path) -> int:
    """Open a record file; an unfinished last line (its writer was killed) is removed first."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    end = os.fstat(handle).st_size
    position = end
    while position and os.pread(handle, 1, position - 1) != b"\n":
        block = max(0, position - 65536)
        newline = os.pread(handle, position - block, block).rfind(b"\n")
        position = block + newline + 1 if newline >= 0 else block
    if position != end:
        os.ftruncate(handle, position)
    return handle


def parse_json_line(line: bytes, where: str) -> dict[str, Any]:
    """One record. Raises ``RecordError`` when it is cut off or is not a JSON object."""
    if not line.endswith(b"\n"):
        raise RecordError(
            f"{where}: the line is cut off after {len(line)} bytes (expected a line end): the "
            "writer was killed, or is still writing"
        )
    return _json_object(line, where)


def _json_object(raw: bytes, where: str) -> dict[str, Any]:
    try:
        value = json.loads(raw)
    except ValueError as error:
        raise RecordError(f"{where}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise RecordError(f"{where}: expected a JSON object, found {type(value).__name__}")
    return value
