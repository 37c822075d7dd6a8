"""`miniverl-dist export`: a run's student as a folder that other programs load.

The folder says what it is in ``export.json``: names, versions and checksums, and nothing of the
machine or the user that made it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from actors.hf_files import base_sha256, require_same_base
from actors.run_folders import find_checkpoint
from actors.student_side import STUDENT_FOLDER, STUDENT_SEAL_FILE, student_chat, student_tokenizer
from miniverl_dist import __version__
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.backends.weights_io import (
    MODEL_FILE,
    VOCABULARY_FILE,
    WEIGHTS_FILE,
    TokenizerIdentity,
    read_json,
    write_json,
)
from miniverl_dist.config.cluster import ParallelConfig
from miniverl_dist.config.load import load_run_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import HFStudentConfig, MegatronModelConfig, ToyModelConfig
from miniverl_dist.errors import CheckpointError, ConfigError
from miniverl_dist.observability.run_dir import CHECKPOINTS, disk_errors
from miniverl_dist.schemas.run_state import CheckpointManifest
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from miniverl_dist.training import checkpoint as commits

Format = Literal["hf", "adapter"]
EXPORT_FILE: Final = "export.json"
GENERATION_FILE: Final = "generation_config.json"
_TOKENIZER_FILES: Final = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class _Source:
    """What is exported."""

    config: RunConfig
    config_digest: str
    run_dir: Path
    checkpoint: Path
    manifest: CheckpointManifest
    tokenizer: TokenizerLike

    @property
    def identity(self) -> TokenizerIdentity:
        return TokenizerIdentity(self.tokenizer.name, self.tokenizer.fingerprint)

    @property
    def policy_version(self) -> int:
        return self.manifest.state.policy_version


def export_run(
    run_dir: Path, output: Path, form: Format = "hf", *, checkpoint: str | None = None
) -> dict[str, Any]:
    """Write the student of a run's newest checkpoint, or of the one named, into a new folder.

    A checkpoint is named by its name or step, or by its path.

    An hf or megatron student becomes what transformers loads, or with ``adapter`` what ``peft``
    loads; a toy student becomes a toy folder.

    Returns:
        What ``export.json`` says.

    Raises:
        ConfigError: the output holds something already; a form that this student does not have; a
            checkpoint that the run does not have.
        CheckpointError, ChecksumError: none yet, a damaged one, or one that does not fit.
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"export: {output} holds something already; name a new folder")
    source = _source(run_dir, checkpoint)
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        kind = _write(source, partial, form)
        _add_tokenizer(source, partial)
        if kind == "hf":
            _say_where_turns_end(source, partial)
        described = _description(source, partial, kind)
        write_json(partial / EXPORT_FILE, described)
        with disk_errors(output, CheckpointError):
            if output.exists():
                output.rmdir()
            partial.rename(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return described


def _source(run_dir: Path, name: str | None) -> _Source:
    loaded = load_run_config(run_dir)
    found = commits.newest_checkpoint(run_dir / CHECKPOINTS)
    if found is None:
        raise CheckpointError(f"export: {run_dir} has no checkpoint yet")
    if name is not None:
        found = find_checkpoint(run_dir, Path(name))
        if found.resolve().parent != (run_dir / CHECKPOINTS).resolve():
            raise ConfigError(
                f"--checkpoint {name}: found a checkpoint of another run, expected one of {run_dir}"
            )
    tokenizer = student_tokenizer(loaded.config, run_dir)
    return _Source(loaded.config, loaded.digest, run_dir, found, commits.verify(found), tokenizer)


def _write(source: _Source, folder: Path, form: Format) -> str:
    """Write the weights; says what kind of folder it is."""
    model = source.config.student.model
    if isinstance(model, HFStudentConfig):
        _write_hf(source, model, folder, form)
        return form
    if form == "adapter":
        raise ConfigError(f"export --format adapter: a {model.kind} student has no adapter")
    if isinstance(model, ToyModelConfig):
        with disk_errors(folder, CheckpointError):
            folder.mkdir(parents=True)
            for name in (MODEL_FILE, VOCABULARY_FILE, WEIGHTS_FILE):
                shutil.copyfile(source.checkpoint / name, folder / name)
        return "toy"
    _write_megatron(source, model, folder)
    return "hf"


def _write_hf(source: _Source, model: HFStudentConfig, folder: Path, form: Format) -> None:
    from miniverl_dist.backends.hf_export import stored_student, write_adapter, write_merged

    commits.verify_seal(source.run_dir / STUDENT_FOLDER, source.run_dir / STUDENT_SEAL_FILE)
    require_same_base(model, source.run_dir)
    student = stored_student(
        model,
        source.tokenizer.vocab_size,
        source.identity,
        base_sha256(source.run_dir),
        source.checkpoint,
        source.policy_version,
    )
    write = write_adapter if form == "adapter" else write_merged
    write(student, folder)


def _write_megatron(source: _Source, model: MegatronModelConfig, folder: Path) -> None:
    """Load the checkpoint on one rank, whatever layout has saved it, and write what it holds."""
    from actors.builds import build_student

    one = model.model_copy(update={"parallel": ParallelConfig()})
    student = source.config.student.model_copy(update={"model": one})
    config = source.config.model_copy(update={"student": student, "runtime": "inprocess"})
    rank = build_student(config, source.tokenizer, source.run_dir, RankAddress())
    try:
        from miniverl_dist.backends.megatron.backend import MegatronBackend
        from miniverl_dist.backends.megatron.weights import save_hf

        rank.load(source.checkpoint, source.policy_version)
        if isinstance(rank, MegatronBackend):
            save_hf(rank.model, folder)
    finally:
        rank.close()
    if isinstance(source.tokenizer, SubVocabulary):
        write_json(folder / VOCABULARY_FILE, [int(i) for i in source.tokenizer.ids])


def _add_tokenizer(source: _Source, folder: Path) -> None:
    """Copy the tokenizer's files where the recipe names a folder; a named one has a package."""
    origin = Path(source.config.student.tokenizer)
    if not origin.is_dir():
        return
    with disk_errors(folder, CheckpointError):
        for name in _TOKENIZER_FILES:
            if (origin / name).is_file():
                shutil.copyfile(origin / name, folder / name)


def _say_where_turns_end(source: _Source, folder: Path) -> None:
    """Name the turn end among the ids that stop ``generate``: a base model knows its own only."""
    if isinstance(source.tokenizer, SubVocabulary):
        return  # rows of this model are no ids of the tokenizer
    path = folder / GENERATION_FILE
    told: dict[str, Any] = read_json(path) if path.exists() else {}
    known = told.get("eos_token_id")
    ids = known if isinstance(known, list) else [] if known is None else [known]
    turn_end = student_chat(source.config, source.tokenizer).turn_end_id
    write_json(path, told | {"eos_token_id": sorted({*ids, turn_end})})


def _description(source: _Source, folder: Path, kind: str) -> dict[str, Any]:
    config, tokenizer = source.config, source.tokenizer
    model = config.student.model
    restricted = None
    if isinstance(tokenizer, SubVocabulary):
        restricted = {"num_ids": len(tokenizer.ids), "ids": VOCABULARY_FILE}
    base = None
    if isinstance(model, HFStudentConfig):
        base = {"name": model.path.name, "sha256": base_sha256(source.run_dir)}
    return {
        "format": kind,
        "run": config.name,
        "objective": config.objective,
        "config_digest": source.config_digest,
        "checkpoint": {"name": source.manifest.name, "sha256": source.manifest.sha256},
        "policy_version": source.policy_version,
        "student": {"kind": model.kind, "base": base},
        "tokenizer": {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint},
        "restricted_vocabulary": restricted,
        "miniverl_dist": __version__,
        "files": {f.path: f.sha256 for f in commits.describe_files(folder)},
    }
