"""The folder that a teacher in this process comes from: checked, and remembered by checksum.

Nothing of it is copied into the run. A resumed run refuses a folder that has changed: the teacher
would be another one from the middle of the run on.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from actors.hf_files import (
    CONFIG_FILE,
    folder_sha256,
    read_model_config,
    weight_files,
)
from actors.student_side import has_declared_vocabulary, named_tokenizer
from actors.tensor_headers import SAFETENSORS, Shapes, stored_shapes
from miniverl_dist.backends.weights_io import read_json, write_json
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import (
    BackboneTeacherConfig,
    HFModelConfig,
    HFStudentConfig,
    TeacherConfig,
    ToyModelConfig,
)
from miniverl_dist.errors import CheckpointError, ConfigError, TokenizerError
from miniverl_dist.tokens.load import load_tokenizer

TEACHER_FOLDER: Final = "teacher"
TEACHER_VOCABULARY_FILE: Final = "teacher-vocabulary.json"
TEACHER_SEAL_FILE: Final = "teacher.json"
"""Checksums of the fitted teacher; written last, so a teacher without it was never finished."""
TEACHER_REMEDY: Final = (
    f"remove {TEACHER_FOLDER}/ and {TEACHER_SEAL_FILE} to have `resume` make it again, or start a "
    "new run"
)

TEACHER_BASE_FILE: Final = "teacher-base.json"
"""Checksum of the teacher's folder, or of its adapter, when the run was started."""
_TOKENIZER_FILE: Final = "tokenizer.json"


def asks_teacher(config: RunConfig) -> bool:
    """Whether training asks the teacher for anything, or fits it (for evaluations alone)."""
    teacher = config.teacher
    if teacher is None:
        return False
    return config.uses_teacher or config.uses_targets or teacher.fit is not None


def check_teacher(config: RunConfig) -> None:
    """Raise when a teacher in this process cannot be what the recipe says.

    Raises:
        ConfigError: a folder that does not hold it, an adapter of another model, or a vocabulary
            that does not fit.
        MissingDependencyError: transformers is not installed.
    """
    teacher = config.teacher
    if teacher is None or not asks_teacher(config):
        return
    check_teacher_text(teacher)
    if isinstance(teacher.model, HFModelConfig):
        _check_hf(config, teacher, teacher.model)
    elif isinstance(teacher.model, BackboneTeacherConfig):
        _check_adapter(config, teacher.model)
    elif isinstance(teacher.model, ToyModelConfig):
        _check_toy(config, teacher)


def check_teacher_text(teacher: TeacherConfig) -> None:
    """Raise when the texts that the teacher reads cannot be written with its tokenizer.

    Raises:
        ConfigError: there is no such tokenizer, or it lacks the token that texts begin with.
        MissingDependencyError: what reads it is not installed.
    """
    tokenizer = named_tokenizer("teacher.tokenizer", teacher.tokenizer)
    if teacher.text_start is None:
        return
    try:
        tokenizer.special_id(teacher.text_start)
    except TokenizerError as error:
        raise ConfigError(f"teacher.text_start: {error}") from error


@dataclass(frozen=True)
class TeacherFiles:
    """What a teacher's folder says of its model without loading it."""

    tensors: Shapes
    """Shape of every tensor in safetensors."""
    is_quantized: bool


def read_teacher_files(model: HFModelConfig) -> TeacherFiles:
    """Read ``config.json`` and the headers of the weights.

    Raises:
        ConfigError: there is no such model, or a file of it is damaged.
    """
    where = f"teacher.model.path: {model.path}"
    fields = read_model_config(model.path, where)
    if not weight_files(model.path):
        raise ConfigError(f"{where} holds no weights (no {SAFETENSORS})")
    stored = stored_shapes(sorted(model.path.glob(SAFETENSORS)), where)
    return TeacherFiles(stored, "quantization_config" in fields)


def _check_toy(config: RunConfig, teacher: TeacherConfig) -> None:
    if teacher.rendering == "verbatim" and not has_declared_vocabulary(config):
        raise ConfigError(
            f"teacher.rendering verbatim with a toy teacher: it would need a row for each id of "
            f"{config.student.tokenizer!r}; a toy teacher reads a student's very ids only where "
            "that has a declared vocabulary (a toy's): use native or raw, or a teacher of kind hf"
        )


def _check_hf(config: RunConfig, teacher: TeacherConfig, model: HFModelConfig) -> None:
    from miniverl_dist.backends.hf_skeleton import require_described, skeleton

    where = f"teacher.model.path: {model.path}"
    files = read_teacher_files(model)
    module = skeleton(model.path, where)
    if not files.is_quantized:  # whose tensors have another form
        require_described(module, files.tensors, where)
    head = module.get_output_embeddings()
    if head is not None:  # a model without one is refused when it is loaded
        _check_rows(config, teacher, model.path, int(head.weight.shape[0]))


def _check_rows(config: RunConfig, teacher: TeacherConfig, folder: Path, num_rows: int) -> None:
    """Compare the rows of a teacher's output projection with the ids that it will be asked about.

    Of its own tokenizer it need not have every control token: a text model of a family that also
    sees has none for images.
    """
    tokenizer = load_tokenizer(teacher.tokenizer)
    needs_all = teacher.rendering == "verbatim"
    ids = tokenizer.vocab_size
    if not needs_all:
        ids = int((~tokenizer.byte_table.special).nonzero()[0].max()) + 1
    is_exact = config.distill is not None and config.distill.support == "exact_full_vocab"
    if num_rows < (tokenizer.vocab_size if is_exact else ids):
        raise ConfigError(
            f"teacher.model.path: {folder.name}/ has {num_rows} vocabulary rows, teacher.tokenizer "
            f"{tokenizer.name} has {tokenizer.vocab_size} ids: set teacher.tokenizer to the folder "
            "of the model's own tokenizer"
        )
    if is_exact:
        _check_exact(config, folder, tokenizer.fingerprint)


def _check_exact(config: RunConfig, folder: Path, fingerprint: str) -> None:
    where = "distill.support exact_full_vocab compares token by token, but"
    if has_declared_vocabulary(config):
        raise ConfigError(
            f"{where} a toy student has only a declared part of the ids that the teacher has: use "
            "top_k_tail"
        )
    has_own = (folder / _TOKENIZER_FILE).is_file()
    if has_own and load_tokenizer(str(folder)).fingerprint != fingerprint:
        raise ConfigError(
            f"{where} the tokenizer in {folder.name}/ is not the student's, "
            f"{config.student.tokenizer!r}: use top_k_tail, with that folder as teacher.tokenizer"
        )


def _check_adapter(config: RunConfig, model: BackboneTeacherConfig) -> None:
    student = config.student.model
    if model.adapter is None or not isinstance(student, HFStudentConfig):
        return
    from miniverl_dist.backends.hf_adapters import adapted_layers
    from miniverl_dist.backends.hf_peft import ADAPTER_WEIGHTS_FILE, read_adapter_config
    from miniverl_dist.backends.hf_skeleton import skeleton

    where = f"teacher.model.adapter: {model.adapter}"
    adapter = read_adapter_config(model.adapter)
    if not (model.adapter / ADAPTER_WEIGHTS_FILE).is_file():
        raise ConfigError(f"{where} holds no {ADAPTER_WEIGHTS_FILE}")
    stored_shapes([model.adapter / ADAPTER_WEIGHTS_FILE], where)
    module = skeleton(student.path, f"student.model.path: {student.path}")
    try:
        adapted_layers(module, adapter.target_modules)
    except ConfigError as error:
        raise ConfigError(f"{where}: another model's adapter: {error}") from error


def keep_teacher(config: RunConfig, run_dir: Path) -> None:
    """Note in the run which teacher it is taught by, or compare the folder with that note.

    Raises:
        CheckpointError: the folder has changed, or the note cannot be written.
    """
    folder = _own_folder(config)
    if folder is None or not folder.is_dir():
        return  # who reads it, here or on another machine, says so if it is gone
    file, found = run_dir / TEACHER_BASE_FILE, folder_sha256(folder)
    if not file.exists():
        write_json(file, {"name": folder.name, "sha256": found})
        return
    note = read_json(file)
    expected = str(note.get("sha256")) if isinstance(note, dict) else ""
    if found != expected:
        field = "path" if (folder / CONFIG_FILE).is_file() else "adapter"
        raise CheckpointError(
            f"teacher.model.{field}: {folder} has changed since the run was started (SHA-256 "
            f"{found[:12]}, expected {expected[:12]}): restore it, or start a new run"
        )


def _own_folder(config: RunConfig) -> Path | None:
    """What the teacher is read from at every start; a fitted one lies in the run, under a seal."""
    teacher = config.teacher
    if teacher is None or not asks_teacher(config):
        return None
    if isinstance(teacher.model, HFModelConfig):
        return teacher.model.path
    return teacher.model.adapter if isinstance(teacher.model, BackboneTeacherConfig) else None
