"""Evaluations inside a run: who is measured when, and eval.json."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from pydantic import ValidationError

from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.errors import MiniverlError, RecordError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.run_dir import EVALUATION, RecordFile, RunDirectory
from miniverl_dist.ports import Assignment, RolloutSource
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from miniverl_dist.training.evaluate import EvaluationJob, evaluate
from miniverl_dist.training.recorder import Recorder

DETERMINISTIC_POLICIES = frozenset({"null", "oracle"})


def read_evaluation(run: RunDirectory) -> EvaluationReport | None:
    """What eval.json holds; None before the first evaluation.

    Raises:
        RecordError: it is damaged.
    """
    if not (run.path / EVALUATION).exists():
        return None
    try:
        return EvaluationReport.model_validate_json(run.read_bytes(EVALUATION))
    except ValidationError as error:
        raise RecordError(
            f"{EVALUATION} is damaged ({error.errors()[0]['msg']}): restore it, or remove it to "
            "measure again what comes"
        ) from None


class Evaluator:
    """Keeps eval.json: one row per policy and tag, each measured once."""

    def __init__(
        self,
        policies: Mapping[str, Callable[[], Awaitable[RolloutSource]]],
        places: Sequence[Assignment],
        config: EvaluationConfig,
        report: EvaluationReport,
        recorder: Recorder,
        *,
        deadline_s: float,
    ) -> None:
        """Wire the evaluation.

        Args:
            policies: Name -> maker of a source for that policy (made when it is first needed).
            places: Tasks and horizons, the same for every policy.
            config: When, how often, how many at once.
            report: What eval.json holds so far.
            recorder: Writes rows and trajectories.
            deadline_s: For one policy.
        """
        self.policies = policies
        self._places, self._config = places, config
        self._report, self._recorder, self._deadline_s = report, recorder, deadline_s

    @property
    def rows(self) -> tuple[EvaluationRow, ...]:
        """Rows so far."""
        return self._report.rows

    async def baselines(self) -> None:
        """Measure the other policies and the untrained student; a failure is logged only."""
        names = [*self._config.baselines, *(["student"] if self._config.before else [])]
        for name in names:
            try:
                await self.measure(name, "before", 0, Event.BASELINE_EVALUATED)
            except MiniverlError as error:
                self._recorder.event(Event.BASELINE_FAILED, policy=name, error=str(error))
                self._recorder.progress.message(f"baseline {name} failed: {error}")

    async def student(self, tag: str, policy_version: int) -> None:
        """Measure the student now, unless that was done before; a failure is logged only."""
        try:
            await self.measure("student", tag, policy_version)
        except MiniverlError as error:
            self._recorder.event(Event.EVALUATION_FAILED, tag=tag, error=str(error))
            self._recorder.progress.message(f"evaluation {tag} failed: {error}")

    async def student_if_due(self, step: int, policy_version: int) -> None:
        """Measure the student when ``every_n_steps`` says so."""
        every = self._config.every_n_steps
        if every is not None and step and step % every == 0:
            await self.student(f"step-{step:06d}", policy_version)

    async def after(self, policy_version: int) -> None:
        """Measure the trained student."""
        if self._config.after:
            await self.student("after", policy_version)

    async def measure(
        self,
        name: str,
        tag: str,
        policy_version: int,
        event: Event = Event.EVALUATION_FINISHED,
    ) -> None:
        """Measure one policy and add its row; nothing happens when that row is there."""
        if any(row.policy == name and row.tag == tag for row in self.rows):
            self._recorder.progress.message(f"{name} ({tag}) is measured already, not repeated")
            return
        # Episodes of a row that a crash cut off before it was written do not count.
        self._recorder.run.truncate({RecordFile.EVAL_TRAJECTORIES: self._report.num_episode_bytes})
        job = EvaluationJob(
            policy=name,
            tag=tag,
            policy_version=policy_version,
            source=await self.policies[name](),
            tail_calls=self._config.tail_calls,
            episodes_per_task=(
                1 if name in DETERMINISTIC_POLICIES else self._config.episodes_per_task
            ),
        )
        self._recorder.progress.phase(f"evaluating {name} ({tag})")
        row = await evaluate(
            job,
            self._places,
            self._config,
            deadline_s=self._deadline_s,
            on_trajectory=lambda t: self._recorder.evaluation_trajectory(tag, name, t),
        )
        written = self._recorder.run.positions([RecordFile.EVAL_TRAJECTORIES])
        self._report = self._report.model_copy(
            update={
                "rows": (*self.rows, row),
                "num_episode_bytes": written[RecordFile.EVAL_TRAJECTORIES],
            }
        )
        self._recorder.run.write_json(EVALUATION, self._report)
        self._recorder.event(event, **row.model_dump(mode="json"))
        self._recorder.progress.message(
            f"{name} ({tag}): pass {row.pass_rate:.3f} [{row.pass_low:.3f}, {row.pass_high:.3f}], "
            f"reward {row.reward_mean:.3f}, {row.num_episodes} episodes"
        )
