"""Everything about the teacher that is not its scores: tokenizer, chat format, rendering, fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from actors.student_side import WRITE_CALLS, StudentSide, sft_seed
from actors.teacher_files import (
    TEACHER_FOLDER,
    TEACHER_REMEDY,
    TEACHER_SEAL_FILE,
    TEACHER_VOCABULARY_FILE,
)
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import (
    SftConfig,
    TeacherConfig,
    ToyModelConfig,
)
from miniverl_dist.errors import ConfigError, TokenizerMismatchError
from miniverl_dist.ports import ChatFormat, Clock
from miniverl_dist.schemas.messages import ToolSchema
from miniverl_dist.schemas.running_episode import TokenRecord
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.tokens.identity import base_of
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from miniverl_dist.training.checkpoint import seal, verify_seal
from miniverl_dist.training.sft import SftExample
from rollout_server.chat_format import Qwen36ChatFormat
from rollout_server.traces import Trace, TraceMaker
from teacher_server.privileged import solution_text
from teacher_server.rendering import (
    DeepSeekV4ChatFormat,
    OracleBlock,
    TeacherRendering,
    render,
    turn_ends,
)

_CHAT_FORMATS: dict[str, Callable[[TokenizerLike], ChatFormat]] = {
    "deepseek-v4": DeepSeekV4ChatFormat,
    "qwen3.6": Qwen36ChatFormat,
}


def teacher_chat(config: TeacherConfig, tokenizer: TokenizerLike) -> ChatFormat:
    """The teacher's own roles; both formats ask for the wire form that the student writes.

    Raises:
        ConfigError: there is none for its tokenizer.
    """
    make = _CHAT_FORMATS.get(config.tokenizer)
    if make is None:
        raise ConfigError(
            f"teacher.tokenizer: there is no chat format for {config.tokenizer!r}; known are "
            f"{', '.join(sorted(_CHAT_FORMATS))}"
        )
    return make(tokenizer)


class Renderer:
    """Renders trajectories for the teacher; knows the tools, and the oracle, of each task."""

    def __init__(self, config: TeacherConfig, side: StudentSide, teacher: TokenizerLike) -> None:
        self._mode, self._side, self._teacher = config.rendering, side, teacher
        self._is_privileged = config.mode == "privileged_context"
        self.chat = teacher_chat(config, teacher) if config.rendering == "native" else None
        start = config.text_start
        self._start_ids = () if start is None else (teacher.special_id(start),)
        self._tools: dict[str, Sequence[ToolSchema]] = {}
        self._blocks: dict[tuple[str, int], OracleBlock] = {}

    def __call__(self, trajectory: TokenRecord) -> TeacherRendering:
        """See `teacher_server.rendering.render`."""
        return self.render(trajectory, every_written=False)

    @property
    def turn_ends(self) -> tuple[int, int] | None:
        """Turn end ids of student and teacher; None where they do not stand for each other."""
        return turn_ends(self._mode, self._side.chat, self.chat)

    def render(self, trajectory: TokenRecord, *, every_written: bool) -> TeacherRendering:
        """Locate the sampled spans, or with ``every_written`` all that somebody wrote.

        Raises:
            EnvironmentFaultError: the oracle's calls cannot be found out.
        """
        rendering = render(
            trajectory,
            mode=self._mode,
            student_format=self._side.chat,
            teacher_format=self.chat,
            teacher=self._teacher,
            tools=self._tools_of(trajectory.task_id),
            every_written=every_written,
            block=self._block_of(trajectory) if self._is_privileged else None,
        )
        return rendering.behind(self._start_ids)

    def _tools_of(self, task_id: str) -> Sequence[ToolSchema]:
        if task_id not in self._tools:
            with closing(self._side.environment.start(task_id, prefix_calls=0)) as session:
                self._tools[task_id] = session.tools()
        return self._tools[task_id]

    def _block_of(self, trajectory: TokenRecord) -> OracleBlock:
        """What the oracle does from where the policy took over."""
        if not isinstance(trajectory, Trajectory):
            raise ConfigError(
                "teacher.mode privileged_context needs a finished trajectory, which says where the "
                "policy took over: turn teacher.prefix_scoring off"
            )
        place = trajectory.task_id, trajectory.prefix_calls
        if place not in self._blocks:
            start = self._side.environment.start
            with closing(start(place[0], prefix_calls=place[1])) as session:
                self._blocks[place] = OracleBlock(
                    solution_text(session.expert_tail(), WRITE_CALLS), len(session.opening())
                )
        return self._blocks[place]


def declare_teacher_vocabulary(
    config: TeacherConfig, side: StudentSide, traces: Iterable[Trace]
) -> SubVocabulary:
    """Real ids of the teacher that the rendered traces need, and all bytes.

    A teacher that reads the student's very ids has the student's vocabulary: it must know every id
    that the student can write, and then both softmaxes have the same rows.

    Raises:
        ConfigError: the student's vocabulary is the whole tokenizer, too large for a toy.
    """
    base = load_tokenizer(config.tokenizer)
    if config.rendering == "verbatim":
        return _students_vocabulary(side.tokenizer, base)
    renderer = Renderer(config, side, base)
    occurring = {
        i
        for trace in traces
        for i in renderer.render(trace.trajectory, every_written=True).token_ids
    }
    return SubVocabulary(base, occurring)


def _students_vocabulary(student: TokenizerLike, base: TokenizerLike) -> SubVocabulary:
    if not isinstance(student, SubVocabulary):
        raise ConfigError(
            f"teacher.rendering verbatim with a toy teacher: it would need a row for each of the "
            f"student's {student.vocab_size} ids; give the student a declared vocabulary, or use "
            "teacher.rendering: native"
        )
    if base_of(student).fingerprint != base.fingerprint:
        raise TokenizerMismatchError(
            f"teacher.rendering verbatim: the teacher's tokenizer {base.name} "
            f"({base.fingerprint[:12]}) is not the student's {base_of(student).name} "
            f"({base_of(student).fingerprint[:12]})"
        )
    return SubVocabulary(base, student.ids)


def teacher_examples(
    traces: Iterable[Trace], renderer: Renderer, fit: SftConfig, *, limit: int
) -> list[SftExample]:
    """Supervised sequences of the teacher over its own tokens, at most ``limit`` of them each.

    Raises:
        ConfigError: a trace does not fit the teacher's context.
    """
    return [_teacher_example(trace, renderer, fit, limit) for trace in traces]


def _teacher_example(trace: Trace, renderer: Renderer, fit: SftConfig, limit: int) -> SftExample:
    rendering = renderer.render(trace.trajectory, every_written=True)
    end = max(span.end for span in rendering.spans)
    if end > limit:
        raise ConfigError(
            f"teacher.model.max_context_tokens is {limit}, but a trace of "
            f"{trace.trajectory.task_id} takes {end} teacher tokens: raise it, or choose a shorter "
            "environment.prompt"
        )
    token_ids = np.asarray(rendering.token_ids[:end], dtype=np.int64)
    written = np.zeros(end, dtype=bool)
    loss_mask = np.zeros(end, dtype=bool)
    for span in rendering.spans:
        written[span.start : span.end] = loss_mask[span.start : span.end] = True
        divergence = trace.divergence(trace.trajectory.spans[span.span_index])
        if fit.mask_divergence and divergence is not None:
            spoilt = np.flatnonzero(np.asarray(span.byte_ends) > divergence)
            loss_mask[span.start + spoilt[:1]] = False
    return SftExample(token_ids, loss_mask, written)


async def fit_traces(
    config: RunConfig, side: StudentSide, fit: SftConfig, clock: Clock
) -> list[Trace]:
    """The scripted episodes that a toy teacher is fitted on."""
    maker = TraceMaker(side.stage, WRITE_CALLS, clock, seed=derive_seed(config.seed, "teacher"))
    return await maker.make(
        side.train_ids,
        max_tail_calls=fit.max_tail_calls,
        per_task=fit.traces_per_task,
        noisy_fraction=fit.noisy_fraction,
    )


def fit_teacher(
    config: RunConfig,
    side: StudentSide,
    traces: Sequence[Trace],
    run_dir: Path,
    on_step: Callable[[int, dict[str, float]], None],
) -> None:
    """Fit the toy teacher on scripted traces and store it in the run directory."""
    from actors.builds import fit_toy
    from miniverl_dist.backends.weights_io import TokenizerIdentity, save_toy_folder

    teacher = config.teacher
    if teacher is None or teacher.fit is None or not isinstance(teacher.model, ToyModelConfig):
        return
    vocabulary = declare_teacher_vocabulary(teacher, side, traces)
    weights = fit_toy(
        teacher.model,
        vocabulary,
        teacher_examples(
            traces,
            Renderer(teacher, side, vocabulary),
            teacher.fit,
            limit=teacher.model.max_context_tokens,
        ),
        teacher.fit,
        seed=sft_seed(config, "teacher"),
        on_step=on_step,
    )
    identity = TokenizerIdentity(vocabulary.name, vocabulary.fingerprint)
    save_toy_folder(run_dir / TEACHER_FOLDER, teacher.model, vocabulary.ids, identity, weights)
    vocabulary.save(run_dir / TEACHER_VOCABULARY_FILE)
    seal(run_dir / TEACHER_FOLDER, run_dir / TEACHER_SEAL_FILE)


def teacher_tokenizer(config: TeacherConfig, run_dir: Path) -> TokenizerLike:
    """The teacher's tokenizer; a toy teacher's is the sub-vocabulary stored with it.

    Raises:
        CheckpointError, ChecksumError: the fitted teacher is damaged.
    """
    if config.fit is not None:
        verify_seal(run_dir / TEACHER_FOLDER, run_dir / TEACHER_SEAL_FILE, TEACHER_REMEDY)
    base = load_tokenizer(config.tokenizer)
    path = run_dir / TEACHER_VOCABULARY_FILE if config.fit is not None else config.vocabulary
    return base if path is None else SubVocabulary.load(path, base)
