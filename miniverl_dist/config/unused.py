"""Settings that nothing would read: refused, for whoever wrote them expects an effect.

A field at its default is no statement, and null says that there is to be none: both are taken.

A role's placement (``cluster``, ``publish``) may stand in a recipe that runs in one process: the
runtime is what one changes on the way to a cluster. What an evaluation of the run reads has an
effect under every objective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miniverl_dist.config.base import ConfigModel
from miniverl_dist.config.recipe import SGLangEngineConfig, TaskSplit
from miniverl_dist.config.roles import BreakerConfig, TeacherConfig

if TYPE_CHECKING:
    from miniverl_dist.config.models import RunConfig

_SAMPLED = "where the student samples what it is trained on"
_HTTP = "for a teacher that is asked over HTTP"
_CLIENT_FIELDS = (
    "headers_file",
    "request_deadline_s",
    "request_deadline_s_per_1k_tokens",
    "max_retries",
    "retry_backoff_s",
    "max_inflight_tokens",
    "probe",
    "probe_tolerance",
)


@dataclass(frozen=True)
class _Unused:
    """Fields of a section that have no effect, and where they would have one."""

    name: str
    section: ConfigModel
    fields: tuple[str, ...]
    only: str


def unused_problem(config: RunConfig) -> str | None:
    """The first setting without an effect; None where each has one."""
    for unused in _unused(config):
        values, declared = dict(unused.section), type(unused.section).model_fields
        for name in unused.fields:
            found, default = values[name], declared[name].default
            if found is not None and found != default:
                shown = "null" if default is None else default
                return (
                    f"{unused.name}.{name} has a meaning only {unused.only}: found {found}, leave "
                    f"it out (or at its default, {shown})"
                )
    return None


def _unused(config: RunConfig) -> Iterator[_Unused]:
    yield from _of_episodes(config)
    yield from _of_stored_episodes(config)
    yield from _of_divergence(config)
    yield from _of_loss(config)
    yield from _of_rewards(config)
    if config.teacher is not None:
        yield from _of_teacher(config, config.teacher)


def _of_episodes(config: RunConfig) -> Iterator[_Unused]:
    """Which tasks, and who plays them."""
    tasks, engine, warmup = config.tasks, config.rollout.engine, config.student.warmup
    if isinstance(tasks, TaskSplit) and tasks.split != "stratified":
        yield _Unused("tasks", tasks, ("seed",), "with tasks.split stratified")
    if isinstance(engine, SGLangEngineConfig) and engine.load_weights_by != "distributed":
        only = "with rollout.engine.load_weights_by distributed"
        yield _Unused("rollout.engine", engine, ("bucket_bytes",), only)
    if warmup is not None:
        yield _Unused("student.warmup", warmup, ("mask_divergence",), "in teacher.fit")
    if config.curriculum.schedule == "fixed":
        only = "with curriculum.schedule on_success"
        yield _Unused("curriculum", config.curriculum, ("pass_threshold",), only)


def _of_stored_episodes(config: RunConfig) -> Iterator[_Unused]:
    told = config.demonstrations
    if told is not None and told.trajectories is not None:
        scripted = ("traces_per_task", "max_tail_calls", "noisy_fraction")
        only = "for scripted episodes, without demonstrations.trajectories"
        yield _Unused("demonstrations", told, scripted, only)
    elif told is not None:
        only = "for stored episodes, with demonstrations.trajectories"
        yield _Unused("demonstrations", told, ("only_passed",), only)
    if not config.is_online:
        horizons = ("schedule", "initial_tail_calls")
        yield _Unused("curriculum", config.curriculum, horizons, _SAMPLED)
        yield _Unused("rollout", config.rollout, ("temperature",), _SAMPLED)
        yield _Unused("loop", config.loop, ("analysed_groups",), _SAMPLED)


def _of_divergence(config: RunConfig) -> Iterator[_Unused]:
    distill, asked = config.distill, "with a `distill` section that asks a teacher"
    if not config.uses_targets:
        yield _Unused("memory", config.memory, ("strategy", "limit_bytes"), asked)
    elif config.memory.strategy != "auto":
        yield _Unused("memory", config.memory, ("limit_bytes",), "with memory.strategy auto")
    if distill is not None and distill.divergence != "jsd":
        yield _Unused("distill", distill, ("beta",), "with distill.divergence jsd")
    if distill is not None and not distill.needs_teacher:
        yield _Unused("distill", distill, ("support", "top_k"), "with a divergence from a teacher")
    elif distill is not None and distill.support != "top_k_tail":
        yield _Unused("distill", distill, ("top_k",), "with distill.support top_k_tail")
    if config.selection.kind not in ("uniform_ratio", "hybrid"):
        only = "with selection.kind uniform_ratio or hybrid"
        yield _Unused("selection", config.selection, ("ratio",), only)


def _of_loss(config: RunConfig) -> Iterator[_Unused]:
    """The policy loss, and the KL to the reference, which shares its weights and denominators."""
    loss, has_kl = config.loss, config.loss.kl_coef > 0
    # The clip range's default follows the kind, which is named first.
    policy, shared = ("kind", "clip_low", "clip_high", "dual_clip"), ("mismatch_cap", "reduction")
    if not config.is_online:
        measured = ("mismatch_alarm_mean", "mismatch_alarm_ratio")
        yield _Unused("loss", loss, (*policy, *shared, "kl_estimator", *measured), _SAMPLED)
    elif not config.has_policy_term:
        only = "where tokens have an advantage (a reward, an `opd` section, or k1_in_reward)"
        yield _Unused("loss", loss, policy, only)
        if not has_kl:
            yield _Unused("loss", loss, shared, f"{only}, or with loss.kl_coef above 0")
    if not has_kl:
        yield _Unused("loss", loss, ("kl_estimator",), "with loss.kl_coef above 0")
    if loss.kind != "ppo":
        yield _Unused("loss", loss, ("dual_clip",), "with loss.kind ppo")


def _of_rewards(config: RunConfig) -> Iterator[_Unused]:
    grpo = config.grpo
    if not config.uses_group_advantage:
        only = "with a group advantage (objective grpo or grpo_opd)"
        yield _Unused("grpo", grpo, ("normalize_std", "std_floor", "zero_variance"), only)
    if not config.is_online:
        yield _Unused("grpo", grpo, ("max_refills",), _SAMPLED)
    if not grpo.normalize_std:
        yield _Unused("grpo", grpo, ("std_floor",), "with grpo.normalize_std")


def _of_teacher(config: RunConfig, teacher: TeacherConfig) -> Iterator[_Unused]:
    """A cluster launches servers for a teacher's model; `url` is read by evaluations as well."""
    is_here = teacher.url is None
    is_launched = config.runtime == "cluster" and config.uses_teacher and is_here
    if not (config.uses_teacher or config.uses_targets):
        only = "where training asks the teacher (an `opd` or a `distill` section)"
        yield _Unused("teacher", teacher, ("max_drop_fraction", "max_prefill_tokens"), only)
    if not config.uses_teacher:
        only = "with an `opd` section, which asks for scores"
        fields = ("on_failure", "deadline_s") if is_here else ("prefix_scoring",)
        yield _Unused("teacher", teacher, fields, only)
    if is_here and not is_launched:
        yield _Unused("teacher", teacher, _CLIENT_FIELDS, _HTTP)
        yield _Unused("teacher.breaker", teacher.breaker, tuple(BreakerConfig.model_fields), _HTTP)
        if teacher.on_failure == "wait":
            yield _Unused("teacher", teacher, ("on_failure",), f"as `fail`, or {_HTTP}")
    if not teacher.probe:
        yield _Unused("teacher", teacher, ("probe_tolerance",), "with teacher.probe")
    if not teacher.prefix_scoring:
        only = "with teacher.prefix_scoring"
        yield _Unused("teacher", teacher, ("prefix_inflight_tokens",), only)
