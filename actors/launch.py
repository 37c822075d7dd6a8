"""What the commands do: start, resume and evaluate runs; manifest, signals, report."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from actors.preflight import require_local_packages
from actors.single import SingleActor
from miniverl_dist import __version__
from miniverl_dist.config.load import LoadedConfig, load_run_config
from miniverl_dist.errors import ConfigError, MiniverlError, ResumeError
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.observability.environment import environment_record
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.progress import Progress
from miniverl_dist.observability.run_dir import (
    CHECKPOINTS,
    ENVIRONMENT,
    MANIFEST,
    RunDirectory,
)
from miniverl_dist.schemas.evaluation import EvaluationReport
from miniverl_dist.training import checkpoint as commits
from miniverl_dist.training.evaluator import read_evaluation
from miniverl_dist.training.loop import RunSummary, Trainer
from miniverl_dist.training.recorder import COMMITTED_FILES, Recorder

ActorFactory = Callable[[LoadedConfig, Recorder], SingleActor]
"""Makes the object that builds a run's parts; another runtime gives another one."""


def train(
    config: LoadedConfig,
    *,
    run_dir: Path,
    progress: Progress,
    make_actor: ActorFactory = SingleActor,
) -> RunSummary:
    """Start a run in a new run directory.

    Raises:
        ConfigError: the directory is not empty.
        MiniverlError: whatever ended the run; the directory then says so.
    """
    require_local_packages()
    with RunDirectory.create(run_dir) as run:
        config.save(run)
        run.write_json(ENVIRONMENT, environment_record())
        run.write_json(MANIFEST, _manifest(config))
        return _run(config, run, progress, make_actor, resume_from=None)


def resume(
    run_dir: Path, *, progress: Progress, make_actor: ActorFactory = SingleActor
) -> RunSummary:
    """Continue a run from its newest commit; one without a commit begins anew.

    Raises:
        ConfigError: not a run directory, or its config was edited.
        CheckpointError, ChecksumError: the newest commit is damaged.
        ResumeError: the newest commit belongs to another config.
    """
    require_local_packages()
    config = load_run_config(run_dir)
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
            found = commits.read_manifest(newest).state.config_digest
            if found != config.digest:
                raise ResumeError(
                    f"{newest.name} belongs to config {found[:12]}, this run to "
                    f"{config.digest[:12]}: a run can be resumed only under its own config"
                )
        return _run(config, run, progress, make_actor, resume_from=newest)


def evaluate(
    config: LoadedConfig,
    *,
    policies: tuple[str, ...],
    checkpoint: Path | None,
    tail_calls: int | None,
    output: Path,
    progress: Progress,
) -> EvaluationReport:
    """Evaluate policies on the config's evaluation tasks, as a job of its own.

    Args:
        config: Tasks, student, teacher and the ``evaluation`` section.
        policies: ``student``, ``teacher``, ``null``, ``oracle``.
        checkpoint: Weights of the student; None takes its initial ones.
        tail_calls: T instead of the config's.
        output: Run directory of the job (made anew) or an existing run to add rows to.
        progress: Told what happens.
    """
    require_local_packages()
    if "student" in policies and checkpoint is None:
        progress.message("note: no checkpoint given, the student is evaluated untrained")
    with _evaluation_run(config, output) as run:
        recorder = Recorder(run, progress, SystemClock())
        actor = SingleActor(config, recorder)
        tag = "initial" if checkpoint is None else _checkpoint_tag(checkpoint, config)
        asyncio.run(_evaluate(actor, policies, checkpoint, tail_calls, tag))
        return read_evaluation(run) or actor.empty_evaluation(config.config.evaluation)


def _checkpoint_tag(checkpoint: Path, config: LoadedConfig) -> str:
    """A row's tag: the commit's name, and whose it is when it was made under another config."""
    found = commits.read_manifest(checkpoint).state.config_digest
    return checkpoint.name if found == config.digest else f"{checkpoint.name}@{found[:8]}"


async def _evaluate(
    actor: SingleActor,
    policies: tuple[str, ...],
    checkpoint: Path | None,
    tail_calls: int | None,
    tag: str,
) -> None:
    await actor.prepare(with_teacher="teacher" in policies)
    async with actor.open(tail_calls=tail_calls, with_scorer=False) as parts:
        if checkpoint is not None:
            state = commits.verify(checkpoint).state
            await parts.ports.students.load(checkpoint, state.policy_version)
        await parts.ports.weights.publish(await parts.ports.students.snapshot())
        version = parts.ports.students.policy_version
        for name in policies:
            suffix = "" if tail_calls is None else f"-T{tail_calls}"
            await parts.evaluator.measure(name, f"{tag}{suffix}", version)


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
            yield run
        return
    with RunDirectory.create(output) as run:
        config.save(run)
        run.write_json(ENVIRONMENT, environment_record())
        run.write_json(MANIFEST, _manifest(config) | {"status": "evaluation"})
        yield run


def _run(
    config: LoadedConfig,
    run: RunDirectory,
    progress: Progress,
    make_actor: ActorFactory,
    *,
    resume_from: Path | None,
) -> RunSummary:
    """Run to the end, to a stop, or to an error; the manifest and the report say which."""
    recorder = Recorder(run, progress, SystemClock())
    _update_manifest(run, status="running")
    try:
        summary = asyncio.run(_train(make_actor(config, recorder), run, resume_from))
    except BaseException as error:
        _update_manifest(run, status="failed")
        recorder.event(Event.RUN_FAILED, error=type(error).__name__, message=str(error)[:2000])
        raise
    finally:
        progress.close()
    _update_manifest(run, status="finished" if summary.is_finished else "stopped")
    _report(run, recorder)
    return summary


def _report(run: RunDirectory, recorder: Recorder) -> None:
    """Write report.html and summary.md; a run is not lost for want of its report."""
    from miniverl_dist.reporting.report import write_report

    try:
        write_report(run.path)
    except MiniverlError as error:
        recorder.progress.message(f"no report: {error} (try `miniverl-dist report` later)")


async def _train(actor: SingleActor, run: RunDirectory, resume_from: Path | None) -> RunSummary:
    await actor.prepare()
    _update_manifest(run, roles=actor.roles(), environment=actor.side.environment.provenance())
    async with actor.open() as parts:
        trainer = await actor.trainer(parts, with_warmup=resume_from is None)
        with _stop_on_signals(trainer):
            return await trainer.run(resume_from)


@contextlib.contextmanager
def _stop_on_signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and the first SIGINT ask for a stop in order; a second SIGINT interrupts."""
    loop = asyncio.get_running_loop()

    def stop(number: int) -> None:
        trainer.request_stop()
        if number == signal.SIGINT:
            loop.remove_signal_handler(signal.SIGINT)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


def _manifest(config: LoadedConfig) -> dict[str, Any]:
    recipe = config.config
    return {
        "name": recipe.name,
        "version": __version__,
        "objective": recipe.objective,
        "policy_label": recipe.policy_label,
        "config_digest": config.digest,
        "seed": recipe.seed,
        "warmup": recipe.student.warmup.model_dump(mode="json") if recipe.student.warmup else None,
        "roles": {},
        "environment": {},
        "created_s": time.time(),
        "status": "created",
    }


def _update_manifest(run: RunDirectory, **fields: Any) -> None:  # noqa: ANN401 - JSON values
    run.write_json(MANIFEST, run.read_json(MANIFEST) | fields)
