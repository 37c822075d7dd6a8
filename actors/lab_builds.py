"""The lab's parts of a run: row losses, target sources, memory; needs torch."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from actors.hf_files import folder_sha256, weight_files
from actors.student_side import StudentSide
from actors.teacher_files import TEACHER_FOLDER
from actors.teacher_side import Renderer, teacher_tokenizer
from miniverl_dist.alignment.targets import shared_ids
from miniverl_dist.backends.distilled import RowLoss
from miniverl_dist.backends.vocabulary import AnyVocabulary
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import (
    BackboneTeacherConfig,
    HFModelConfig,
    HFStudentConfig,
    TeacherConfig,
    ToyModelConfig,
)
from miniverl_dist.errors import ConfigError
from miniverl_dist.lab.memory import Estimate, MemoryChoice, choose
from miniverl_dist.lab.resident import ResidentTeacher, require_top_k
from miniverl_dist.lab.sources import (
    Refused,
    RowChoice,
    StoredTeacher,
    TeacherTexts,
    TextLimit,
    WrittenTargets,
)
from miniverl_dist.lab.teacher_cache import TEACHER_CACHE, CacheIdentity, TeacherCache
from miniverl_dist.ports import TargetSource
from miniverl_dist.schemas.batch import IntArray
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.tokens.identity import declared_ids
from miniverl_dist.training.target_rows import trained_mask
from teacher_server.scorer import CausalLM, load_model
from teacher_server.views import TeacherView, teacher_view

if TYPE_CHECKING:
    from miniverl_dist.backends.hf_teacher import BackboneTeacher


@dataclass(frozen=True)
class LabParts:
    """What a run over whole distributions has beside the others."""

    rows: RowLoss
    """For the student's backend."""
    targets: TargetSource
    """For the loop."""
    memory: MemoryChoice | None
    """None where there is no teacher."""


def build_lab(
    config: RunConfig,
    side: StudentSide,
    vocabulary: AnyVocabulary,
    run_dir: Path,
    *,
    student_bytes: int,
    on_refused: Refused,
    backbone: BackboneTeacher | None = None,
) -> LabParts | None:
    """The lab's parts; None under an objective that has none.

    Args:
        config: Of the run.
        side: The student's half.
        vocabulary: Of the student's head.
        run_dir: Where a fitted teacher and the teacher cache lie.
        student_bytes: What the student and its optimizer take.
        on_refused: Told of each trajectory without targets, and why.
        backbone: The teacher that shares the student's backbone, where it is that one.

    Raises:
        ConfigError: the teacher does not fit beside the student although it must; a `top_k` above
            the tokens that both have.
        StaleCacheError: the run's teacher cache was made with something else.
    """
    distill = config.row_loss
    if distill is None:
        return None
    choice = RowChoice(
        config.selection,
        derive_seed(config.seed, "selection"),
        lambda trajectory: trained_mask(trajectory, is_online=config.is_online),
    )
    if not distill.needs_teacher:
        return LabParts(RowLoss(distill, vocabulary), WrittenTargets(choice), None)
    parts = _TeacherParts(config, distill, side, vocabulary, run_dir, backbone)
    return parts.build(choice, student_bytes, on_refused)


def text_limit(teacher: TeacherConfig, backbone: BackboneTeacher | None) -> TextLimit:
    """What the recipe lets a teacher read, or less where the model itself reads less."""
    allowed = TextLimit(teacher.max_prefill_tokens)
    if backbone is not None:
        longest = TextLimit(backbone.max_context_tokens, "the student's backbone reads no more")
    elif isinstance(teacher.model, ToyModelConfig):
        longest = TextLimit(teacher.model.max_context_tokens, "teacher.model.max_context_tokens")
    else:
        return allowed
    return min(allowed, longest, key=lambda limit: limit.num_tokens)


class _TeacherParts:
    """Builds the parts around one teacher."""

    def __init__(
        self,
        config: RunConfig,
        distill: DistillConfig,
        side: StudentSide,
        vocabulary: AnyVocabulary,
        run_dir: Path,
        backbone: BackboneTeacher | None,
    ) -> None:
        if config.teacher is None or config.teacher.model is None:
            raise ConfigError("distill needs teacher.model")
        self._config, self._distill, self._side = config, distill, side
        self._vocabulary, self._run_dir = vocabulary, run_dir
        self._teacher: TeacherConfig = config.teacher
        self._tokenizer = teacher_tokenizer(self._teacher, run_dir)
        self._renderer = Renderer(self._teacher, side, self._tokenizer)
        self._shared: IntArray | None = None
        self._backbone = backbone

    def build(self, choice: RowChoice, student_bytes: int, on_refused: Refused) -> LabParts:
        """Choose where the teacher lives, and wire it."""
        require_top_k(self._shared_ids(), self._vocabulary, self._distill)
        memory = choose(
            self._config.memory,
            self._distill,
            self._estimate(student_bytes),
            is_online=self._config.is_online,
            is_shared=self._backbone is not None,
        )
        resident = self._resident() if memory.strategy == "resident" else None
        rows = RowLoss(self._distill, self._vocabulary, resident)
        limit = text_limit(self._teacher, self._backbone)
        texts = TeacherTexts(choice, self._view, limit=limit, on_refused=on_refused)
        if resident is not None:
            return LabParts(rows, texts, memory)
        store = TeacherCache.open(
            self._run_dir / TEACHER_CACHE, self._identity(choice), create=True
        )
        source = StoredTeacher(texts, self._loaded, store, str(choice), self._kept_versions())
        return LabParts(rows, source, memory)

    def _kept_versions(self) -> int | None:
        """Those since the last commit: a resumed run trains on their batches again."""
        if not self._config.is_online:
            return None
        return self._config.checkpoint.every_n_steps * self._config.loop.num_minibatches + 1

    @property
    def _folder(self) -> Path:
        model = self._teacher.model
        return model.path if isinstance(model, HFModelConfig) else self._run_dir / TEACHER_FOLDER

    def _model(self) -> CausalLM:
        if self._backbone is not None:
            return self._backbone
        model = self._teacher.model
        if not isinstance(model, HFModelConfig):
            return load_model(self._folder)
        return load_model(
            model.path,
            dtype=model.dtype,
            device=self._device,
            num_ids=self._tokenizer.vocab_size,
        )

    @property
    def _device(self) -> str:
        """Of the student: a teacher of transformers is loaded beside it."""
        model = self._config.student.model
        if not isinstance(model, HFStudentConfig):
            return "cpu"
        from miniverl_dist.backends.hf_model import device_of

        return str(device_of(model))

    def _resident(self) -> ResidentTeacher:
        shared = self._shared_ids()
        return ResidentTeacher(
            self._model(), shared, self._vocabulary, self._distill, device=self._device
        )

    def _shared_ids(self) -> IntArray:
        if self._shared is None:
            self._shared = shared_ids(
                self._side.tokenizer, self._tokenizer, self._renderer.turn_ends
            )
        return self._shared

    @contextmanager
    def _loaded(self) -> Iterator[ResidentTeacher]:
        teacher = self._resident()
        try:
            yield teacher
        finally:
            del teacher
            gc.collect()  # before the student's update asks for the memory

    def _view(self, trajectory: Trajectory) -> TeacherView:
        rendering = self._renderer.render(trajectory, every_written=not self._config.is_online)
        return teacher_view(
            trajectory,
            rendering,
            student=self._side.tokenizer,
            teacher=self._tokenizer,
            turn_ends=self._renderer.turn_ends,
        )

    def _estimate(self, student_bytes: int) -> Estimate:
        rows = len(self._vocabulary) + len(declared_ids(self._tokenizer))
        return Estimate(
            student_bytes=student_bytes,
            teacher_bytes=self._teacher_bytes(),
            chunk_bytes=2 * 4 * self._config.loss.chunk_size * rows,
        )

    def _teacher_bytes(self) -> int:
        """Nothing but an adapter, of a teacher over the student's backbone."""
        model, folder = self._teacher.model, self._folder
        if isinstance(model, BackboneTeacherConfig):
            folder = model.adapter or folder
        return sum(path.stat().st_size for path in weight_files(folder))

    def _identity(self, choice: RowChoice) -> CacheIdentity:
        return CacheIdentity(
            teacher=self._teacher.tokenizer,
            teacher_checksum=folder_sha256(self._folder),
            student_fingerprint=self._side.tokenizer.fingerprint,
            teacher_fingerprint=self._tokenizer.fingerprint,
            mode=self._teacher.mode,
            rendering=self._teacher.rendering,
            top_k=self._distill.top_k,
            temperature=self._distill.temperature,
            selection=str(choice),
        )
