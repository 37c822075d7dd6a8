"""What ``sft`` and ``offline_kd`` learn from: scripted episodes, or those that a run has stored."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Container, Sequence
from pathlib import Path

from actors.kept_demonstrations import kept_file
from actors.student_side import (
    STUDENT_VOCABULARY_FILE,
    WRITE_CALLS,
    StudentSide,
    declare_vocabulary,
    has_declared_vocabulary,
    student_side,
)
from actors.warm_start import warm_vocabulary
from miniverl_dist.config.lab import DemonstrationConfig
from miniverl_dist.config.models import RunConfig
from miniverl_dist.errors import ConfigError, TokenizerMismatchError
from miniverl_dist.lab.demonstrations import ReadableIds, StoredEpisodes, read_episodes
from miniverl_dist.observability.clock import SystemClock
from miniverl_dist.ports import Clock
from miniverl_dist.schemas.seeds import derive_seed
from miniverl_dist.schemas.trajectory import Trajectory
from miniverl_dist.tokens.load import load_tokenizer
from miniverl_dist.tokens.sub_vocabulary import SubVocabulary
from miniverl_dist.tokens.tokenizer import TokenizerLike
from rollout_server.traces import TraceMaker

_NUM_NAMED = 5


def require_demonstrations(config: RunConfig) -> None:
    """Fail before a run directory is made when stored episodes cannot be what it learns from.

    Raises:
        See `stored_episodes`.
    """
    demonstrations = config.demonstrations
    if demonstrations is None or demonstrations.trajectories is None or config.acts_elsewhere:
        return
    # Waits for scripted episodes in this process, which wait for nothing.
    tokenizer = asyncio.run(_future_tokenizer(config))
    side = student_side(config, tokenizer)
    _stored(demonstrations, demonstrations.trajectories, tokenizer, side.train_ids)


def require_kept_demonstrations(config: RunConfig, run_dir: Path) -> None:
    """Fail before a run goes on when it would learn from other episodes than it was started with.

    Raises:
        ResumeError: the file has changed, or has gone.
    """
    demonstrations = config.demonstrations
    if demonstrations is not None and demonstrations.trajectories and not config.acts_elsewhere:
        kept_file(demonstrations.trajectories, run_dir)


async def stored_episodes(
    config: RunConfig,
    demonstrations: DemonstrationConfig,
    side: StudentSide,
    clock: Clock,
    run_dir: Path,
) -> StoredEpisodes:
    """Everything that the run will be trained on.

    Raises:
        ResumeError: not the file that the run was started with.
        ConfigError: a training task without an episode, or a file that cannot be used.
        RecordError, TokenizerMismatchError: see ``lab.demonstrations.read_episodes``.
    """
    path = demonstrations.trajectories
    if path is None:
        told = await _scripted(config, demonstrations, side, clock)
    else:
        found = kept_file(path, run_dir)
        told = _stored(demonstrations, found, side.tokenizer, side.train_ids)
    return StoredEpisodes(
        told, seed=derive_seed(config.seed, "demonstrations"), group_size=config.loop.group_size
    )


def _stored(
    demonstrations: DemonstrationConfig,
    path: Path,
    tokenizer: TokenizerLike,
    train_ids: Sequence[str],
) -> list[Trajectory]:
    """Episodes of a file, at least one for each training task."""
    only_passed = demonstrations.only_passed
    told = read_episodes(path, _readable(path, tokenizer), only_passed=only_passed)
    found = {trajectory.task_id for trajectory in told}
    if missing := [task_id for task_id in train_ids if task_id not in found]:
        named = ", ".join(missing[:_NUM_NAMED]) + (", …" if len(missing) > _NUM_NAMED else "")
        raise ConfigError(
            f"demonstrations.trajectories: {path.absolute()} holds no "
            f"{'passed ' * only_passed}episode of {len(missing)} of {len(train_ids)} training "
            f"tasks: {named}; leave them out of tasks.train"
            + (", or set only_passed to false" if only_passed else "")
        )
    return told


def _readable(path: Path, tokenizer: TokenizerLike) -> ReadableIds:
    """What the student can read of a file that may lie in the directory of a toy's run."""
    base: TokenizerLike = tokenizer
    ids: Container[int] = range(tokenizer.vocab_size)
    if isinstance(tokenizer, SubVocabulary):
        base, ids = tokenizer.base, frozenset(tokenizer.ids)
    same_base = {base.fingerprint}
    beside = path.with_name(STUDENT_VOCABULARY_FILE)
    if beside.is_file():
        # One that is declared over another tokenizer says nothing about our ids.
        with contextlib.suppress(TokenizerMismatchError):
            same_base.add(SubVocabulary.load(beside, base).fingerprint)
    return ReadableIds(tokenizer.name, tokenizer.fingerprint, ids, frozenset(same_base))


async def _future_tokenizer(config: RunConfig) -> TokenizerLike:
    """The student's tokenizer as the run will declare it."""
    if not has_declared_vocabulary(config):
        return load_tokenizer(config.student.tokenizer)
    if config.student.warm_start is not None:
        return warm_vocabulary(config, config.student.warm_start)
    return await declare_vocabulary(config, SystemClock())


async def _scripted(
    config: RunConfig, demonstrations: DemonstrationConfig, side: StudentSide, clock: Clock
) -> list[Trajectory]:
    maker = TraceMaker(
        side.stage, WRITE_CALLS, clock, seed=derive_seed(config.seed, "demonstrations")
    )
    traces = await maker.make(
        side.train_ids,
        max_tail_calls=demonstrations.max_tail_calls,
        per_task=demonstrations.traces_per_task,
        noisy_fraction=demonstrations.noisy_fraction,
    )
    return [
        trace.trajectory.model_copy(update={"trajectory_id": f"demo-{number:06d}"})
        for number, trace in enumerate(traces)
    ]
