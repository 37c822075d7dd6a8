"""Whether the experts' own episodes fit the models that are made to read all of them.

A declared vocabulary and a fitted teacher begin with scripted episodes. Here each task's is played
once, without mistakes, where the run plays many with some: what does not fit even so is told before
a run directory is made. Nothing is loaded but tokenizers.
"""

from __future__ import annotations

import asyncio

from actors.student_side import (
    declare_vocabulary,
    has_declared_vocabulary,
    student_side,
)
from actors.teacher_side import Renderer, fit_traces, teacher_examples
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import SftConfig, TeacherConfig, ToyModelConfig
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.tokens.load import load_tokenizer

_ONCE = {"traces_per_task": 1, "noisy_fraction": 0.0}


def check_contexts(config: RunConfig) -> None:
    """Raise when a scripted episode does not fit the student, or the teacher that is fitted on it.

    Raises:
        ConfigError: names the episode, its length and the field.
        EnvironmentFaultError: an episode cannot be played.
        MissingDependencyError: the environment or a tokenizer is not installed.
    """
    if config.acts_elsewhere:
        return
    teacher = config.teacher
    if has_declared_vocabulary(config) and config.student.warm_start is None:
        asyncio.run(_play_student(config))  # waits for nothing but this process
    if teacher is not None and teacher.fit is not None and teacher.fitted is None:
        asyncio.run(_read_as_teacher(config, teacher, teacher.fit))


async def _play_student(config: RunConfig) -> None:
    student = config.student
    warmup = student.warmup and student.warmup.model_copy(update=_ONCE)
    once = student.model_copy(update={"warmup": warmup})
    await declare_vocabulary(config.model_copy(update={"student": once}), SystemClock())


async def _read_as_teacher(config: RunConfig, teacher: TeacherConfig, fit: SftConfig) -> None:
    if not isinstance(teacher.model, ToyModelConfig):
        return
    side = student_side(config, load_tokenizer(config.student.tokenizer))
    traces = await fit_traces(config, side, fit.model_copy(update=_ONCE), SystemClock())
    renderer = Renderer(teacher, side, load_tokenizer(teacher.tokenizer))
    teacher_examples(traces, renderer, fit, limit=teacher.model.max_context_tokens)
