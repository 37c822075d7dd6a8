"""The training loop. It knows ports only; this picture is the whole of it.

    prepare  baselines, warm-up, first commit (or: load the newest one, replay the journal)
    workers  consume: slots (freed by `release`)          produce: scored groups in FIFO places
             play `group_size` episodes, score each as it ends, put the group
    trainer  consumes: `num_groups` groups in FIFO order  produces: weights, commits, records
             take -> build batch (align, credit, advantage, pack) -> update -> publish
                  -> advance curriculum -> release slots -> commit and evaluate when due
    finish   commit, evaluate; a stop ends any of these in order

With ``loop.accumulate`` a group's gradients are computed while others of the batch are sampled
(`training.accumulate`).

Waits: the trainer for groups (`deadlines.take_s`), for the update and for every engine's
confirmation; workers for slots, engines and the teacher. Who frees whom: a publish frees slots, a
slot frees a worker, a put frees the trainer. With ``max_policy_lag = 0`` they take turns.

A batch is journalled before its update. After a crash the run goes on from the last commit and
trains on the journalled batches again, without sampling.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import CheckpointError, EmptyBatchError, StudentLostError
from miniverl_dist.observability.events import Event
from miniverl_dist.observability.run_dir import CHECKPOINTS
from miniverl_dist.observability.step_names import step_name
from miniverl_dist.ports import (
    Assignment,
    Clock,
    Curriculum,
    RolloutSource,
    ScoredGroup,
    StudentPool,
    TargetSource,
    TeacherScorer,
    WeightStore,
)
from miniverl_dist.schemas.batch import SftBatch, UpdateResult
from miniverl_dist.schemas.run_state import RunState
from miniverl_dist.training import checkpoint
from miniverl_dist.training.accumulate import StepUpdate, add_all, open_update
from miniverl_dist.training.alarms import alarms
from miniverl_dist.training.batch_builder import BuiltBatch, SpanByteEnds, build_batch
from miniverl_dist.training.buffer import BufferSizes, GroupBuffer
from miniverl_dist.training.evaluator import Evaluator
from miniverl_dist.training.journal import Journal, require_lags
from miniverl_dist.training.recorder import Recorder
from miniverl_dist.training.sft import run_sft
from miniverl_dist.training.workers import RolloutWorkers

Result = TypeVar("Result")


@dataclass(frozen=True)
class TrainerPorts:
    """The world, as the loop sees it."""

    students: StudentPool
    weights: WeightStore
    rollouts: RolloutSource
    teacher: TeacherScorer | None
    curriculum: Curriculum
    clock: Clock
    byte_ends: SpanByteEnds
    targets: TargetSource | None = None
    """Only where whole distributions are compared, or stored episodes learned."""


@dataclass(frozen=True)
class RunSummary:
    """How a run ended."""

    step: int
    policy_version: int
    is_finished: bool
    """False when it was asked to stop before its last step."""


class Trainer:
    """One run: prepare or resume, replay, train, finish."""

    def __init__(
        self,
        config: RunConfig,
        ports: TrainerPorts,
        evaluator: Evaluator,
        recorder: Recorder,
        *,
        config_digest: str,
        warmup: Iterator[SftBatch] | None = None,
    ) -> None:
        self._config, self._ports = config, ports
        self._evaluator, self._recorder = evaluator, recorder
        self._digest, self._warmup = config_digest, warmup
        self._journal = Journal(recorder.run.path / "journal", config_digest)
        self._buffer: GroupBuffer | None = None
        self._step = 0
        self._num_trained = 0
        """Batches that the student has been trained on: one more than steps during a publish."""
        self._next_ticket = 0
        self._num_publishes = 0
        self._num_empty = 0
        self._committed_step: int | None = None
        self._stop = asyncio.Event()

    def request_stop(self) -> None:
        """End in order: finish or abandon the step, commit, leave. Safe in a signal handler."""
        if not self._stop.is_set():
            self._recorder.event(Event.STOP_REQUESTED, step=self._step)
        self._stop.set()

    async def run(self, resume_from: Path | None = None) -> RunSummary:
        """Train to the last step, or until a stop is requested."""
        if resume_from is None:
            await self._unless_stopped(self._prepare())
        else:
            await self._restore(resume_from)
            await self._replay()
        if not self._is_done:
            await self._evaluate_if_due()
            await self._train()
        return await self._finish()

    async def _train(self) -> None:
        """Steps, with rollout workers beside them, until the last one or a stop."""
        self._buffer = buffer = self._open_buffer()
        workers = RolloutWorkers(
            buffer,
            self._ports.rollouts,
            self._ports.teacher if self._config.uses_teacher else None,
            self._config,
            self._recorder,
            self._ports.clock,
        )
        async with workers.running():
            while not self._is_done:
                started, update = self._ports.clock.now(), self._open_update(self._step)
                each = partial(self._receive, update) if self._config.loop.accumulate else None
                with self._recorder.timed("seconds_take"):
                    # Waits for the workers, or for a stop; bounded by the buffer's own deadline.
                    taking = buffer.take(self._config.loop.num_groups, each)
                    groups = await self._unless_stopped(taking)
                if groups is None:
                    await self._with_students(update.discard)
                else:
                    await self._train_on(groups, update, started=started)

    @property
    def _is_done(self) -> bool:
        return self._step >= self._config.loop.num_steps or self._stop.is_set()

    @property
    def _version(self) -> int:
        return self._ports.students.policy_version

    def _open_update(self, step: int) -> StepUpdate:
        return open_update(self._ports.students, self._config, self._ports.byte_ends, step)

    async def _receive(self, update: StepUpdate, place: int, group: ScoredGroup) -> None:
        """Give the student a group's gradients to compute; others are sampled meanwhile."""
        with self._recorder.timed("seconds_accumulate"):
            update.add(place, group)
            await self._with_students(update.advance)

    async def _train_on(
        self,
        groups: Sequence[ScoredGroup],
        update: StepUpdate,
        *,
        started: float,
        is_replay: bool = False,
    ) -> None:
        """One step, from scored groups to confirmed weights and a record.

        Args:
            groups: In FIFO order.
            update: Has been given these groups, if it asks for them one by one.
            started: When the step began to wait for them.
            is_replay: They come from the journal.
        """
        lags = [self._lag(group) for group in groups]
        if is_replay:
            require_lags(groups, lags, self._config.loop.max_policy_lag, self._step)
        built = await self._build(groups)
        self._next_ticket = groups[-1].assignment.ticket + 1
        if built.batch is None:
            self._skip_empty(built.metrics)
            return
        self._num_empty = 0
        if not is_replay:
            self._journal.write(self._step, self._version, update.computed_order(groups))
        with self._recorder.timed("seconds_update"):
            result = await self._with_students(partial(update.finish, built.batch))
            self._num_trained = self._step + 1
        with self._recorder.timed("seconds_publish"):
            await self._publish()
        self._ports.curriculum.advance(groups)
        self._step += 1
        self._recorder.tokens(self._step, built.analysis)
        self._record(groups, built.metrics, result, lags, self._ports.clock.now() - started)
        if self._buffer is not None:
            self._buffer.release(self._num_publishes, trained=True)
        if self._step % self._config.checkpoint.every_n_steps == 0:
            await self._commit()
        await self._evaluate_if_due()

    async def _build(self, groups: Sequence[ScoredGroup]) -> BuiltBatch:
        """The batch of these groups, with what they are compared with where that counts."""
        found = None
        if self._ports.targets is not None:
            members = [member.trajectory for group in groups for member in group.members]
            with self._recorder.timed("seconds_teacher"):
                # Waits for a teacher in this process; the source's own deadline bounds it.
                found = await self._ports.targets.targets(members)
        with self._recorder.timed("seconds_build"):
            return build_batch(groups, self._config, self._ports.byte_ends, found)

    async def _unless_stopped(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """The result of work that may be abandoned, or None when a stop comes first."""
        working = asyncio.ensure_future(work)
        stopping = asyncio.ensure_future(self._stop.wait())
        try:
            await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
            return working.result() if working.done() else None
        finally:
            working.cancel()
            stopping.cancel()
            await asyncio.wait({working, stopping})  # what was abandoned has let go of everything

    async def _evaluate_if_due(self) -> None:
        await self._unless_stopped(self._evaluator.student_if_due(self._step, self._version))

    def _lag(self, group: ScoredGroup) -> int:
        """Publishes since the group's oldest span; in a replay, since the group was started."""
        if self._buffer is not None:
            return self._buffer.lag(group)
        return self._num_publishes - group.num_publishes

    async def _with_students(self, work: Callable[[], Awaitable[Result]]) -> Result:
        """Do something with the student; when it is lost meanwhile, bring it back and do it again.

        How often that may happen is the pool's to say: its ``rebuild`` raises in the end.
        """
        is_lost = False
        while True:
            try:
                if is_lost:
                    await self._recover_students()
                return await work()
            except StudentLostError as error:
                if self._committed_step is None:
                    raise  # nothing to come back to; a new start does the warm-up again
                is_lost = True
                self._recorder.count("student_rebuilds")
                self._recorder.event(Event.STUDENT_LOST, step=self._step, reason=str(error))

    async def _recover_students(self) -> None:
        """Weights as they were before the loss: the last commit, and its journalled batches again.

        Nothing is sampled or recorded anew; engines keep the version they have.
        """
        students = self._ports.students
        await students.rebuild()
        folder = checkpoint.newest_checkpoint(self._recorder.run.path / CHECKPOINTS)
        if folder is None:
            raise CheckpointError("the run's checkpoints have been removed while it was running")
        state = checkpoint.verify(folder).state
        await students.load(folder, state.policy_version)
        for step in range(state.step, self._num_trained):
            update = self._open_update(step)
            groups = add_all(update, self._journal.read(step, students.policy_version) or [])
            batch = (await self._build(groups)).batch if groups else None
            if batch is None:
                raise CheckpointError(f"the journal has no batch of step {step} to train on again")
            await update.finish(batch)
        self._recorder.event(
            Event.STUDENT_REBUILT, checkpoint=folder.name, replayed=self._num_trained - state.step
        )

    async def _publish(self) -> None:
        """Bring the current weights to every engine; counts only when confirmed."""
        receipt = await self._with_students(lambda: self._ports.weights.publish(self._version))
        if self._buffer is not None:
            self._buffer.note_publish(receipt.policy_version)
        self._num_publishes += 1
        self._recorder.event(
            Event.WEIGHTS_PUBLISHED,
            policy_version=receipt.policy_version,
            checksum=receipt.checksum,
            engines=list(receipt.engines),
        )

    def _skip_empty(self, metrics: dict[str, float]) -> None:
        """A batch without one trainable token: replaced by the next, but not for ever."""
        self._num_empty += 1
        self._recorder.count("empty_batches")
        self._recorder.event(Event.BATCH_EMPTY, in_a_row=self._num_empty, **metrics)
        if self._num_empty >= self._config.loop.max_empty_batches:
            raise EmptyBatchError(
                f"{self._num_empty} batches in a row had nothing to train on "
                f"({metrics['num_harness_faults']:.0f} harness faults in the last one): see "
                "events.jsonl for their reasons"
            )
        if self._buffer is not None:
            self._buffer.release(self._num_publishes, trained=False)

    def _record(
        self,
        groups: Sequence[ScoredGroup],
        built: dict[str, float],
        result: UpdateResult,
        lags: Sequence[int],
        seconds: float,
    ) -> None:
        metrics: dict[str, float | int] = {}
        if self._config.is_online:  # a stored episode has no age, and a horizon of its own
            metrics |= self._ports.curriculum.summary()
            metrics |= {"policy_lag_mean": sum(lags) / len(lags), "policy_lag_max": max(lags)}
        metrics |= {
            **built,
            **result.metrics,
            "step": self._step,
            "policy_version": result.policy_version,
            "num_optimizer_steps": result.num_optimizer_steps,
            "num_groups_waiting": 0 if self._buffer is None else self._buffer.num_finished,
            "num_refilled_groups": sum(group.assignment.attempt for group in groups),
            "seconds_step": seconds,
        }
        self._recorder.groups(groups)
        self._recorder.step(metrics)
        self._recorder.event(Event.STEP_FINISHED, step=self._step, version=result.policy_version)
        self._recorder.check_mismatch(metrics, self._config.loss)
        self._recorder.chunk_halvings(self._step, result.chunk_halvings)
        for what in alarms(metrics):
            self._recorder.event(Event.ALARM, what=what, step=self._step)

    async def _prepare(self) -> None:
        """A fresh run: baselines, warm-up, first publish, first commit."""
        self._recorder.event(Event.RUN_STARTED, policy=self._config.policy_label)
        await self._publish()
        await self._evaluator.baselines()
        if self._warmup is not None and self._config.student.warmup is not None:
            self._recorder.progress.phase("warm-up (supervised, on scripted traces)")
            await run_sft(
                self._warmup,
                self._ports.students.sft_update,
                self._config.student.warmup.learning_rate,
                lambda step, metrics: self._recorder.event(Event.WARMUP_STEP, step=step, **metrics),
            )
        await self._ports.students.finish_warmup()
        if self._warmup is not None:
            await self._publish()
            self._recorder.event(Event.WARMUP_FINISHED)
            await self._evaluator.warm(self._version)
        await self._commit()

    async def _restore(self, folder: Path) -> None:
        """Take up a commit: weights, optimizer, curriculum, records."""
        state = checkpoint.verify(folder).state
        await self._ports.students.load(folder, state.policy_version)
        self._ports.curriculum.restore(state.curriculum)
        self._recorder.run.truncate(state.file_positions)
        self._recorder.counters.update(state.counters)
        self._step = self._num_trained = self._committed_step = state.step
        self._next_ticket, self._num_publishes = state.next_ticket, state.num_publishes
        self._recorder.event(Event.RESUMED, checkpoint=folder.name, step=state.step)
        await self._publish()
        self._num_publishes = state.num_publishes  # the same version again: no lag comes of it

    async def _replay(self) -> None:
        """Train again on batches that were journalled behind the last commit."""
        read = self._journal.read
        while not self._is_done and (groups := read(self._step, self._version)) is not None:
            update, started = self._open_update(self._step), self._ports.clock.now()
            groups = add_all(update, groups)
            await self._train_on(groups, update, started=started, is_replay=True)
            self._recorder.event(Event.REPLAYED_STEP, step=self._step)

    def _open_buffer(self) -> GroupBuffer:
        loop, grpo = self._config.loop, self._config.grpo
        self._recorder.progress.phase("training", total=loop.num_steps)
        return GroupBuffer(
            self._ports.curriculum,
            BufferSizes(
                loop.num_groups,
                loop.max_policy_lag,
                grpo.max_refills,
                self._config.deadlines.take_s,
            ),
            next_ticket=self._next_ticket,
            num_tickets=self._next_ticket + (loop.num_steps - self._step) * loop.num_groups,
            num_publishes=self._num_publishes,
            publish_of_version={self._version: self._num_publishes},
            on_drop=self._dropped,
        )

    def _dropped(self, assignment: Assignment, reason: str) -> None:
        self._recorder.count("refilled_groups")
        self._recorder.event(Event.GROUP_DROPPED, group_id=assignment.group_id, reason=reason)

    async def _commit(self) -> None:
        """Weights, optimizer and state under one manifest; then the journal may go."""
        folder = self._recorder.run.path / CHECKPOINTS
        state = RunState(
            step=self._step,
            policy_version=self._version,
            num_publishes=self._num_publishes,
            next_ticket=self._next_ticket,
            curriculum=self._ports.curriculum.state(),
            counters=dict(self._recorder.counters),
            file_positions=self._recorder.positions(),
            config_digest=self._digest,
            seed=self._config.seed,
            warmup_done=True,
        )
        with self._recorder.timed("seconds_commit"):
            await self._with_students(
                lambda: checkpoint.commit(
                    folder, step_name(self._step), state, self._ports.students.save
                )
            )
        self._committed_step = self._step
        self._journal.clear(before_step=self._step)
        for name in checkpoint.prune(folder, self._config.checkpoint.keep):
            self._recorder.event(Event.CHECKPOINT_REMOVED, name=name)
        self._recorder.event(Event.CHECKPOINT_COMMITTED, step=self._step)

    async def _finish(self) -> RunSummary:
        """Commit what is not, evaluate a finished run, say how it ended.

        A run that was stopped before its first commit leaves none: resuming it begins anew.
        """
        is_finished = self._step >= self._config.loop.num_steps
        if self._committed_step not in (None, self._step):
            await self._commit()
        if is_finished:
            await self._unless_stopped(self._evaluator.after(self._version))
        event = Event.RUN_FINISHED if is_finished else Event.STOPPED
        self._recorder.event(event, step=self._step, policy_version=self._version)
        return RunSummary(self._step, self._version, is_finished)
