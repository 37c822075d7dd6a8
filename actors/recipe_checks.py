"""What can be said against a recipe before it costs anything: for `plan`, and before a start.

Checks that need a package which is not installed are left out of a plan, and named there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from actors.context_checks import check_contexts
from actors.demonstrations import require_demonstrations
from actors.hf_files import check_hf_student, read_hf_files
from actors.student_side import (
    WRITE_CALLS,
    named_tokenizer,
    require_rows,
    routing_shape,
    student_chat,
)
from actors.tasks import make_environment, resolve_tasks
from actors.teacher_files import check_teacher, read_teacher_files
from actors.warm_start import require_warm_start
from miniverl_dist.backends.megatron.architecture import read_architecture
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import HFModelConfig, HFStudentConfig, MegatronModelConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import ConfigError, MissingDependencyError
from miniverl_dist.schemas.evaluation import TailCalls
from miniverl_dist.tokens.tokenizer import TokenizerLike
from miniverl_dist.training.evaluate import assignments
from rollout_server.curriculum import ReverseK


@dataclass
class CheckedRecipe:
    """What was found out on the way."""

    tasks: tuple[TaskInfo, ...] | None = None
    """To train on; None where the environment is not installed."""
    unchecked: list[str] = field(default_factory=list)
    """Why something could not be looked at."""


def check_recipe(config: RunConfig) -> CheckedRecipe:
    """Look at everything that a recipe names and that this machine has.

    Raises:
        ConfigError: a folder, a vocabulary or adapters do not fit, or what it starts from is not
            there.
        CheckpointError, ChecksumError: what it starts from is damaged.
        TaskNotFoundError: a task that the environment does not have.
    """
    found = CheckedRecipe()

    def tasks() -> None:
        found.tasks = training_tasks(config)

    checks: Sequence[Callable[[], None]] = (
        tasks,
        lambda: check_student(config),
        lambda: check_teacher(config) if teacher_is_here(config) else None,
        lambda: require_warm_start(config),
        lambda: check_contexts(config),
        lambda: require_demonstrations(config),
    )
    for check in checks:
        try:
            check()
        except MissingDependencyError as error:
            found.unchecked.append(f"not checked: {error}")
    return found


def check_present_folders(config: RunConfig) -> int:
    """Look at the model folders of a recipe that this machine has; others are not missed.

    Returns:
        How many there are.

    Raises:
        ConfigError: one is damaged, or no model's.
    """
    student, teacher = config.student.model, config.teacher
    count = 0
    if isinstance(student, HFStudentConfig) and student.path.is_dir():
        read_hf_files(student.path)
        count += 1
    taught_by = None if teacher is None else teacher.model
    if isinstance(taught_by, HFModelConfig) and taught_by.path.is_dir():
        read_teacher_files(taught_by)
        count += 1
    return count


def training_tasks(config: RunConfig) -> tuple[TaskInfo, ...]:
    """The tasks to train on; those to evaluate are looked at too.

    Raises:
        MissingDependencyError: the environment is not installed.
        TaskNotFoundError, ConfigError: see ``actors.tasks.resolve_tasks``; no task has a call to
            make, or none to evaluate has as many as ``evaluation.tail_calls``.
    """
    tasks = make_environment(config, WRITE_CALLS).tasks()
    train, held_out = resolve_tasks(config, tasks)
    ReverseK(tasks, train, config.curriculum, seed=config.seed)
    assignments(tasks, held_out, config.evaluation.tail_calls)
    return tuple(tasks[task_id] for task_id in train)


def check_evaluation_tasks(config: RunConfig, tail_calls: TailCalls | None) -> None:
    """Raise when the tasks of an evaluation by itself cannot be played.

    Args:
        config: Of the run.
        tail_calls: T instead of the config's.

    Raises:
        See ``training_tasks``; what is trained on need not have a call.
    """
    tasks = make_environment(config, WRITE_CALLS).tasks()
    _, held_out = resolve_tasks(config, tasks)
    assignments(tasks, held_out, tail_calls or config.evaluation.tail_calls)


def check_student_text(config: RunConfig) -> TokenizerLike:
    """The student's whole tokenizer, when it has one that episodes can be written with.

    Raises:
        ConfigError: there is no such tokenizer, or no chat format for it.
        MissingDependencyError: what reads it is not installed.
    """
    tokenizer = named_tokenizer("student.tokenizer", config.student.tokenizer)
    student_chat(config, tokenizer)
    return tokenizer


def check_student(config: RunConfig) -> None:
    """Raise when the student cannot be what the recipe says.

    Raises:
        ConfigError: a file is missing or damaged, of an architecture that is not supported, or
            does not fit parallelism, tokenizer or adapters.
        MissingDependencyError: what reads its tokenizer or folder is not installed.
    """
    model, tokenizer = config.student.model, check_student_text(config)
    if isinstance(model, HFStudentConfig):
        check_hf_student(config, model)
    if not isinstance(model, MegatronModelConfig):
        return
    architecture = read_architecture(model.config)
    if problem := architecture.problem(model.parallel):
        raise ConfigError(f"student.model.parallel does not suit {model.config}: {problem}")
    routing_shape(config)
    if model.vocabulary == "full":
        require_rows(architecture, model.config.name, tokenizer)


def teacher_is_here(config: RunConfig) -> bool:
    """Whether this machine can read the teacher's files; else its actor does, on another one."""
    if config.cluster.address == "local" or config.runtime == "inprocess":
        return True
    is_hf = config.teacher is not None and isinstance(config.teacher.model, HFModelConfig)
    return config.runtime == "cluster" and not is_hf
