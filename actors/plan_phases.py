"""The phases of a step, in the order of the loop, with what each asks for at most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from actors.memory_estimate import size_text
from actors.placement import Role, placement_plan
from miniverl_dist.config.lab import DistillConfig
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.roles import BackboneTeacherConfig, TeacherConfig, ToyModelConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.lab.memory import Strategy, settled_strategy
from rollout_server.episode import TRAINING_BUDGET


@dataclass(frozen=True)
class Phase:
    """One phase of a step, in order."""

    name: str
    where: str
    what: str
    max_tokens: int | None = None


@dataclass(frozen=True)
class StudentCounts:
    """What a student's layout on its ranks decides."""

    num_microbatches: int
    """Of one optimizer step and one replica."""
    data_parallel: int
    publish_bytes: int
    num_buckets: int
    commit_bytes: int


def phases(
    config: RunConfig, tasks: Sequence[TaskInfo] | None, student: StudentCounts | None
) -> Iterator[Phase]:
    """All phases of a step, in order.

    Args:
        config: Of the run.
        tasks: To train on, where they could be read.
        student: Where its layout is known.
    """
    episodes = config.loop.num_groups * config.loop.group_size
    length = min(config.rollout.max_context_tokens, config.student.model.max_context_tokens)
    turns = most_turns(config, tasks)
    tokens = episodes * length
    if config.is_online:
        yield _rollout(config, turns, tokens)
    else:
        yield _episodes(config, tokens)
    if config.uses_teacher and config.teacher is not None:
        yield _scoring(config, config.teacher, episodes)
    if config.uses_targets and config.distill is not None and config.teacher is not None:
        written = min(length, turns * config.rollout.max_new_tokens) if config.is_online else length
        yield _targets(config, config.distill, config.teacher, episodes, written)
    steps = "align, credit, advantage, pack" if config.is_online else "choose rows, pack"
    yield Phase("batch", "driver", steps)
    yield from _update_phases(config, student, tokens)
    yield from _after_update(config, student)


def most_turns(config: RunConfig, tasks: Sequence[TaskInfo] | None) -> int:
    """Turns that the longest episode may take: its calls bound it, and ``rollout.max_turns``."""
    limit, largest = config.rollout.max_turns, config.curriculum.max_tail_calls
    if tasks is None:
        return limit if largest is None else TRAINING_BUDGET.turns(largest, limit)
    return max(
        TRAINING_BUDGET.turns(min(task.num_calls, largest or task.num_calls), limit)
        + task.extra_turns
        for task in tasks
    )


def _rollout(config: RunConfig, turns: int, tokens: int) -> Phase:
    loop, rollout = config.loop, config.rollout
    what = f"{loop.num_groups} groups x {loop.group_size} episodes, at most {turns} turns x "
    return Phase(
        "rollout",
        _where(config, Role.ROLLOUT),
        f"{what}{rollout.max_new_tokens} new tokens",
        tokens,
    )


def _episodes(config: RunConfig, tokens: int) -> Phase:
    """Nobody samples them."""
    told = config.demonstrations
    whose = "the oracle's" if told is None or told.trajectories is None else "stored ones"
    what = f"{config.loop.num_groups} x {config.loop.group_size} episodes, {whose}"
    return Phase("episodes", "driver", what, tokens)


def _scoring(config: RunConfig, teacher: TeacherConfig, episodes: int) -> Phase:
    longest = _longest_text(teacher)
    what = f"{episodes} texts as they finish"
    if teacher.url is not None:
        at_once = max(1, teacher.max_inflight_tokens // longest) * len(teacher.all_urls)
        what += (
            f", at most {at_once} at once at the longest that is sent, {longest:,} teacher tokens"
        )
    return Phase("score", _where(config, Role.TEACHER), what, episodes * longest)


def _longest_text(teacher: TeacherConfig) -> int:
    """In the teacher's tokens, which are not the student's."""
    longest = teacher.max_prefill_tokens
    if isinstance(teacher.model, ToyModelConfig):
        longest = min(longest, teacher.model.max_context_tokens)
    return longest


def _targets(
    config: RunConfig, distill: DistillConfig, teacher: TeacherConfig, episodes: int, written: int
) -> Phase:
    """Whole distributions, which a teacher in memory gives during the update."""
    rows = episodes * written
    strategy = settled_strategy(
        config.memory,
        distill,
        is_online=config.is_online,
        is_shared=isinstance(teacher.model, BackboneTeacherConfig),
    )
    what = {"resident": _RESIDENT, "swap": _swapped(rows, distill.top_k)}
    text = f"memory.strategy {_by(strategy)}: " + (
        f"{what['resident']}; else {what['swap']}" if strategy is None else what[strategy]
    )
    where = "this process" if config.runtime == "inprocess" else "the one actor"
    return Phase("targets", where, text, episodes * _longest_text(teacher))


_RESIDENT = (
    "the teacher stays in memory beside the student, its distributions are computed in chunks "
    "during the update"
)


def _swapped(rows: int, k: int) -> str:
    return (
        f"the teacher is loaded, asked for its {k} likeliest tokens at no more than {rows:,} rows, "
        f"and let go; {size_text(rows * cached_row_bytes(k))} of teacher cache at most"
    )


def cached_row_bytes(k: int) -> int:
    """One row of the teacher cache: k ids and logprobs, tail, entropy, position; 4 bytes each."""
    return 4 * (2 * k + 3)


def _by(strategy: Strategy | None) -> str:
    return "auto, if both fit" if strategy is None else strategy


def _update_phases(
    config: RunConfig, student: StudentCounts | None, tokens: int
) -> Iterator[Phase]:
    where, steps = _where(config, Role.STUDENT), config.loop.num_minibatches
    if config.is_online:
        yield Phase("proximal logprobs", where, "one pass without gradient", tokens)
    if config.loss.kl_coef:
        yield Phase("reference logprobs", where, "one pass under the frozen weights", tokens)
    what = f"{steps} optimizer step(s)"
    if student is not None:
        what += (
            f", at most {student.num_microbatches} microbatches on each of "
            f"{student.data_parallel} replicas"
        )
    yield Phase("update", where, what, tokens)


def _after_update(config: RunConfig, student: StudentCounts | None) -> Iterator[Phase]:
    what = "to the engines of this process"
    if student is not None:
        what = f"{size_text(student.publish_bytes)} in {student.num_buckets} bucket(s)"
    yield Phase("publish", _where(config, Role.ROLLOUT), what)
    every = config.checkpoint.every_n_steps
    what = f"weights, optimizer, state; every {every} step(s)"
    if student is not None:
        what = f"about {size_text(student.commit_bytes)} of {what}"
    yield Phase("commit", _where(config, Role.STUDENT), what)
    if config.evaluation.every_n_steps is not None:
        what = f"{config.evaluation.episodes_per_task} episodes a task"
        what += f", every {config.evaluation.every_n_steps} steps"
        yield Phase("evaluate", _where(config, Role.ROLLOUT), what)


def _where(config: RunConfig, role: Role) -> str:
    if role is Role.TEACHER and config.teacher is not None and config.teacher.url is not None:
        return ", ".join(config.teacher.all_urls)
    if config.runtime != "cluster":
        return "this process" if config.runtime == "inprocess" else "the one actor"
    group = placement_plan(config).group(role)
    return f"{group.num_actors} {'rank' if role is Role.STUDENT else 'actor'}(s)"
