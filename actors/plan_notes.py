"""What the reader of a plan should know of the recipe itself, though it is no fault."""

from __future__ import annotations

from collections.abc import Iterator

from actors.memory_estimate import size_text
from miniverl_dist.config.models import RunConfig
from miniverl_dist.config.recipe import SGLangEngineConfig
from miniverl_dist.config.roles import MegatronModelConfig


def recipe_notes(config: RunConfig) -> Iterator[str]:
    """Defaults and combinations that a person would want to have seen."""
    is_megatron = isinstance(config.student.model, MegatronModelConfig)
    if is_megatron and config.rollout.engine is None:
        yield (
            "rollout.engine is not given: transformers samples (kind hf), for small models; name "
            "kind sglang for anything else"
        )
    loop, workers = config.loop, config.rollout.num_workers
    wanted = (loop.max_policy_lag + 1) * loop.num_groups
    if loop.max_policy_lag and workers < wanted:
        yield (
            f"loop.max_policy_lag {loop.max_policy_lag} lets {loop.max_policy_lag + 1} batches "
            f"be sampled at once, but rollout.num_workers is {workers}: raise it to {wanted}, "
            "(lag + 1) x num_groups, or most of the overlap is lost"
        )


def engine_load_text(config: RunConfig, weights_bytes: int) -> str:
    """The way of published weights from an engine's actor into its server."""
    engine = config.rollout.engine
    if not isinstance(engine, SGLangEngineConfig):
        return ""
    size = size_text(weights_bytes)
    if engine.load_weights_by == "distributed":
        return (
            f"each engine's actor then sends {size} to its server over a group of the two, "
            f"{size_text(engine.bucket_bytes)} at a time beside the old weights; nothing is "
            "written to a disk (rollout.engine.load_weights_by: distributed)"
        )
    own = engine.work_dir
    where = "the run directory" if own is None else f"rollout.engine.work_dir ({own})"
    return (
        f"each engine's actor then writes {size} as safetensors below {where}, has its server "
        "read them, and removes them (rollout.engine.load_weights_by: disk)"
    )
