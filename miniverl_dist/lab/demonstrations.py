"""Stored episodes as a source of trajectories: what ``sft`` and ``offline_kd`` learn from.

The loop asks for an episode of a task as it would ask an engine. Which one it gets depends on the
place in the FIFO alone, so a resumed run goes on with the same ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from miniverl_dist.config.problems import explain_in_line
from miniverl_dist.errors import ConfigError, RecordError, TokenizerMismatchError
from miniverl_dist.ports import Assignment, ScoredTrajectory
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import HARNESS_TERMINATIONS, Trajectory

_DECLARED = "is declared from a run's tasks, student.warmup, evaluation.tail_calls and chat format"


class StoredEpisodes:
    """Implements ``ports.RolloutSource`` over trajectories that exist already.

    Args:
        trajectories: At least one for each task that is asked for.
        seed: Of the order within a task.
        group_size: Episodes asked for at each place.
    """

    def __init__(self, trajectories: Iterable[Trajectory], *, seed: int, group_size: int) -> None:
        self._by_task: defaultdict[str, list[Trajectory]] = defaultdict(list)
        for trajectory in trajectories:
            self._by_task[trajectory.task_id].append(as_demonstration(trajectory))
        self._seed, self._group_size = seed, group_size

    @property
    def task_ids(self) -> tuple[str, ...]:
        """Tasks with at least one episode, in the order of their first."""
        return tuple(self._by_task)

    async def rollout(self, assignment: Assignment, member: int) -> Trajectory:
        """See ``RolloutSource``: the next episode of the task in its seeded order.

        Raises:
            ConfigError: there is none of this task.
        """
        told = self._by_task.get(assignment.task_id)
        if not told:
            raise ConfigError(
                f"demonstrations hold no episode of task {assignment.task_id!r}; leave it out of "
                "tasks.train"
            )
        index = assignment.ticket * self._group_size + member
        epoch, place = divmod(index, len(told))
        order = sorted(
            told, key=lambda one: derive_seed(self._seed, "demo", epoch, one.trajectory_id)
        )
        return order[place].model_copy(update={"group_id": assignment.group_id})


def as_demonstration(trajectory: Trajectory) -> Trajectory:
    """The episode as a text that somebody wrote: nothing in it was sampled by this student."""
    spans = tuple(
        span.model_copy(update={"sampled": False, "weight_versions": ()})
        for span in trajectory.spans
    )
    size = len(trajectory.token_ids)
    return trajectory.model_copy(
        update={
            "spans": spans,
            "loss_mask": (False,) * size,
            "rollout_logprobs": np.full(size, np.nan),
            "routed_experts": None,
        }
    )


@dataclass(frozen=True)
class ReadableIds:
    """Which stored token ids a student can learn from as they are."""

    name: str
    """Of the student's tokenizer."""
    fingerprint: str
    ids: Container[int]
    """All that it has."""
    same_base: frozenset[str]
    """Fingerprints of vocabularies whose ids mean what the student's mean, where both have them."""


def read_episodes(path: Path, readable: ReadableIds, *, only_passed: bool) -> list[Trajectory]:
    """Episodes of a run's ``trajectories.jsonl``, under ids that are unique.

    Args:
        path: The file; each line is a trajectory, or one with its teacher score.
        readable: By the student that will learn them.
        only_passed: Leave out what the verifier did not pass.

    Raises:
        ConfigError: no such file, or nothing in it that can be learned from.
        RecordError: a line that is no trajectory, with its number.
        TokenizerMismatchError: token ids that the student does not have.
    """
    kept: list[Trajectory] = []
    for number, trajectory in _lines(path):
        told = _readable_by(readable, trajectory, f"{path.absolute()} line {number}")
        is_learned = told.passed or not only_passed
        if told.termination in HARNESS_TERMINATIONS or not is_learned:
            continue
        name = f"{told.trajectory_id}@{number}"  # ids are unique within their run's step
        kept.append(told.model_copy(update={"trajectory_id": name}))
    if not kept:
        raise ConfigError(
            f"demonstrations.trajectories: {path.absolute()} holds no episode to learn from"
            + (" (only_passed leaves out what did not pass)" if only_passed else "")
        )
    return kept


def _readable_by(readable: ReadableIds, trajectory: Trajectory, where: str) -> Trajectory:
    """The episode under the student's own fingerprint."""
    found = trajectory.tokenizer_fingerprint
    if found == readable.fingerprint:
        return trajectory
    if found not in readable.same_base:
        raise TokenizerMismatchError(
            f"{where}: token ids of vocabulary {found[:12]}, the student reads {readable.name} "
            f"({readable.fingerprint[:12]}). Either that run had another student.tokenizer, or a "
            f"toy's vocabulary, which {_DECLARED}: then leave the run's student-vocabulary.json "
            "beside the file, so that its ids can be compared, or give both runs the same settings"
        )
    foreign = sorted({i for i in trajectory.token_ids if i not in readable.ids})
    if foreign:
        raise TokenizerMismatchError(
            f"{where}: token ids {foreign[:5]} ({len(foreign)} in all) are not in the student's "
            f"vocabulary {readable.name}, which {_DECLARED}: give this run the same as the one "
            "that stored the episodes"
        )
    return trajectory.model_copy(update={"tokenizer_fingerprint": readable.fingerprint})


def _lines(path: Path) -> Iterator[tuple[int, Trajectory]]:
    """Binary lines end at a line feed alone; a text's lines also at separators within a JSON."""
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield number, _trajectory(line, f"{path.absolute()} line {number}")
    except OSError as error:
        raise ConfigError(
            f"demonstrations.trajectories: cannot read {path.absolute()}: {error.strerror or error}"
        ) from None


def _trajectory(line: bytes, where: str) -> Trajectory:
    try:
        return ScoredTrajectory.model_validate_json(line).trajectory
    except ValidationError as error:
        raise RecordError(f"{where}: {explain_in_line(error, ScoredTrajectory)}") from None
