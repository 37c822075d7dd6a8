"""Start a new run from what another one made: the student's weights, the fitted teacher.

Both are copied into the run directory before anything else is made there, so that the run stays
what it was started as: it can be resumed after its source has gone. Only weights are taken over;
optimizer, counters, randomness and curriculum are the new run's own. To continue a run under its
own config there is `resume`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final, NamedTuple

from actors.student_side import STUDENT_VOCABULARY_FILE
from actors.teacher_files import TEACHER_FOLDER, TEACHER_SEAL_FILE, TEACHER_VOCABULARY_FILE
from actors.warm_start_hf import ADAPTER_WEIGHTS, HF_WEIGHTS, is_adapter, start_files
from miniverl_dist.backends.weights_io import (
    MODEL_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    ToyFolder,
    load_toy_folder,
    read_json,
    write_json,
)
from miniverl_dist.config.load import load_run_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import HFStudentConfig, TeacherConfig, ToyModelConfig
from miniverl_dist.errors import CheckpointError, ConfigError, TokenizerMismatchError
from miniverl_dist.observability.run_dir import CHECKPOINT_MARKER, CHECKPOINTS, MANIFEST
from miniverl_dist.schemas.run_state import CheckpointFile
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.training import checkpoint as commits

WARM_START_FOLDER: Final = "warm-start"
WARM_START_SEAL_FILE: Final = "warm-start.json"
"""Checksums of the weights taken over; written last."""
PROVENANCE_FILE: Final = "provenance.json"
_STUDENT_FILES: Final = (MODEL_FILE, VOCABULARY_FILE, WEIGHTS_FILE)
_WEIGHTS_FILES: Final = (WEIGHTS_FILE, *HF_WEIGHTS, ADAPTER_WEIGHTS)
"""Of toy and hf checkpoints, and of an adapter's folder."""
_ARCHITECTURE: Final = ("num_layers", "hidden_size", "num_heads", "ffn_size")
_TEACHER_FIELDS: Final = ("tokenizer", "mode", "rendering", "model", "fit")


class _Source(NamedTuple):
    """A folder of student weights, and what may be said of where it comes from."""

    folder: Path
    provenance: dict[str, Any]


def require_warm_start(config: RunConfig) -> None:
    """Fail before a run directory is made when what it starts from cannot be used.

    Raises:
        ConfigError: there is no checkpoint or student where the recipe says; a student that takes
            its weights otherwise; a teacher that was fitted in another way.
        CheckpointError, ChecksumError: it is damaged, or of another architecture.
        TokenizerMismatchError: it holds ids of another tokenizer.
    """
    if config.student.warm_start is not None:
        source = _student_source(config.student.warm_start)
        if isinstance(config.student.model, HFStudentConfig):
            start_files(config, config.student.model, source.folder)
        else:
            _matching(config, source)
    if config.teacher is not None and config.teacher.fitted is not None:
        _check_same_fit(config, config.teacher, config.teacher.fitted)


def warm_vocabulary(config: RunConfig, warm_start: Path) -> SubVocabulary:
    """The declared vocabulary of the weights that a run starts from.

    Raises:
        See `require_warm_start`.
    """
    return _matching(config, _student_source(warm_start))[1]


def take_over_student(config: RunConfig, run_dir: Path) -> None:
    """Copy weights and declared vocabulary into the run directory, unless that was done before.

    Raises:
        See `require_warm_start`.
    """
    seal_file, folder = run_dir / WARM_START_SEAL_FILE, run_dir / WARM_START_FOLDER
    if config.student.warm_start is None or seal_file.exists():
        return
    source, vocabulary = _student_source(config.student.warm_start), None
    if isinstance(config.student.model, HFStudentConfig):
        names = start_files(config, config.student.model, source.folder)
    else:
        names, vocabulary = _STUDENT_FILES, _matching(config, source)[1]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in names:
        shutil.copyfile(source.folder / name, folder / name)
    write_json(folder / PROVENANCE_FILE, source.provenance)
    if vocabulary is not None:
        vocabulary.save(run_dir / STUDENT_VOCABULARY_FILE)
    commits.seal(folder, seal_file)


def taken_over(run_dir: Path) -> Path | None:
    """Folder of the student that the run was started from; None where it starts from its own.

    Raises:
        CheckpointError, ChecksumError: it has been damaged since.
    """
    if not (run_dir / WARM_START_SEAL_FILE).exists():
        return None
    commits.verify_seal(run_dir / WARM_START_FOLDER, run_dir / WARM_START_SEAL_FILE)
    return run_dir / WARM_START_FOLDER


def provenance(run_dir: Path) -> dict[str, Any] | None:
    """What the manifest says of the weights that the run was started from; never a path."""
    path = run_dir / WARM_START_FOLDER / PROVENANCE_FILE
    return read_json(path) if (run_dir / WARM_START_SEAL_FILE).exists() else None


def take_over_teacher(config: RunConfig, teacher: TeacherConfig, run_dir: Path) -> bool:
    """Copy the teacher that another run has fitted; False where this run fits its own.

    Raises:
        ConfigError: that run fitted another teacher, on other tasks, or none.
        CheckpointError, ChecksumError: its teacher is damaged.
    """
    if teacher.fitted is None:
        return False
    source = teacher.fitted
    _check_same_fit(config, teacher, source)
    commits.verify_seal(source / TEACHER_FOLDER, source / TEACHER_SEAL_FILE)
    shutil.rmtree(run_dir / TEACHER_FOLDER, ignore_errors=True)
    shutil.copytree(source / TEACHER_FOLDER, run_dir / TEACHER_FOLDER)
    shutil.copyfile(source / TEACHER_VOCABULARY_FILE, run_dir / TEACHER_VOCABULARY_FILE)
    commits.seal(run_dir / TEACHER_FOLDER, run_dir / TEACHER_SEAL_FILE)
    return True


def _student_source(path: Path) -> _Source:
    """Find and check the student's weights in a run, a checkpoint, or a folder of a student."""
    if (path / MANIFEST).is_file():
        newest = commits.newest_checkpoint(path / CHECKPOINTS)
        if newest is None:
            raise ConfigError(
                f"student.warm_start: run {path} has no checkpoint yet: nothing to start from"
            )
        path = newest
    if (path / CHECKPOINT_MARKER).is_file():
        manifest = commits.verify(path)
        return _Source(
            path,
            {
                "kind": "checkpoint",
                "name": manifest.name,
                "sha256": manifest.sha256,
                "weights_sha256": _weights_sha256(manifest.files),
                "config_digest": manifest.state.config_digest,
                "policy_version": manifest.state.policy_version,
            },
        )
    if is_adapter(path):
        found = _weights_sha256(commits.describe_files(path))
        return _Source(path, {"kind": "adapter", "name": None, "weights_sha256": found})
    missing = [name for name in _STUDENT_FILES if not (path / name).is_file()]
    if missing:
        raise ConfigError(
            f"student.warm_start: {path} is no run, no checkpoint and no folder of a student "
            f"or adapter (found no {MANIFEST}, no {CHECKPOINT_MARKER}, no {missing[0]}); whole "
            "weights of an hf student are named as student.model.path"
        )
    found = _weights_sha256(commits.describe_files(path))
    return _Source(path, {"kind": "student", "name": None, "weights_sha256": found})


def _weights_sha256(files: Iterable[CheckpointFile]) -> str | None:
    return next((file.sha256 for file in files if file.path in _WEIGHTS_FILES), None)


def _matching(config: RunConfig, source: _Source) -> tuple[ToyFolder, SubVocabulary]:
    """The student at the source, when it can be the one of this config."""
    model = config.student.model
    if not isinstance(model, ToyModelConfig):
        raise ConfigError(
            f"student.warm_start: a {model.kind} student takes its weights from "
            "`student.model.weights`: export the checkpoint, and name the folder there"
        )
    found = load_toy_folder(source.folder)
    for name in _ARCHITECTURE:
        has, wants = getattr(found.config, name), getattr(model, name)
        if has != wants:
            raise CheckpointError(
                f"student.warm_start: the weights have {name} {has}, student.model has {wants}: "
                "a warm start needs the same architecture"
            )
    base = load_tokenizer(config.student.tokenizer)
    vocabulary = SubVocabulary(base, (int(i) for i in found.vocabulary_ids))
    if vocabulary.fingerprint != found.tokenizer.fingerprint:
        raise TokenizerMismatchError(
            f"student.warm_start: the weights were trained on ids of {found.tokenizer.name} "
            f"({found.tokenizer.fingerprint[:12]}); read as ids of {base.name} they make "
            f"{vocabulary.fingerprint[:12]}: another tokenizer"
        )
    return found, vocabulary


def _check_same_fit(config: RunConfig, teacher: TeacherConfig, source: Path) -> None:
    """Raise unless a run has fitted the very teacher that this config describes."""
    if not (source / TEACHER_SEAL_FILE).is_file():
        raise ConfigError(f"teacher.fitted: {source} is no run with a fitted teacher")
    other = load_run_config(source).config
    if other.teacher is None:
        raise ConfigError(f"teacher.fitted: the run {source} has no teacher")
    ours, theirs = _fit_of(config, teacher), _fit_of(other, other.teacher)
    differing = sorted(name for name in ours if ours[name] != theirs[name])
    if differing:
        raise ConfigError(
            f"teacher.fitted: {source} fitted its teacher under another {', '.join(differing)}; "
            "use the same settings, or leave `fitted` out to fit one here"
        )


def _fit_of(config: RunConfig, teacher: TeacherConfig) -> dict[str, Any]:
    """All that a fitted teacher depends on but the seed: another draw is as good a teacher."""
    fields = teacher.model_dump(mode="json", include=set(_TEACHER_FIELDS))
    return {f"teacher.{name}": value for name, value in fields.items()} | {
        "tasks.train": config.tasks.model_dump(mode="json", exclude={"eval"}),
        "environment": config.environment.model_dump(mode="json", exclude={"reward"}),
        "student.tokenizer": config.student.tokenizer,
    }
