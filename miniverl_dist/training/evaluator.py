"""Evaluations inside a run: who is measured when, and eval.json."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import ValidationError

from miniverl_dist.config.problems import explain_in_line
from miniverl_dist.config.recipe import EvaluationConfig
from miniverl_dist.errors import MiniverlError, RecordError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.run_dir import EVALUATION, RecordFile, RunDirectory
from miniverl_dist.observability.step_names import step_name
from miniverl_dist.ports import Assignment, RolloutSource
from miniverl_dist.schemas.evaluation import EvaluationReport, EvaluationRow
from miniverl_dist.schemas.trajectory import HARNESS_TERMINATIONS, Trajectory
from miniverl_dist.training.eval_stats import STUDENT
from miniverl_dist.training.evaluate import EvaluationJob, episode_id, evaluate
from miniverl_dist.training.recorder import Recorder

DETERMINISTIC_POLICIES: Final = frozenset({"null", "oracle"})
_DIGEST_CHARS: Final = 16
_SHOWN_CHARS: Final = 8
_MAX_REASON_CHARS: Final = 160

SourceMaker = Callable[[], Awaitable[RolloutSource]]


@dataclass(frozen=True)
class Player:
    """Who plays a policy that the run itself does not have."""

    make: SourceMaker
    settings: Mapping[str, str] = field(default_factory=dict)
    """Everything that decides how it plays, beside weights and recipe; nothing secret."""


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
            f"{EVALUATION} is damaged ({explain_in_line(error, EvaluationReport)}): restore it, or "
            "remove it to measure again what comes"
        ) from None


class Evaluator:
    """Keeps eval.json: one row per policy and tag, each measured once."""

    def __init__(
        self,
        policies: Mapping[str, SourceMaker],
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
            await self.student(step_name(step), policy_version)

    async def warm(self, policy_version: int) -> None:
        """Measure the student behind its warm-up."""
        if self._config.warm:
            await self.student("warm", policy_version)

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
        player: Player | None = None,
    ) -> None:
        """Measure one policy and add its rows; nothing happens when they are there.

        Episodes of the same policy that have ended with a verdict are taken as they are: with the
        same config, horizon, weights and settings they would go the same way again. Those that the
        harness lost are played again, and the rows they are missing in are replaced.

        Args:
            name: Of the policy.
            tag: Of the rows.
            policy_version: Of the student.
            event: Written for each row.
            weights: Checksum of the policy's weights, where it has any that may change. Without
                it the student starts anew: a run that is resumed trains those weights again, and
                not everywhere to the same bits.
            player: Plays instead of the run's own policy of that name.
        """
        settings = {} if player is None else player.settings
        digest = self._digest(name, tag, policy_version, weights, settings)
        old = self._rows_of(name, tag, digest, is_foreign=player is not None)
        if old and not _can_be_completed(old, digest):
            self._recorder.progress.message(_already(name, tag, old))
            return
        source = await (self.policies[name] if player is None else player.make)()
        shown, shown_tag = (
            (old[0].policy, old[0].tag) if old else self._free_name(name, tag, digest)
        )
        is_fixed = name in DETERMINISTIC_POLICIES
        num_episodes = 1 if is_fixed else self._config.episodes_per_task
        job = EvaluationJob(
            policy=shown,
            tag=shown_tag,
            policy_version=policy_version,
            source=source,
            tail_calls=self._config.tail_calls,
            episodes_per_task=num_episodes,
            families=self._report.families,
            digest=digest,
            settings={
                "episodes_per_task": str(num_episodes),
                **({} if is_fixed else {"temperature": repr(self._config.temperature)}),
                **settings,
            },
        )
        await self._play(job, old, event)

    async def _play(self, job: EvaluationJob, old: Sequence[EvaluationRow], event: Event) -> None:
        """Play what is missing of a job, and keep its rows."""
        done = self._done(job)
        reasons: Counter[str] = Counter()

        def ended(trajectory: Trajectory) -> None:
            self._recorder.evaluation_trajectory(job.tag, job.policy, trajectory, job.digest)
            if trajectory.termination in HARNESS_TERMINATIONS:
                reasons[_reason(trajectory)] += 1

        self._recorder.progress.phase(f"evaluating {job.policy} ({job.tag})")
        rows = await evaluate(
            job,
            self._places,
            self._config,
            deadline_s=self._deadline_s,
            on_trajectory=ended,
            done=done,
        )
        if old and _num_faults(rows) >= _num_faults(old):
            self._recorder.progress.message(
                f"{job.policy} ({job.tag}): played again, and no fewer episodes are lost "
                f"({_most_frequent(reasons)}); the rows stay as they were"
            )
            return
        self._keep(rows, old, event, _most_frequent(reasons))

    def _keep(
        self, rows: Sequence[EvaluationRow], old: Sequence[EvaluationRow], event: Event, why: str
    ) -> None:
        """Write the rows of a policy, in the place of ``old``, and tell what they say."""
        written = self._recorder.run.positions([RecordFile.EVAL_TRAJECTORIES])
        at = self.rows.index(old[0]) if old else len(self.rows)
        before, after = (
            tuple(row for row in side if row not in old)
            for side in (self.rows[:at], self.rows[at:])
        )
        self._report = self._report.model_copy(
            update={
                "rows": (*before, *rows, *after),
                "num_episode_bytes": written[RecordFile.EVAL_TRAJECTORIES],
            }
        )
        self._recorder.run.write_json(EVALUATION, self._report)
        for row in rows:
            # The outcomes by task are in eval.json.
            self._recorder.event(event, **row.model_dump(mode="json", exclude={"tasks"}))
            self._recorder.progress.message(_result(row, why))

    def _digest(
        self,
        name: str,
        tag: str,
        policy_version: int,
        weights: str | None,
        settings: Mapping[str, str],
    ) -> str | None:
        """Names what decides how the episodes of a job go; None where they are not kept."""
        if self._identity is None or (name == STUDENT and weights is None):
            return None
        parts = (
            self._identity,
            name,
            # What has neither weights nor chance plays as before, whenever it is asked.
            "" if name in DETERMINISTIC_POLICIES else tag,
            str(policy_version) if name == STUDENT else "",
            str(self._config.tail_calls),
            weights or "",
            json.dumps(dict(settings), sort_keys=True),
        )
        return hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:_DIGEST_CHARS]

    def _rows_of(
        self, name: str, tag: str, digest: str | None, *, is_foreign: bool
    ) -> list[EvaluationRow]:
        """Rows of this very job, whatever they are called.

        Without a digest on either side the name decides; not for a foreign policy, of which it
        tells too little.
        """
        return [
            row
            for row in self.rows
            if (digest is not None and row.job == digest)
            or (
                not is_foreign
                and (row.policy, row.tag) == (name, tag)
                and (digest is None or not row.job)
            )
        ]

    def _free_name(self, name: str, tag: str, digest: str | None) -> tuple[str, str]:
        """Policy and tag of new rows: with the digest where another job has taken the plain ones.

        A student's stands behind the tag: under its policy it would be another student.
        """
        if digest is None or all((row.policy, row.tag) != (name, tag) for row in self.rows):
            return name, tag
        short = digest[:_SHOWN_CHARS]
        return (name, f"{tag}@{short}") if name == STUDENT else (f"{name}@{short}", tag)

    def _done(self, job: EvaluationJob) -> dict[str, Trajectory]:
        """Episodes of this very job that have ended with a verdict before, by id.

        Raises:
            RecordError: a line of theirs is damaged.
        """
        run = self._recorder.run
        if job.digest is None:
            # Episodes of a row that a crash cut off before it was written do not count.
            run.truncate({RecordFile.EVAL_TRAJECTORIES: self._report.num_episode_bytes})
            return {}
        run.trim(RecordFile.EVAL_TRAJECTORIES)
        places = {
            (place.group_id, str(member)): (place, episode_id(job, place, member))
            for place in self._places
            for member in range(job.episodes_per_task)
        }
        done: dict[str, Trajectory] = {}
        for record in run.iter_jsonl(RecordFile.EVAL_TRAJECTORIES):
            if record.get("job") != job.digest:
                continue
            trajectory = _trajectory(record["trajectory"])
            # Rows may have got another name since, so neither policy nor tag is looked at.
            member = trajectory.trajectory_id.rpartition(".")[2]
            place, name = places.get((trajectory.group_id, member), (None, ""))
            is_lost = trajectory.termination in HARNESS_TERMINATIONS
            if place is not None and _is_at(trajectory, place) and not is_lost:
                done.setdefault(name, trajectory.model_copy(update={"trajectory_id": name}))
        if done:
            self._recorder.progress.message(
                f"{job.policy} ({job.tag}): {len(done)} of {len(places)} episodes have been played "
                "before"
            )
        return done


def _num_faults(rows: Sequence[EvaluationRow]) -> int:
    return sum(row.num_faults for row in rows)


def _can_be_completed(rows: Sequence[EvaluationRow], digest: str | None) -> bool:
    """Whether episodes are missing in rows of a job that keeps its episodes."""
    return digest is not None and all(row.job == digest for row in rows) and _num_faults(rows) > 0


def _already(name: str, tag: str, rows: Sequence[EvaluationRow]) -> str:
    known = (rows[0].policy, rows[0].tag)
    alias = "" if known == (name, tag) else f", as {known[0]} ({known[1]})"
    text = f"{name} ({tag}) is measured already{alias}, not repeated"
    if lost := max(row.num_faults for row in rows):
        text += f"; its {lost} faults stay: which episodes they were in was not kept for this"
    return text


def _result(row: EvaluationRow, why: str) -> str:
    """``student (after, T = 1): pass 0.500 [0.100, 0.900], reward 0.250, 2 episodes``."""
    found = "-"
    if row.pass_rate is not None:
        found = (
            f"pass {row.pass_rate:.3f} [{row.pass_low:.3f}, {row.pass_high:.3f}], "
            f"reward {row.reward_mean:.3f}, {row.num_episodes} episodes"
        )
    if row.num_faults:
        found += f" ({row.num_faults} {'fault' if row.num_faults == 1 else 'faults'}: {why})"
    return f"{row.policy} ({row.tag}, T = {row.tail_calls}): {found}"


def _reason(trajectory: Trajectory) -> str:
    said = " ".join(str(trajectory.notes.get("error", "")).split())[:_MAX_REASON_CHARS]
    return f"{trajectory.termination.value}: {said}" if said else trajectory.termination.value


def _most_frequent(reasons: Counter[str]) -> str:
    if not reasons:
        return "no reason recorded"
    first = min(reasons, key=lambda text: (-reasons[text], text))
    return first if len(reasons) == 1 else f"mostly {first}"


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
