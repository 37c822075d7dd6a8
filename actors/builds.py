"""What needs torch at composition: student backends, engines, and the fit of the toy teacher."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from actors.hf_files import base_sha256, prepare_hf_student, require_same_base
from actors.memory_estimate import hf_student_bytes
from actors.student_side import STUDENT_FOLDER, STUDENT_SEAL_FILE, require_rows
from actors.warm_start import taken_over
from actors.warm_start_hf import start_hf
from miniverl_dist.backends.base import StudentBackend
from miniverl_dist.backends.distilled import RowLoss
from miniverl_dist.backends.megatron.architecture import read_architecture
from miniverl_dist.backends.megatron.quiet import quiet_megatron
from miniverl_dist.backends.rank_address import RankAddress
from miniverl_dist.backends.toy import ToyBackend
from miniverl_dist.backends.vocabulary import AnyVocabulary, FullVocabulary, Vocabulary
from miniverl_dist.backends.weights_io import (
    TokenizerIdentity,
    load_toy_folder,
    parameter_shapes,
)
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import (
    HFEngineConfig,
    LossConfig,
    OptimConfig,
    SGLangEngineConfig,
)
from miniverl_dist.config.roles import (
    BackboneTeacherConfig,
    HFStudentConfig,
    MegatronModelConfig,
    SftConfig,
    ToyModelConfig,
)
from miniverl_dist.errors import ConfigError, TokenizerError
from miniverl_dist.lab.memory import BYTES_PER_FROZEN_PARAMETER, BYTES_PER_TRAINED_PARAMETER
from miniverl_dist.ports import WeightSnapshot
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.weights import weights_checksum
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from miniverl_dist.training.checkpoint import seal, verify_seal
from miniverl_dist.training.sft import SftExample, sft_batches
from rollout_server.engines.base import Engine
from rollout_server.engines.sglang import SGLangEngine
from rollout_server.engines.sglang_server import SGLangLaunch
from rollout_server.engines.toy import ToyEngine

if TYPE_CHECKING:
    from miniverl_dist.backends.hf import HFBackend
    from miniverl_dist.backends.hf_teacher import BackboneTeacher

ENGINES_FOLDER = "engines"
"""Logs of engines' servers, and what they start from."""


def set_num_threads(config: RunConfig) -> None:
    """Threads of one torch operation in this process."""
    torch.set_num_threads(config.torch_threads)


def build_student(
    config: RunConfig,
    tokenizer: TokenizerLike,
    run_dir: Path,
    address: RankAddress,
    *,
    rows: RowLoss | None = None,
    backbone_teacher: BackboneTeacher | None = None,
) -> StudentBackend:
    """One rank of the student with its initial weights.

    Args:
        config: Of the run.
        tokenizer: The student's, or what the run declared of it.
        run_dir: Where its folder lies.
        address: Where the ranks meet.
        rows: How whole distributions are compared, under an objective that does.
        backbone_teacher: Who teaches with this student's backbone, attached here.

    Raises:
        ConfigError: an adapter of the teacher that is not of this model.
        MissingDependencyError: megatron-core is not installed.
        CheckpointError: the initial weights are damaged or of another architecture.
    """
    model = config.student.model
    if isinstance(model, ToyModelConfig):
        return _toy_student(config, model, _declared(tokenizer), run_dir, rows)
    if isinstance(model, HFStudentConfig):
        student = _hf_student(config, model, tokenizer, run_dir, rows)
        if backbone_teacher is not None:
            backbone_teacher.attach(student.student)
        return student
    quiet_megatron()
    from miniverl_dist.backends.megatron.backend import MegatronBackend

    folder = _verified_student(run_dir)
    return MegatronBackend(
        model,
        read_architecture(folder / "config.json"),
        model.weights or folder,
        TokenizerIdentity(tokenizer.name, tokenizer.fingerprint),
        student_vocabulary(model, tokenizer, folder),
        loss=config.loss,
        optim=config.optim,
        num_steps=config.loop.num_steps,
        seed=_student_seed(config),
        address=address,
        timeout_s=config.deadlines.update_s,
    )


def _student_seed(config: RunConfig) -> int:
    return derive_seed(config.seed, "init", "student")


def _toy_student(
    config: RunConfig,
    model: ToyModelConfig,
    tokenizer: SubVocabulary,
    run_dir: Path,
    rows: RowLoss | None,
) -> StudentBackend:
    toy = ToyBackend(
        model,
        tokenizer.ids,
        TokenizerIdentity(tokenizer.name, tokenizer.fingerprint),
        loss=config.loss,
        optim=config.optim,
        num_steps=config.loop.num_steps,
        seed=_student_seed(config),
        rows=rows,
    )
    if (start := taken_over(run_dir)) is not None:
        toy.load_weights(load_toy_folder(start).weights)
    return toy


def _hf_student(
    config: RunConfig,
    model: HFStudentConfig,
    tokenizer: TokenizerLike,
    run_dir: Path,
    rows: RowLoss | None,
) -> HFBackend:
    from miniverl_dist.backends.hf import HFBackend

    _verified_student(run_dir)
    student = HFBackend(
        model,
        tokenizer.vocab_size,
        TokenizerIdentity(tokenizer.name, tokenizer.fingerprint),
        loss=config.loss,
        optim=config.optim,
        num_steps=config.loop.num_steps,
        seed=_student_seed(config),
        base_sha256=base_sha256(run_dir),
        rows=rows,
    )
    if (start := taken_over(run_dir)) is not None:
        start_hf(student, start)
    return student


def build_backbone_teacher(config: RunConfig, tokenizer: TokenizerLike) -> BackboneTeacher | None:
    """The teacher that shares the student's backbone; None where the recipe has another, or none.

    Raises:
        ConfigError: its adapter cannot be read.
    """
    teacher, student = config.teacher, config.student.model
    if teacher is None or not isinstance(teacher.model, BackboneTeacherConfig):
        return None
    if not isinstance(student, HFStudentConfig):
        raise ConfigError("teacher.model.kind student_backbone: there is no hf student")
    from miniverl_dist.backends.hf_teacher import BackboneTeacher

    return BackboneTeacher(teacher.model, student, tokenizer.vocab_size)


def prepare_student(config: RunConfig, tokenizer: TokenizerLike, run_dir: Path) -> None:
    """Write the student's folder: its ``config.json``, and its weights where they are drawn.

    Ranks and engines read this folder, never the recipe's files: a run stays what it was started
    as. What is there already is checked and left alone.

    Raises:
        CheckpointError, ChecksumError: the folder of an earlier start is damaged.
        ConfigError: a config.json that cannot be used, or that lacks rows for the tokenizer.
    """
    model, folder = config.student.model, run_dir / STUDENT_FOLDER
    if isinstance(model, ToyModelConfig):
        return
    if (run_dir / STUDENT_SEAL_FILE).exists():
        _verified_student(run_dir)
        if isinstance(model, HFStudentConfig):
            require_same_base(model, run_dir)
        return
    if isinstance(model, HFStudentConfig):
        prepare_hf_student(model, run_dir)
        return
    quiet_megatron()
    from miniverl_dist.backends.megatron.weights import initial_weights, write_config

    architecture = read_architecture(model.config)
    if model.vocabulary == "restricted":
        architecture = architecture.with_vocab_size(len(_declared(tokenizer).ids))
    else:
        require_rows(architecture, model.config.name, tokenizer)
    if model.weights is None:
        initial_weights(architecture, derive_seed(config.seed, "init", "student"), folder)
    else:
        write_config(architecture, folder)
    seal(folder, run_dir / STUDENT_SEAL_FILE)


def student_head(
    config: RunConfig, tokenizer: TokenizerLike, run_dir: Path
) -> tuple[AnyVocabulary, int]:
    """What the rows of the student's head stand for, and the bytes that it takes while it trains.

    Raises:
        ConfigError: a student that whole distributions cannot be compared with.
    """
    model = config.student.model
    if isinstance(model, HFStudentConfig):
        return FullVocabulary(tokenizer.vocab_size), hf_student_bytes(config, model)
    if not isinstance(model, ToyModelConfig):
        raise ConfigError(
            f"student.model.kind {model.kind}: whole distributions need a toy or hf student"
        )
    vocabulary = Vocabulary(_declared(tokenizer).ids)
    shapes = parameter_shapes(model, len(vocabulary)).values()
    num_parameters = sum(math.prod(shape) for shape in shapes)
    frozen = BYTES_PER_FROZEN_PARAMETER if config.loss.kl_coef > 0 else 0
    return vocabulary, num_parameters * (BYTES_PER_TRAINED_PARAMETER + frozen)


def student_vocabulary(
    model: MegatronModelConfig, tokenizer: TokenizerLike, folder: Path
) -> AnyVocabulary:
    """Which rows of the student's embedding stand for which ids."""
    if model.vocabulary == "restricted":
        return Vocabulary(_declared(tokenizer).ids)
    return FullVocabulary(read_architecture(folder / "config.json").vocab_size)


def build_engine(config: RunConfig, tokenizer: TokenizerLike, run_dir: Path, name: str) -> Engine:
    """A rollout engine of the student; it waits for its first publish.

    Raises:
        ConfigError: an engine that cannot run the student's model.
    """
    model = config.student.model
    if isinstance(model, ToyModelConfig):
        return toy_engine(model, _declared(tokenizer), name)
    engine = config.rollout.engine or HFEngineConfig(kind="hf")
    folder = _verified_student(run_dir)
    if isinstance(model, MegatronModelConfig) and isinstance(engine, SGLangEngineConfig):
        return _sglang_engine(config, model, engine, tokenizer, run_dir, name)
    if not isinstance(engine, HFEngineConfig):
        raise ConfigError(f"rollout.engine: an hf student is not sampled by {engine.kind}")
    from rollout_server.engines.hf import HFEngine

    device, vocabulary = "cpu", _engine_vocabulary(model, tokenizer, folder)
    if isinstance(model, HFStudentConfig):
        from miniverl_dist.backends.hf_model import device_of

        device = str(device_of(model))
    return HFEngine(
        folder,
        vocabulary,
        batch_slots=engine.batch_slots,
        max_context_tokens=model.max_context_tokens,
        dtype=model.dtype,
        name=name,
        device=device,
    )


def _engine_vocabulary(
    model: HFStudentConfig | MegatronModelConfig, tokenizer: TokenizerLike, folder: Path
) -> AnyVocabulary:
    """Rows that the engine may sample: an hf student's softmax covers its tokenizer's ids only."""
    if isinstance(model, HFStudentConfig):
        return FullVocabulary(tokenizer.vocab_size)
    return student_vocabulary(model, tokenizer, folder)


def _sglang_engine(
    config: RunConfig,
    model: MegatronModelConfig,
    engine: SGLangEngineConfig,
    tokenizer: TokenizerLike,
    run_dir: Path,
    name: str,
) -> SGLangEngine:
    folder = run_dir / STUDENT_FOLDER
    launch = SGLangLaunch(
        engine,
        folder / "config.json",
        (engine.work_dir or run_dir / ENGINES_FOLDER) / name,
        max_context_tokens=model.max_context_tokens,
        dtype=model.dtype,
        returns_experts=config.rollout.routing_replay == "on",
    )
    return SGLangEngine(
        launch,
        student_vocabulary(model, tokenizer, folder),
        name=name,
        request_deadline_s=config.deadlines.generate_s,
    )


def _verified_student(run_dir: Path) -> Path:
    verify_seal(run_dir / STUDENT_FOLDER, run_dir / STUDENT_SEAL_FILE)
    return run_dir / STUDENT_FOLDER


def _declared(tokenizer: TokenizerLike) -> SubVocabulary:
    if not isinstance(tokenizer, SubVocabulary):
        raise TokenizerError(
            f"{tokenizer.name} has no declared vocabulary, but the model needs one"
        )
    return tokenizer


def fit_toy(
    model: ToyModelConfig,
    vocabulary: SubVocabulary,
    examples: Sequence[SftExample],
    fit: SftConfig,
    *,
    seed: int,
    on_step: Callable[[int, dict[str, float]], None],
) -> dict[str, NDArray[np.float32]]:
    """Fit a toy model on supervised sequences; returns its weights."""
    backend = ToyBackend(
        model,
        vocabulary.ids,
        TokenizerIdentity(vocabulary.name, vocabulary.fingerprint),
        loss=LossConfig(),
        optim=OptimConfig(),
        num_steps=max(fit.num_steps, 1),
        seed=seed,
    )
    batches = sft_batches(examples, fit, seed=seed, replacement_ids=vocabulary.ids)
    for step, batch in enumerate(batches):
        on_step(step, backend.sft_update(batch, fit.learning_rate))
    return backend.model.arrays()


def toy_engine(model: ToyModelConfig, vocabulary: SubVocabulary, name: str) -> ToyEngine:
    """A toy engine that waits for its first publish."""
    return ToyEngine(model, vocabulary.ids, name)


def folder_snapshot(folder: Path) -> WeightSnapshot:
    """A toy folder's weights as version 0."""
    weights = load_toy_folder(folder).weights
    return WeightSnapshot(0, weights, weights_checksum(weights))
