"""One run or evaluation in its directory, wherever it executes: parts, manifest, stop, report."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from actors.eval_jobs import EvaluationRequest, EvaluationRun
from actors.kept_demonstrations import DEMONSTRATIONS, keep_demonstrations
from actors.single import SingleActor
from actors.tracking import Tracking
from actors.warm_start import provenance
from miniverl_dist.config.load import LoadedConfig
from miniverl_dist.errors import MiniverlError
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.progress import Progress
from miniverl_dist.observability.run_dir import MANIFEST, RunDirectory
from miniverl_dist.observability.tracking.base import RunEnd
from miniverl_dist.schemas.evaluation import EvaluationReport
from miniverl_dist.training.loop import RunSummary, Trainer
from miniverl_dist.training.recorder import Recorder

ActorFactory = Callable[[LoadedConfig, Recorder], SingleActor]
"""Makes the object that builds a run's parts; another runtime gives another one."""


class Running:
    """A run on its way. It may be asked to stop at any time, before it trains too.

    Args:
        config: Of the run.
        run: Its directory, open for writing.
        progress: Told what happens.
        make_actor: Makes what builds the parts.
    """

    def __init__(
        self,
        config: LoadedConfig,
        run: RunDirectory,
        progress: Progress,
        make_actor: ActorFactory = SingleActor,
    ) -> None:
        self._config, self._run, self._progress = config, run, progress
        self._recorder = Recorder(run, progress, SystemClock())
        self._actor = make_actor(config, self._recorder)
        self._trainer: Trainer | None = None
        self._is_stopped = False

    def request_stop(self) -> None:
        """End in order; while parts are still being prepared, as soon as they are."""
        if not self._is_stopped:
            self._progress.message(
                "stop requested: the run ends in order after "
                + ("its step" if self._trainer is not None else "its parts have started")
            )
        self._is_stopped = True
        if self._trainer is not None:
            self._trainer.request_stop()

    async def train(self, resume_from: Path | None) -> RunSummary:
        """Run to the end, to a stop, or to an error; the manifest and the report say which."""
        update_manifest(self._run, status="running")
        tracking = Tracking(self._config, self._recorder)
        end: RunEnd = "failed"
        try:
            summary = await self._train(resume_from)
            end = "finished" if summary.is_finished else "stopped"
        except BaseException as error:
            update_manifest(self._run, status="failed")
            self._recorder.event(
                Event.RUN_FAILED, error=type(error).__name__, message=str(error)[:2000]
            )
            raise
        finally:
            await tracking.close(end)  # waits for trackers, at most for their deadlines
            self._progress.close()
        update_manifest(self._run, status=end)
        self._report()
        return summary

    async def _train(self, resume_from: Path | None) -> RunSummary:
        actor = self._actor
        async with actor.reserved():
            told = keep_demonstrations(self._config.config, self._run.path)
            update_manifest(self._run, **{DEMONSTRATIONS: told})
            await actor.prepare()
            update_manifest(
                self._run,
                roles=actor.roles(),
                environment=actor.side.environment.provenance(),
                warm_start=provenance(self._run.path),
            )
            async with actor.open() as parts:
                self._trainer = await actor.trainer(parts, with_warmup=resume_from is None)
                if self._is_stopped:
                    self._trainer.request_stop()
                return await self._trainer.run(resume_from)

    async def evaluate(self, request: EvaluationRequest) -> EvaluationReport:
        """Measure policies and add their rows to ``eval.json``."""
        return await EvaluationRun(self._config.config, self._run, self._actor, request).measure()

    def _report(self) -> None:
        """Write report.html and summary.md; a run is not lost for want of its report."""
        from miniverl_dist.reporting.report import write_report

        try:
            write_report(self._run.path)
        except MiniverlError as error:
            self._progress.message(f"no report: {error} (try `miniverl-dist report` later)")


def update_manifest(run: RunDirectory, **fields: Any) -> None:  # noqa: ANN401 - JSON values
    """Change fields of a run's manifest."""
    run.write_json(MANIFEST, run.read_json(MANIFEST) | fields)
