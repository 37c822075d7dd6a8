"""What the commands do: start, resume and evaluate runs, in this process or on a Ray cluster.

python -m actors.launch train CONFIG      the entry point of submitted jobs
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

from actors.context_checks import check_contexts
from actors.demonstrations import require_demonstrations, require_kept_demonstrations
from actors.eval_jobs import (
    EvaluationRequest,
    check_request,
    needs_student,
    plays_own_teacher,
    row_tag_of,
)
from actors.kept_demonstrations import DEMONSTRATIONS
from actors.preflight import (
    require_evaluation_tasks,
    require_local_packages,
    require_student_files,
    require_tasks,
    require_teacher_files,
)
from actors.running import ActorFactory, Running, update_manifest
from actors.single import SingleActor
from actors.student_side import STUDENT_VOCABULARY_FILE, has_declared_vocabulary
from actors.tracking import require_trackers
from actors.warm_start import require_warm_start
from miniverl_dist import __version__
from miniverl_dist.config.load import LoadedConfig, load_run_config
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, ResumeError
from miniverl_dist.observability.environment import environment_record
from miniverl_dist.observability.progress import Progress
from miniverl_dist.observability.run_dir import (
    CHECKPOINTS,
    ENVIRONMENT,
    MANIFEST,
    RunDirectory,
)
from miniverl_dist.reporting.evaluation_folder import EVALUATION_STATUS, is_evaluation
from miniverl_dist.schemas.evaluation import EvaluationReport, TailCalls
from miniverl_dist.training import checkpoint as commits
from miniverl_dist.training.loop import RunSummary
from miniverl_dist.training.recorder import COMMITTED_FILES

Result = TypeVar("Result")


def train(
    config: LoadedConfig,
    *,
    run_dir: Path,
    progress: Progress,
    make_actor: ActorFactory | None = None,
) -> RunSummary:
    """Start a run in a new run directory.

    Args:
        config: The recipe; its ``runtime`` says where the run executes.
        run_dir: Made anew.
        progress: Told what happens.
        make_actor: Instead of the runtime's own, in this process.

    Raises:
        ConfigError: the directory is not empty.
        MiniverlError: whatever ended the run; the directory then says so.
    """
    require_local_packages(config.config)
    require_tasks(config.config)
    require_student_files(config.config)
    require_teacher_files(config.config)
    require_trackers(config.config)
    require_warm_start(config.config)
    check_contexts(config.config)
    require_demonstrations(config.config)
    with RunDirectory.create(run_dir) as run:
        progress.message(f"run directory: {run_dir}")
        config.save(run)
        run.write_json(ENVIRONMENT, environment_record())
        run.write_json(MANIFEST, _manifest(config))
        return _train(config, run, progress, make_actor, resume_from=None)


def resume(
    run_dir: Path, *, progress: Progress, make_actor: ActorFactory | None = None
) -> RunSummary:
    """Continue a run from its newest commit; one without a commit begins anew.

    Raises:
        ConfigError: not a run directory, or its config was edited.
        CheckpointError, ChecksumError: the newest commit is damaged.
        ResumeError: the newest commit belongs to another config; stored episodes have changed.
    """
    config = load_run_config(run_dir)
    require_local_packages(config.config)
    require_teacher_files(config.config)
    require_trackers(config.config)
    require_kept_demonstrations(config.config, run_dir)
    with RunDirectory.open(run_dir, writable=True) as run:
        commits.discard_incomplete(run_dir / CHECKPOINTS)
        newest = commits.newest_checkpoint(run_dir / CHECKPOINTS)
        if newest is None:
            # The first commit comes before the first step: without one there are no steps either.
            if any(run.positions(COMMITTED_FILES).values()):
                raise ResumeError(
                    f"{run_dir} records trained steps but has no checkpoint left: "
                    f"{CHECKPOINTS}/ was removed. Restore it, or start a new run"
                )
        else:
            found = commits.check_files(newest).state.config_digest
            if found != config.digest:
                raise ResumeError(
                    f"{newest.name} belongs to config {found[:12]}, this run to "
                    f"{config.digest[:12]}: a run can be resumed only under its own config"
                )
        return _train(config, run, progress, make_actor, resume_from=newest)


def evaluate(
    config: LoadedConfig,
    *,
    policies: tuple[str, ...],
    checkpoint: Path | None,
    tail_calls: TailCalls | None,
    output: Path,
    progress: Progress,
) -> EvaluationReport:
    """Evaluate policies on the config's evaluation tasks, as a job of its own.

    Args:
        config: Tasks, student, teacher and the ``evaluation`` section.
        policies: See `eval_policies.parse_policy`.
        checkpoint: Weights of the student; None takes its initial ones.
        tail_calls: T instead of the config's.
        output: Run directory of the job (made anew) or an existing run to add rows to.
        progress: Told what happens.
    """
    tag = row_tag_of(checkpoint, config)
    request = EvaluationRequest(policies, tag, checkpoint, tail_calls)
    return evaluate_request(config, request, output=output, progress=progress)


def evaluate_request(
    config: LoadedConfig, request: EvaluationRequest, *, output: Path, progress: Progress
) -> EvaluationReport:
    """The same with foreign policies or a deployed checkpoint.

    Raises:
        ConfigError: a policy that cannot play; nothing has been played then.
    """
    check_request(request, config.config)
    with_student = needs_student(request) or request.deploy is not None
    require_local_packages(config.config, with_student=with_student)
    require_evaluation_tasks(config.config, request.tail_calls)
    if with_student:
        require_student_files(config.config)
    if plays_own_teacher(request, config.config):
        require_teacher_files(config.config)
    if needs_student(request) and request.checkpoint is None:
        progress.message("note: no checkpoint given, the student is evaluated untrained")
    with _evaluation_run(config, output) as run:
        if request.checkpoint is not None:
            _take_vocabulary(config, request.checkpoint, output)
        running = Running(config, run, progress, actor_of(config))
        return asyncio.run(_interruptible(running.evaluate(request)))


def _take_vocabulary(config: LoadedConfig, checkpoint: Path, output: Path) -> None:
    """Read the checkpoint with the vocabulary of its own run, not with what this config declares.

    Other horizons or tasks would declare other ids.
    """
    own = checkpoint.parent.parent / STUDENT_VOCABULARY_FILE
    target = output / STUDENT_VOCABULARY_FILE
    if has_declared_vocabulary(config.config) and own.is_file() and not target.exists():
        shutil.copyfile(own, target)


def _train(
    config: LoadedConfig,
    run: RunDirectory,
    progress: Progress,
    make_actor: ActorFactory | None,
    *,
    resume_from: Path | None,
) -> RunSummary:
    """Execute where the recipe says."""
    if config.config.runtime == "single_actor" and make_actor is None:
        from actors.host import HostedRun

        run.close()  # the actor opens it: a run directory has one writer
        hosted = HostedRun(config, run.path, progress, resume_from)
        return asyncio.run(_stoppable(hosted.run(), hosted.request_stop))
    running = Running(config, run, progress, make_actor or actor_of(config))
    return asyncio.run(_stoppable(running.train(resume_from), running.request_stop))


def actor_of(config: LoadedConfig) -> type[SingleActor]:
    """What builds the parts of a run under its runtime, in the process that trains.

    An evaluation under ``single_actor`` runs here: nothing else needs the actor's process.
    """
    if config.config.runtime != "cluster":
        return SingleActor
    from actors.cluster import ClusterActor

    return ClusterActor


async def _stoppable(work: Coroutine[Any, Any, Result], stop: Callable[[], None]) -> Result:
    """Work during which SIGTERM and the first SIGINT ask for a stop in order.

    A second SIGINT interrupts.
    """
    loop = asyncio.get_running_loop()

    def told(number: int) -> None:
        stop()
        if number == signal.SIGINT:
            loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told, number)
    try:
        return await work
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _interruptible(work: Coroutine[Any, Any, Result]) -> Result:
    """Work that SIGTERM cancels, so that what it has started ends with it."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        loop.remove_signal_handler(signal.SIGTERM)


@contextlib.contextmanager
def _evaluation_run(config: LoadedConfig, output: Path) -> Iterator[RunDirectory]:
    if (output / MANIFEST).exists():
        with RunDirectory.open(output, writable=True) as run:
            found = run.read_json(MANIFEST).get("config_digest")
            if found != config.digest:
                raise ConfigError(
                    f"{output} belongs to config {str(found)[:12]}, this evaluation to "
                    f"{config.digest[:12]}: rows of different tasks or settings do not go into one "
                    "table; choose another --output"
                )
            with _told(run):
                yield run
        return
    with RunDirectory.create(output) as run:
        config.save(run)
        run.write_json(ENVIRONMENT, environment_record())
        run.write_json(MANIFEST, _manifest(config) | {"status": "evaluation"})
        with _told(run):
            yield run


@contextlib.contextmanager
def _told(run: RunDirectory) -> Iterator[None]:
    """Say in the manifest of an evaluation's own folder how it goes; a run keeps its own word."""
    if not is_evaluation(run.read_json(MANIFEST)):
        yield
        return
    end = "failed"
    update_manifest(run, **{EVALUATION_STATUS: "running"})
    try:
        yield
        end = "finished"
    except KeyboardInterrupt:
        end = "stopped"
        raise
    finally:
        update_manifest(run, **{EVALUATION_STATUS: end})


def _warmup(recipe: RunConfig) -> dict[str, Any] | None:
    """The supervised steps that the run takes itself."""
    warmup = recipe.student.warmup
    if warmup is None or recipe.student.warm_start is not None:
        return None
    return warmup.model_dump(mode="json")


def _manifest(config: LoadedConfig) -> dict[str, Any]:
    recipe = config.config
    return {
        "name": recipe.name,
        "version": __version__,
        "objective": recipe.objective,
        "policy_label": recipe.policy_label,
        "config_digest": config.digest,
        "seed": recipe.seed,
        "warmup": _warmup(recipe),
        "warm_start": None,
        DEMONSTRATIONS: None,
        "roles": {},
        "environment": {},
        "created_s": time.time(),
        "status": "created",
    }


if __name__ == "__main__":
    from actors.cli import main

    main()
