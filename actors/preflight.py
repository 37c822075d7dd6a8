"""What is checked before a run directory is made or touched."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator

from actors.hf_files import require_device
from actors.placement import placement_plan
from actors.recipe_checks import (
    check_evaluation_tasks,
    check_student,
    check_student_text,
    teacher_is_here,
    training_tasks,
)
from actors.teacher_files import asks_teacher, check_teacher, check_teacher_text
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import EngineConfig, SGLangEngineConfig
from miniverl_dist.config.roles import HFModelConfig, HFStudentConfig, MegatronModelConfig
from miniverl_dist.errors import ConfigError, MissingDependencyError, install_hint
from miniverl_dist.generate_api.headers import read_headers_file
from miniverl_dist.schemas.evaluation import TailCalls

_INSTALL = {
    "torch": f"{install_hint('local')} (README: which torch)",
    "tokenizers": install_hint("local"),
    "bfcl_eval": "scripts/install_bfcl.sh",
    "megatron": "scripts/install_megatron.sh",
    "transformers": install_hint("local"),
    "ray": install_hint("ray"),
}


def require_local_packages(config: RunConfig, *, with_student: bool = True) -> None:
    """Fail before anything is written when this process cannot do its part of the run.

    Args:
        config: Of the run.
        with_student: False where nothing will be asked of the student (an evaluation of others).

    Raises:
        MissingDependencyError: names every missing package and the command that installs it.
    """
    needed = _needed(config) if with_student else _needed_by_episodes(config)
    missing = [name for name in needed if not _is_installed(name)]
    if missing:
        listed = "; ".join(f"{name}: {_INSTALL[name]}" for name in missing)
        raise MissingDependencyError(
            f"this command needs {', '.join(missing)}, which this environment lacks. {listed}"
        )


def require_student_files(config: RunConfig) -> None:
    """Fail before anything is written when the student's model cannot be what the recipe says.

    Raises:
        ConfigError: see ``recipe_checks.check_student``; there is no such device; an engine that
            cannot be launched; actors that Ray cannot place.
    """
    check_student(config)
    placement_plan(config)
    model = config.student.model
    if isinstance(model, HFStudentConfig):
        require_device(model)
    if not isinstance(model, MegatronModelConfig):
        return
    if model.weights is not None and not (model.weights / "config.json").is_file():
        raise ConfigError(
            f"student.model.weights: {model.weights} holds no Hugging Face model (no config.json); "
            "give a folder that every node can read, or leave it out to draw weights from the seed"
        )
    if config.runtime != "cluster" or config.cluster.address == "local":
        require_engine(config.rollout.engine)  # else engines stand on other machines


def require_tasks(config: RunConfig) -> None:
    """Fail before anything is written when the tasks of the recipe cannot be trained on.

    Raises:
        TaskNotFoundError, ConfigError: see ``recipe_checks.training_tasks``.
    """
    training_tasks(config)


def require_evaluation_tasks(config: RunConfig, tail_calls: TailCalls | None) -> None:
    """Fail before anything is written when the tasks of an evaluation cannot be played.

    Raises:
        TaskNotFoundError, ConfigError: see ``recipe_checks.check_evaluation_tasks``; a student's
            tokenizer that no episode can be written with.
    """
    check_evaluation_tasks(config, tail_calls)
    check_student_text(config)


def require_teacher_files(config: RunConfig) -> None:
    """Fail before anything is written when what the teacher's client reads is not there.

    Raises:
        ConfigError: names the field and what it has to hold; a model that cannot be what the
            recipe says.
    """
    teacher = config.teacher
    if teacher is None or not asks_teacher(config):
        return
    if config.acts_elsewhere:
        return
    if teacher.headers_file is not None:
        try:
            read_headers_file(teacher.headers_file)
        except ConfigError as error:
            raise ConfigError(
                f"teacher.headers_file: {error}; it holds one header a line, for a server with a "
                "token `Authorization: Bearer TOKEN`"
            ) from None
    if teacher.vocabulary is not None and not teacher.vocabulary.is_file():
        raise ConfigError(
            f"teacher.vocabulary: there is no file {teacher.vocabulary}; it is the "
            "teacher-vocabulary.json of the run that fitted the toy teacher behind `url`"
        )
    if teacher_is_here(config):
        check_teacher(config)
    else:
        check_teacher_text(teacher)  # written here all the same


def require_engine(engine: EngineConfig | None) -> None:
    """Raise where a server could not even be launched from this machine.

    Raises:
        MissingDependencyError: there is no SGLang where the recipe says.
    """
    if not isinstance(engine, SGLangEngineConfig):
        return
    if engine.python is None and not _is_installed("sglang"):
        raise MissingDependencyError(
            "rollout.engine: sglang is not installed in this environment: install it with "
            "scripts/install_sglang.sh and name its interpreter as rollout.engine.python"
        )
    if engine.python is not None and not engine.python.is_file():
        raise MissingDependencyError(
            f"rollout.engine.python: {engine.python} is no interpreter; scripts/install_sglang.sh "
            "makes the environment"
        )


def _needed_by_episodes(config: RunConfig) -> Iterator[str]:
    yield "tokenizers"
    if config.environment.kind == "bfcl":
        yield "bfcl_eval"


def _needed(config: RunConfig) -> Iterator[str]:
    yield "torch"
    yield from _needed_by_episodes(config)
    if config.student.model.kind == "megatron":
        yield from ("megatron", "transformers")
    if config.student.model.kind == "hf" or _loads_hf_teacher(config):
        yield "transformers"
    if config.runtime != "inprocess":
        yield "ray"


def _loads_hf_teacher(config: RunConfig) -> bool:
    is_hf = config.teacher is not None and isinstance(config.teacher.model, HFModelConfig)
    return is_hf and asks_teacher(config) and teacher_is_here(config)


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None
    return importlib.util.find_spec(name) is not None
