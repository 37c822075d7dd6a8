"""Where the targets of an objective over whole distributions come from; torch-free.

    written      sft: the tokens that stand there
    contexts     the teacher is in memory during the update: it gets the texts
    stored       the teacher is loaded for the trajectories that nobody has asked about, its top-k
                 rows go to the cache, and it is let go before the update

Which rows: those that the selection picks among the tokens which student and teacher both spell as
one token. Everything is a function of trajectory and config, so a replay finds the same rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from miniverl_dist.config.lab import SelectionConfig
from miniverl_dist.errors import (
    RecordError,
    StaleCacheError,
    TeacherError,
    UnspellableBytesError,
)
from miniverl_dist.lab.teacher_cache import content_key
from miniverl_dist.ports import TargetAnswer
from miniverl_dist.schemas.batch import BoolArray, IntArray
from miniverl_dist.schemas.targets import TeacherContext, TopKTargets, TrajectoryTargets
from miniverl_dist.schemas.teacher import RefusalReason, TeacherRefusal
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.selection import select

Candidates = Callable[[Trajectory], Sequence[bool]]
"""[T] tokens that the objective may train on."""


class TextView(Protocol):
    """A trajectory as the teacher reads it, and the tokens that both sides have as one."""

    @property
    def context_ids(self) -> IntArray:
        """[P] the teacher's ids."""

    @property
    def student_positions(self) -> IntArray:
        """[c] rising places in the trajectory."""

    @property
    def teacher_positions(self) -> IntArray:
        """[c] where the teacher has each of them."""


class AskedTeacher(Protocol):
    """A teacher that is loaded."""

    def top_k(self, context: TeacherContext) -> TopKTargets:
        """[m] rows of the context's positions."""


class TargetStore(Protocol):
    """Keeps rows under what they were made from."""

    def get(
        self, trajectory_id: str, content_key: str, policy_version: int
    ) -> TrajectoryTargets | None:
        """What was put there; None where nothing was. Raises ``StaleCacheError``."""

    def put(self, targets: TrajectoryTargets, content_key: str) -> None:
        """Keep them; they replace what was there."""

    def flush(self) -> None:
        """Write what was put."""

    def prune(self, *, keep_versions: int | None = None) -> object:
        """Forget the rows of all but the newest policy versions."""


Refused = Callable[[TeacherRefusal], None]
"""Told of a trajectory without targets, and why."""


@dataclass(frozen=True)
class TextLimit:
    """The longest text that a teacher reads."""

    num_tokens: int
    set_by: str = "teacher.max_prefill_tokens"


@dataclass(frozen=True)
class RowChoice:
    """Which tokens of a trajectory become rows."""

    selection: SelectionConfig
    seed: int
    candidates: Candidates

    def __str__(self) -> str:
        selection = self.selection
        ratio = f":{selection.ratio}" if selection.kind in ("uniform_ratio", "hybrid") else ""
        return f"{selection.kind}{ratio}:seed={self.seed}"

    def among(self, trajectory: Trajectory, positions: IntArray) -> BoolArray:
        """[c] which of these positions are rows."""
        return select(trajectory, positions, self.selection, self.seed)

    def trained(self, trajectory: Trajectory) -> IntArray:
        """All positions that the objective may train on."""
        return np.flatnonzero(np.asarray(self.candidates(trajectory), dtype=bool)).astype(np.int64)


class WrittenTargets:
    """Implements ``ports.TargetSource`` without a teacher."""

    def __init__(self, choice: RowChoice) -> None:
        self._choice = choice

    async def targets(self, trajectories: Sequence[Trajectory]) -> Mapping[str, TrajectoryTargets]:
        """See ``TargetSource``."""
        found = {}
        for trajectory in trajectories:
            trained = self._choice.trained(trajectory)
            if len(trained):
                rows = trained[self._choice.among(trajectory, trained)]
                found[trajectory.trajectory_id] = TrajectoryTargets(
                    trajectory.trajectory_id, trajectory.oldest_version, rows, len(trained)
                )
        return found


class TeacherTexts:
    """Implements ``ports.TargetSource`` for a teacher that stays in memory.

    Args:
        choice: Of rows.
        view: A trajectory in the teacher's ids.
        limit: Of the teacher's text.
        on_refused: Told of each trajectory that the teacher has refused.
    """

    def __init__(
        self,
        choice: RowChoice,
        view: Callable[[Trajectory], TextView],
        *,
        limit: TextLimit,
        on_refused: Refused = lambda refusal: None,
    ) -> None:
        self._choice, self._view = choice, view
        self._limit, self._on_refused = limit, on_refused

    async def targets(self, trajectories: Sequence[Trajectory]) -> Mapping[str, TargetAnswer]:
        """See ``TargetSource``."""
        answers = {each.trajectory_id: self.answer(each) for each in trajectories}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def answer(self, trajectory: Trajectory) -> TargetAnswer | None:
        """The rows of one trajectory, as a text; None where it has no token to train on."""
        trained = self._choice.trained(trajectory)
        if not len(trained):
            return None
        try:
            view = self._view(trajectory)
        except UnspellableBytesError as error:
            return self._refused(trajectory, RefusalReason.REJECTED, str(error))
        size, limit = len(view.context_ids), self._limit
        if size > limit.num_tokens:
            detail = f"{size} teacher tokens, the limit is {limit.num_tokens} ({limit.set_by})"
            return self._refused(trajectory, RefusalReason.TOO_LONG, detail)
        is_row = np.isin(view.student_positions, trained)
        is_row &= self._choice.among(trajectory, view.student_positions)
        return TrajectoryTargets(
            trajectory_id=trajectory.trajectory_id,
            policy_version=trajectory.oldest_version,
            positions=view.student_positions[is_row],
            num_candidates=len(trained),
            context=TeacherContext(view.context_ids, view.teacher_positions[is_row]),
        )

    def _refused(
        self, trajectory: Trajectory, reason: RefusalReason, detail: str
    ) -> TeacherRefusal:
        refusal = TeacherRefusal(
            trajectory_id=trajectory.trajectory_id, reason=reason, detail=detail
        )
        self._on_refused(refusal)
        return refusal


class StoredTeacher:
    """Implements ``ports.TargetSource``: asks once, keeps the answers, holds no teacher meanwhile.

    Args:
        texts: Rows and texts.
        load: Brings the teacher into memory for the length of a block.
        store: Of what was asked before.
        choice: The selection in words, for the store's keys.
        keep_versions: Policy versions whose rows are kept; None keeps all (stored episodes, whose
            rows are asked for again in every epoch).
    """

    def __init__(
        self,
        texts: TeacherTexts,
        load: Callable[[], AbstractContextManager[AskedTeacher]],
        store: TargetStore,
        choice: str,
        keep_versions: int | None = None,
    ) -> None:
        self._texts, self._load, self._store = texts, load, store
        self._choice, self._keep_versions = choice, keep_versions

    async def targets(self, trajectories: Sequence[Trajectory]) -> Mapping[str, TargetAnswer]:
        """See ``TargetSource``."""
        found: dict[str, TargetAnswer] = {}
        asked: dict[str, tuple[str, TrajectoryTargets]] = {}
        for trajectory in trajectories:
            rows = self._texts.answer(trajectory)
            if isinstance(rows, TeacherRefusal):
                found[rows.trajectory_id] = rows
            if not isinstance(rows, TrajectoryTargets) or rows.context is None:
                continue
            name = rows.trajectory_id
            key = content_key(trajectory.token_ids, rows.context.token_ids, self._choice)
            kept = self._kept(name, key, rows)
            if kept is None:
                asked[name] = key, rows
            else:
                found[name] = kept
        return found | (self._ask(asked) if asked else {})

    def _kept(self, name: str, key: str, rows: TrajectoryTargets) -> TrajectoryTargets | None:
        """What was asked before; never what was asked about another episode of the same name.

        A run that was killed plays some episodes again, under the names that they had.
        """
        try:
            kept = self._store.get(name, key, rows.policy_version)
        except StaleCacheError:
            return None
        return None if kept is None else _checked(kept, rows)

    def _ask(
        self, asked: Mapping[str, tuple[str, TrajectoryTargets]]
    ) -> dict[str, TrajectoryTargets]:
        found = {}
        with self._load() as teacher:
            for name, (key, rows) in asked.items():
                assert rows.context is not None, "only texts are asked about"
                answered = replace(rows, context=None, top_k=teacher.top_k(rows.context))
                self._store.put(answered, key)
                # As it will be read later: a replay must not differ by a rounding.
                kept = self._store.get(name, key, rows.policy_version)
                if kept is None:
                    raise TeacherError(f"the store has lost the targets of {name} at once")
                found[name] = kept
        self._store.flush()
        if self._keep_versions is not None:
            self._store.prune(keep_versions=self._keep_versions)
        return found


def _checked(kept: TrajectoryTargets, rows: TrajectoryTargets) -> TrajectoryTargets:
    if not np.array_equal(kept.positions, rows.positions):
        raise RecordError(
            f"stored targets of {rows.trajectory_id} are about {len(kept.positions)} other "
            f"positions than the {len(rows.positions)} that are asked for"
        )
    return kept
