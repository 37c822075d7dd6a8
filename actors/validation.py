"""`miniverl-dist validate`: is this file or folder what it claims to be?"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from actors.recipe_checks import check_present_folders, training_tasks
from actors.teacher_files import TEACHER_FOLDER, TEACHER_REMEDY, TEACHER_SEAL_FILE
from miniverl_dist.config.arms import BENCHMARK_KIND, load_benchmark
from miniverl_dist.config.load import (
    config_kind,
    load_config,
    load_run_config,
    load_teacher_service,
)
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.problems import explain_in_line
from miniverl_dist.errors import ConfigError, MissingDependencyError, RecordError
from miniverl_dist.lab.arms import check_matched
from miniverl_dist.lab.teacher_cache import TEACHER_CACHE, TeacherCache
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.metrics import metric_line, step_problem
from miniverl_dist.observability.run_dir import (
    CHECKPOINT_MARKER,
    CHECKPOINTS,
    RecordFile,
    RunDirectory,
    parse_json_line,
)
from miniverl_dist.reporting.run_data import parse_evaluation, parse_trajectory
from miniverl_dist.schemas.token_analysis import TokenAnalysisLine
from miniverl_dist.training import checkpoint
from miniverl_dist.training.journal import Journal

_RECIPES = (".yaml", ".yml")


def validate_path(path: Path) -> str:
    """Check a recipe, run directory, checkpoint, or file of one; says what was checked.

    Raises:
        MiniverlError: the first thing that is wrong.
    """
    if path.is_dir():
        if (path / CHECKPOINT_MARKER).exists():
            return _checkpoint(path)
        return _run(path)
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    if path.suffix in _RECIPES:
        if config_kind(path) == BENCHMARK_KIND:
            return _benchmark(path)
        if config_kind(path) is not None:
            service = load_teacher_service(path)
            return f"teacher service {service.name}, kind {service.kind}"
        config = load_config(path).config
        _known_tasks(config)
        folders = check_present_folders(config)
        told = f"recipe {config.name}, objective {config.objective}, {config.policy_label}"
        return told + (f", {_counted(folders, 'model folder')}" if folders else "")
    if path.suffix == ".jsonl":
        return _record_file(path)
    if path.name == CHECKPOINT_MARKER:
        return _checkpoint(path.parent)
    if path.suffix == ".json" and path.name.startswith("eval"):
        return _evaluation(path)
    raise ConfigError(
        f"{path}: expected a recipe (.yaml), a run directory, a checkpoint, a .jsonl record or an "
        "eval*.json"
    )


def _known_tasks(config: RunConfig) -> None:
    """Look for the tasks of a recipe where their data is here; else nothing can be said of them."""
    with contextlib.suppress(MissingDependencyError):
        training_tasks(config)


def _benchmark(path: Path) -> str:
    loaded = load_benchmark(path)
    plan = loaded.config
    recipes = {name: loaded.recipe(arm.overrides).config for name, arm in plan.arms.items()}
    check_matched(plan, recipes)
    for config in recipes.values():
        _known_tasks(config)
    if plan.cold_start is not None:
        loaded.recipe(plan.cold_start.overrides)
    return f"benchmark {plan.name}, {_counted(len(recipes), 'arm')}, {len(plan.seeds)} seeds"


def _run(path: Path) -> str:
    run = RunDirectory.open(path)
    config = load_run_config(path)
    found = [f"config {config.digest[:12]}"]
    found += [_record_file(path / name) for name in RecordFile if (path / name).exists()]
    found += [_evaluation(file) for file in sorted(path.glob("eval*.json"))]
    if (path / TEACHER_SEAL_FILE).exists():
        checkpoint.verify_seal(path / TEACHER_FOLDER, path / TEACHER_SEAL_FILE, TEACHER_REMEDY)
        found.append("the fitted teacher")
    if (path / TEACHER_CACHE).exists():
        found.append(_teacher_cache(path / TEACHER_CACHE))
    journal = Journal(path / "journal", config.digest)
    found.append(_counted(journal.verify(), "journalled step"))
    checkpoint.newest_checkpoint(path / CHECKPOINTS)
    checkpoints = checkpoint.list_checkpoints(path / CHECKPOINTS)
    for folder in checkpoints:
        _checkpoint_of_run(folder, run, config.digest)
    return ", ".join([*found, _counted(len(checkpoints), "checkpoint")])


def _teacher_cache(folder: Path) -> str:
    cache = TeacherCache.read(folder)
    if problems := cache.validate():
        raise RecordError(f"{folder}: {problems[0]} ({len(problems)} problems in all)")
    return f"teacher cache of {_counted(len(cache), 'entry')}"


def _checkpoint(folder: Path) -> str:
    manifest = checkpoint.verify(folder)
    files = _counted(len(manifest.files), "file")
    return f"checkpoint of step {manifest.state.step}, {files} with right checksums"


def _checkpoint_of_run(folder: Path, run: RunDirectory, digest: str) -> None:
    state = checkpoint.verify(folder).state
    if state.config_digest != digest:
        raise RecordError(
            f"{folder}: made under config {state.config_digest[:12]}, the run has {digest[:12]}"
        )
    lengths = run.positions(state.file_positions)
    for name, length in state.file_positions.items():
        if lengths[name] < length:
            raise RecordError(
                f"{run.path / name}: {lengths[name]} bytes, but checkpoint {folder.name} was made "
                f"with {length}: the file has been shortened"
            )


def _evaluation(path: Path) -> str:
    rows = parse_evaluation(path.read_bytes(), str(path)).rows
    return _counted(len(rows), "evaluation row")


def _record_file(path: Path) -> str:
    check, noun = _CHECKS.get(path.name, (_trajectory, "trajectory"))
    number, step = 0, 0
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            found = check(line, f"{path}, line {number}")
            if found is None:
                continue
            if problem := step_problem(step, found):
                raise RecordError(f"{path}, line {number}: {problem}")
            step = found
    return _counted(number, noun)


def _trajectory(line: bytes, where: str) -> None:
    parse_trajectory(line, where)


def _metrics(line: bytes, where: str) -> int:
    """The step that a line is of."""
    record = parse_json_line(line, where)
    try:
        metric_line(record)
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None
    return int(record["step"])


def _tokens(line: bytes, where: str) -> None:
    parse_json_line(line, where)
    try:
        TokenAnalysisLine.model_validate_json(line, strict=False)
    except ValidationError as error:
        raise RecordError(f"{where}: {explain_in_line(error, TokenAnalysisLine)}") from None
    except RecordError as error:
        raise RecordError(f"{where}: {error}") from None


def _event(line: bytes, where: str) -> None:
    found = parse_json_line(line, where).get("event")
    if found not in set(Event):
        raise RecordError(f"{where}: event {found!r} is not declared")


_CHECKS: dict[str, tuple[Callable[[bytes, str], int | None], str]] = {
    # A check says which step its line is of where there is one line for each step.
    RecordFile.METRICS: (_metrics, "step"),
    RecordFile.EVENTS: (_event, "event"),
    RecordFile.EVAL_TRAJECTORIES: (_trajectory, "evaluation trajectory"),
    RecordFile.TOKEN_ANALYSIS: (_tokens, "analysed trajectory"),
}


def _counted(number: int, noun: str) -> str:
    plural = f"{noun[:-1]}ies" if noun.endswith("y") else f"{noun}s"
    return f"{number} {noun if number == 1 else plural}"
