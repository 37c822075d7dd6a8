"""Evaluations inside a run: who is measured when, and eval.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence

from pydantic import ValidationError

from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.errors import MiniverlError, RecordError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.run_dir import EVALUATION, RecordFile, RunDirectory
from miniverl_dist.ports import Assignment, RolloutSource
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.training.evaluate import EvaluationJob, episode_id, evaluate
from miniverl_dist.training.recorder import Recorder

DETERMINISTIC_POLICIES = frozenset({"null", "oracle"})
STUDENT = "student"
_DIGEST_CHARS = 16


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
        identity: str | None = None,
    ) -> None:
        """Wire the evaluation.

        Args:
            policies: Name -> maker of a source for that policy (made when it is first needed).
            places: Tasks and horizons, the same for every policy.
            config: When, how often, how many at once.
            report: What eval.json holds so far.
            recorder: Writes rows and trajectories.
            deadline_s: For one policy.
            identity: What decides how an episode goes beside its policy: the config's digest.
                None: an evaluation that was cut off begins anew.
        """
        self.policies = policies
        self._places, self._config = places, config
        self._report, self._recorder, self._deadline_s = report, recorder, deadline_s
        self._identity = identity

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
        *,
        weights: str | None = None,
    ) -> None:
        """Measure one policy and add its rows; nothing happens when they are there.

        Episodes of the same policy that have ended before are taken as they are: with the same
        config, horizon and weights they would go the same way again.

        Args:
            name: Of the policy.
            tag: Of the rows.
            policy_version: Of the student.
            event: Written for each row.
            weights: Checksum of the policy's weights, where it has any that may change. Without
                it the student starts anew: a run that is resumed trains those weights again, and
                not everywhere to the same bits.
        """
        if any(row.policy == name and row.tag == tag for row in self.rows):
            self._recorder.progress.message(f"{name} ({tag}) is measured already, not repeated")
            return
        source = await self.policies[name]()
        job = EvaluationJob(
            policy=name,
            tag=tag,
            policy_version=policy_version,
            source=source,
            tail_calls=self._config.tail_calls,
            episodes_per_task=(
                1 if name in DETERMINISTIC_POLICIES else self._config.episodes_per_task
            ),
            families=self._report.families,
        )
        digest = self._digest(job, weights)
        done = self._done(job, digest)
        self._recorder.progress.phase(f"evaluating {name} ({tag})")
        rows = await evaluate(
            job,
            self._places,
            self._config,
            deadline_s=self._deadline_s,
            on_trajectory=lambda t: self._recorder.evaluation_trajectory(tag, name, t, digest),
            done=done,
        )
        self._add(rows, event)

    def _add(self, rows: Sequence[EvaluationRow], event: Event) -> None:
        """Keep the rows of a policy and tell what they say."""
        written = self._recorder.run.positions([RecordFile.EVAL_TRAJECTORIES])
        self._report = self._report.model_copy(
            update={
                "rows": (*self.rows, *rows),
                "num_episode_bytes": written[RecordFile.EVAL_TRAJECTORIES],
            }
        )
        self._recorder.run.write_json(EVALUATION, self._report)
        for row in rows:
            # The outcomes by task are in eval.json.
            self._recorder.event(event, **row.model_dump(mode="json", exclude={"tasks"}))
            self._recorder.progress.message(
                f"{row.policy} ({row.tag}, T = {row.tail_calls}): pass {row.pass_rate:.3f} "
                f"[{row.pass_low:.3f}, {row.pass_high:.3f}], reward {row.reward_mean:.3f}, "
                f"{row.num_episodes} episodes"
            )

    def _digest(self, job: EvaluationJob, weights: str | None) -> str | None:
        """Names what decides how the episodes of a job go; None where they are not kept."""
        if self._identity is None or (job.policy == STUDENT and weights is None):
            return None
        parts = (
            self._identity,
            job.policy,
            job.tag,
            str(job.policy_version),
            str(job.tail_calls),
            weights or "",
        )
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:_DIGEST_CHARS]

    def _done(self, job: EvaluationJob, digest: str | None) -> dict[str, Trajectory]:
        """Episodes of this very job that have ended before, by id.

        Raises:
            RecordError: a line of theirs is damaged.
        """
        run = self._recorder.run
        if digest is None:
            # Episodes of a row that a crash cut off before it was written do not count.
            run.truncate({RecordFile.EVAL_TRAJECTORIES: self._report.num_episode_bytes})
            return {}
        run.trim(RecordFile.EVAL_TRAJECTORIES)
        found = [
            _trajectory(record["trajectory"])
            for record in run.iter_jsonl(RecordFile.EVAL_TRAJECTORIES)
            if record.get("job") == digest
        ]
        places = {
            episode_id(job, place, member): place
            for place in self._places
            for member in range(job.episodes_per_task)
        }
        done = {
            trajectory.trajectory_id: trajectory
            for trajectory in found
            if trajectory.trajectory_id in places
            and _is_at(trajectory, places[trajectory.trajectory_id])
        }
        if done:
            self._recorder.progress.message(
                f"{job.policy} ({job.tag}): {len(done)} of {len(places)} episodes have been played "
                "before"
            )
        return done


def _is_at(trajectory: Trajectory, place: Assignment) -> bool:
    """Whether a stored episode was played where this one would be."""
    return (trajectory.task_id, trajectory.prefix_calls, trajectory.tail_calls) == (
        place.task_id,
        place.prefix_calls,
        place.tail_calls,
    )


def _trajectory(value: object) -> Trajectory:
    try:
        return Trajectory.model_validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        raise RecordError(
            f"{RecordFile.EVAL_TRAJECTORIES} holds a damaged episode of this evaluation "
            f"({error.errors()[0]['msg']}): restore the file, or choose another --output"
        ) from None
