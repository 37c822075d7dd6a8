"""Declared splits of an environment's tasks into training and evaluation."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Literal

from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import ConfigError

SplitKind = Literal["tail", "stratified"]


def split(
    tasks: Mapping[str, TaskInfo], kind: SplitKind, num_eval: int = 30, seed: int = 0
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Divide task ids into ``(train_ids, eval_ids)``, both in the data's order.

    ``tail`` takes the last ``num_eval`` ids (the data is grouped: they are all travel tasks).
    ``stratified`` takes each combination of classes in proportion to its size (largest
    remainders), and within one by a hash of seed and id: the same on every machine.

    Whole families are taken, equally many tasks of each category: a variant of a training task
    tells nothing about what was learnt. The same families whichever categories there are.

    Raises:
        ConfigError: ``num_eval`` leaves nothing to train on, nothing to evaluate, or cuts a family.
    """
    if not 0 < num_eval < len(tasks):
        raise ConfigError(
            f"tasks.num_eval is {num_eval}, expected 1 to {len(tasks) - 1} of {len(tasks)} tasks"
        )
    family_of = {task_id: info.family or task_id for task_id, info in tasks.items()}
    families: dict[str, TaskInfo] = {}
    for task_id, info in tasks.items():
        families.setdefault(family_of[task_id], info)
    size = len(tasks) // len(families)
    if num_eval % size:
        raise ConfigError(
            f"tasks.num_eval is {num_eval}, expected a multiple of {size}: each task comes in "
            f"{size} variants, and a split keeps them together"
        )
    num_families = num_eval // size
    tail = kind == "tail"
    chosen = (
        set(list(families)[-num_families:]) if tail else _stratified(families, num_families, seed)
    )
    train_ids = tuple(task_id for task_id in tasks if family_of[task_id] not in chosen)
    return train_ids, tuple(task_id for task_id in tasks if family_of[task_id] in chosen)


def _stratified(tasks: Mapping[str, TaskInfo], num_eval: int, seed: int) -> set[str]:
    strata: dict[tuple[str, ...], list[str]] = {}
    for task_id, info in tasks.items():
        strata.setdefault(info.classes, []).append(task_id)
    shares = {key: divmod(len(ids) * num_eval, len(tasks)) for key, ids in strata.items()}
    counts = {key: whole for key, (whole, _) in shares.items()}
    by_remainder = sorted(shares, key=lambda key: (-shares[key][1], key))
    for key in by_remainder[: num_eval - sum(counts.values())]:
        counts[key] += 1

    def rank(task_id: str) -> str:
        return hashlib.sha256(f"{seed}:{task_id}".encode()).hexdigest()

    return {
        task_id for key, ids in strata.items() for task_id in sorted(ids, key=rank)[: counts[key]]
    }
