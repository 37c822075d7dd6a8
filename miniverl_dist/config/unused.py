"""Settings that nothing would read: refused, for whoever wrote them expects an effect.

A field at its default is no statement, and null says that there is to be none: both are taken.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from miniverl_dist.config.base import ConfigModel

if TYPE_CHECKING:
    from miniverl_dist.config.models import RunConfig


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
    distill, divergence = config.distill, "with a `distill` section that asks a teacher"
    if not config.uses_targets:
        yield _Unused("memory", config.memory, ("strategy", "limit_bytes"), divergence)
    elif config.memory.strategy != "auto":
        yield _Unused("memory", config.memory, ("limit_bytes",), "with memory.strategy auto")
    if distill is not None and distill.divergence != "jsd":
        yield _Unused("distill", distill, ("beta",), "with distill.divergence jsd")
    if distill is not None and not distill.needs_teacher:
        yield _Unused("distill", distill, ("support", "top_k"), "with a divergence from a teacher")
    elif distill is not None and distill.support != "top_k_tail":
        yield _Unused("distill", distill, ("top_k",), "with distill.support top_k_tail")
    if config.selection.kind not in ("uniform_ratio", "hybrid"):
        yield _Unused(
            "selection", config.selection, ("ratio",), "with selection.kind uniform_ratio or hybrid"
        )
    if not config.is_online:
        sampled = "where the student samples what it is trained on"
        yield _Unused("rollout", config.rollout, ("temperature",), sampled)
        # The clip range's default follows the kind, which is named first.
        yield _Unused("loss", config.loss, ("kind", "clip_low", "clip_high", "dual_clip"), sampled)
        yield _Unused("loss", config.loss, ("mismatch_cap", "kl_estimator"), sampled)
    if not config.uses_group_advantage:
        fields = ("normalize_std", "std_floor", "zero_variance", "max_refills")
        yield _Unused(
            "grpo", config.grpo, fields, "with a group advantage (objective grpo or grpo_opd)"
        )
