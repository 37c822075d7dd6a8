"""Commit: weights, optimizer and run state under one manifest, or nothing.

A checkpoint is a folder whose ``checkpoint.json`` names every file with size and SHA-256. The
folder is written under a temporary name, made durable, and renamed; the manifest is its last file.
What has no valid manifest is not a checkpoint.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from miniverl_dist.errors import CheckpointError, ChecksumError
from miniverl_dist.observability.run_dir import CHECKPOINT_MARKER, sync_folder, write_atomic
from miniverl_dist.observability.step_names import named_step
from miniverl_dist.schemas.run_state import CheckpointFile, CheckpointManifest, RunState

FORMAT_VERSION = 1
_REMEDY = "use another checkpoint"
_TEMPORARY_PREFIX = ".incomplete-"
_NOTHING_LEFT_BYTES = 64 * 1024
"""What a writer that ran into the end of the disk leaves free at most: a few blocks."""


async def commit(
    folder: Path, name: str, state: RunState, save: Callable[[Path], Awaitable[None]]
) -> Path:
    """Write checkpoint ``name`` below ``folder``; all or nothing.

    Args:
        folder: The run's ``checkpoints`` folder.
        name: Folder name of the checkpoint; one that stands already is replaced.
        state: What the manifest carries.
        save: Writes weights and optimizer below the path it is given.

    Raises:
        CheckpointError: the disk is full or cannot be written; former checkpoints are intact.
    """
    temporary = folder / f"{_TEMPORARY_PREFIX}{name}"
    try:
        _start_afresh(temporary)
        await save(temporary)
        return _complete(temporary, folder / name, state)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"checkpoint {name} was not written: "
            f"{'the disk is full' if _is_full(folder, error) else error}; "
            f"former checkpoints in {folder.name}/ are intact. Free space, then "
            "`miniverl-dist resume`"
        ) from error
    finally:
        # Renamed by now, or of no use: what is left would go on filling the disk.
        shutil.rmtree(temporary, ignore_errors=True)


def _is_full(folder: Path, error: Exception) -> bool:
    """Whether writing failed for want of space; writers of shards may hide the reason."""
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return True
    return folder.exists() and shutil.disk_usage(folder).free < _NOTHING_LEFT_BYTES


def _start_afresh(temporary: Path) -> None:
    discard_incomplete(temporary.parent)
    temporary.mkdir(parents=True)


def _complete(temporary: Path, target: Path, state: RunState) -> Path:
    """Describe what was saved, write the manifest last, and give the folder its name."""
    files = describe_files(temporary)
    _make_durable(temporary)
    manifest = CheckpointManifest(
        format_version=FORMAT_VERSION, name=target.name, state=state, files=files
    )
    write_atomic(temporary / CHECKPOINT_MARKER, manifest.to_bytes(), CheckpointError)
    if target.exists():
        shutil.rmtree(target)
    temporary.rename(target)
    sync_folder(target.parent)
    return target


def _make_durable(folder: Path) -> None:
    """Bring every file and folder below to the disk."""
    for path in (*folder.rglob("*"), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def discard_incomplete(folder: Path) -> None:
    """Remove what a commit that was killed left behind."""
    for path in folder.glob(f"{_TEMPORARY_PREFIX}*"):
        shutil.rmtree(path, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[Path]:
    """Checkpoints that were completed, oldest first by their names (``step-000010``).

    Folders of other names are no commits of the run: they are neither gone on from nor pruned.
    Manifests are not read: a damaged one must not hide the others, nor be passed over in silence
    by whoever wants the newest.
    """
    return [path for path in _commits(folder) if (path / CHECKPOINT_MARKER).exists()]


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest commit; None where there is none.

    Raises:
        CheckpointError: a commit has lost its manifest. Going back to an older one in silence
            would discard steps.
    """
    commits = _commits(folder)
    for path in commits:
        if not (path / CHECKPOINT_MARKER).exists():
            raise CheckpointError(
                f"{folder.name}/{path.name} has no {CHECKPOINT_MARKER}, which a commit gets before "
                "its name: it was removed. Restore it, or remove the whole folder to go back to "
                "the commit before it"
            )
    return commits[-1] if commits else None


def _commits(folder: Path) -> list[Path]:
    """Folders that have the name of a step, in the order of the steps."""
    steps = ((named_step(path.name), path) for path in folder.glob("*/"))
    return [path for _, path in sorted((step, path) for step, path in steps if step is not None)]


def prune(folder: Path, keep: int) -> list[str]:
    """Remove all but the newest ``keep`` checkpoints; returns the names removed."""
    doomed = list_checkpoints(folder)[:-keep]
    for path in doomed:
        shutil.rmtree(path)
    return [path.name for path in doomed]


def read_manifest(checkpoint: Path) -> CheckpointManifest:
    """The manifest, without looking at the files.

    Raises:
        CheckpointError: missing, damaged, or of another format.
        ChecksumError: it differs from its own checksum.
    """
    path = checkpoint / CHECKPOINT_MARKER
    try:
        data = path.read_bytes()
        manifest = CheckpointManifest.model_validate_json(data)
    except FileNotFoundError as error:
        raise CheckpointError(
            f"{checkpoint.name} has no {CHECKPOINT_MARKER}: it was never completed; use another one"
        ) from error
    except ValidationError as error:
        raise CheckpointError(
            f"{checkpoint.name}/{CHECKPOINT_MARKER} is damaged: {error.errors()[0]['msg']}"
        ) from error
    if manifest.format_version != FORMAT_VERSION:
        raise CheckpointError(
            f"{checkpoint.name} has format {manifest.format_version}, expected {FORMAT_VERSION}"
        )
    if data != manifest.to_bytes():
        # Its own checksum is over values: it does not see a space that became a tab.
        raise ChecksumError(
            f"{checkpoint.name}/{CHECKPOINT_MARKER} says what was written, in other bytes; it is "
            "damaged, use another checkpoint"
        )
    return manifest


def verify(checkpoint: Path) -> CheckpointManifest:
    """Read the manifest and check every file against it.

    Raises:
        CheckpointError: a file is missing, or one stands there that the manifest does not name.
        ChecksumError: a file differs from its checksum.
    """
    manifest = read_manifest(checkpoint)
    _verify_files(checkpoint, manifest.files)
    return manifest


def check_files(checkpoint: Path) -> CheckpointManifest:
    """Read the manifest and compare names and sizes: finds what is missing or cut, at no cost.

    Raises:
        CheckpointError: a file is missing, or one stands there that the manifest does not name.
        ChecksumError: a file has another size.
    """
    manifest = read_manifest(checkpoint)
    _check_names_and_sizes(checkpoint, manifest.files)
    return manifest


def seal(folder: Path, seal_file: Path) -> None:
    """Make a folder durable and write its files' sizes and checksums into ``seal_file``, last.

    For parts of a run that are made once and are no commit (a fitted teacher).
    """
    files = [file.model_dump() for file in describe_files(folder)]
    _make_durable(folder)
    write_atomic(seal_file, json.dumps({"files": files}, indent=2).encode(), CheckpointError)


def describe_files(folder: Path) -> tuple[CheckpointFile, ...]:
    """Path, size and SHA-256 of every file below a folder."""
    return tuple(_describe(path, folder) for path in _files(folder))


def verify_seal(folder: Path, seal_file: Path, remedy: str = "start a new run") -> None:
    """Check a folder against its seal.

    Args:
        folder: What was sealed.
        seal_file: See `seal`.
        remedy: What whoever reads that it is damaged may do.

    Raises:
        CheckpointError: the seal is damaged, or a file is missing or unknown.
        ChecksumError: a file differs from its checksum.
    """
    try:
        entries = json.loads(seal_file.read_bytes())["files"]
        files = tuple(CheckpointFile.model_validate(entry) for entry in entries)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{seal_file.name} is damaged ({type(error).__name__}): {folder.name}/ cannot be "
            f"trusted; {remedy}"
        ) from error
    _verify_files(folder, files, remedy)


def _check_names_and_sizes(
    checkpoint: Path, files: Sequence[CheckpointFile], remedy: str = _REMEDY
) -> None:
    found = {_relative(path, checkpoint) for path in _files(checkpoint)} - {CHECKPOINT_MARKER}
    expected = {file.path for file in files}
    if found != expected:
        raise CheckpointError(
            f"{checkpoint.name}: missing files {sorted(expected - found)}, "
            f"unknown files {sorted(found - expected)}; {remedy}"
        )
    for file in files:
        num_bytes = (checkpoint / file.path).stat().st_size
        if num_bytes != file.num_bytes:
            raise ChecksumError(
                f"{checkpoint.name}/{file.path}: {num_bytes} bytes, expected {file.num_bytes}; "
                f"the file is damaged, {remedy}"
            )


def _verify_files(checkpoint: Path, files: Sequence[CheckpointFile], remedy: str = _REMEDY) -> None:
    _check_names_and_sizes(checkpoint, files, remedy)
    for file in files:
        actual = _describe(checkpoint / file.path, checkpoint)
        if actual != file:
            raise ChecksumError(
                f"{checkpoint.name}/{file.path}: SHA-256 {actual.sha256[:12]}, expected "
                f"{file.sha256[:12]}; the file is damaged, {remedy}"
            )


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _describe(path: Path, folder: Path) -> CheckpointFile:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return CheckpointFile(
        path=_relative(path, folder), num_bytes=path.stat().st_size, sha256=digest.hexdigest()
    )
