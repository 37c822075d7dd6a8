"""The memory strategy: what it is, why, and that it never trades the objective."""

from __future__ import annotations

import pytest

from miniverl_dist.config.lab import DistillConfig, MemoryConfig
from miniverl_dist.errors import ConfigError
from miniverl_dist.lab.memory import Estimate, MemoryChoice, available_bytes, choose

TOP_K = DistillConfig()
EXACT = DistillConfig(support="exact_full_vocab")
NEEDED = Estimate(student_bytes=600, teacher_bytes=300, chunk_bytes=100)


def chosen(
    distill: DistillConfig, limit: int, *, strategy: str = "auto", is_online: bool = True
) -> MemoryChoice:
    memory = MemoryConfig.model_validate({"strategy": strategy, "limit_bytes": limit})
    return choose(memory, distill, NEEDED, is_online=is_online)


@pytest.mark.parametrize(("limit", "strategy"), [(1000, "resident"), (999, "swap")])
def test_auto_keeps_what_fits(limit: int, strategy: str) -> None:
    found = chosen(TOP_K, limit)
    assert found.strategy == strategy
    assert found.reason.startswith("both fit" if strategy == "resident" else "both do not fit")


def test_stored_episodes_are_asked_about_once() -> None:
    found = chosen(TOP_K, 10**9, is_online=False)
    assert found.strategy == "swap"
    assert "asked about once" in found.reason


def test_auto_never_changes_the_objective() -> None:
    assert chosen(EXACT, 1000).strategy == "resident"
    assert chosen(EXACT, 1000, is_online=False).strategy == "resident"
    with pytest.raises(ConfigError, match="exact_full_vocab needs student and teacher at once"):
        chosen(EXACT, 999)


@pytest.mark.parametrize("distill", [TOP_K, EXACT])
@pytest.mark.parametrize("is_online", [True, False])
def test_a_limit_below_the_student_alone_is_refused(
    distill: DistillConfig, is_online: bool
) -> None:
    with pytest.raises(ConfigError, match=r"not even the student fits \(student 600 bytes, .* 599"):
        chosen(distill, 599, is_online=is_online)
    assert chosen(TOP_K, 600, is_online=is_online).strategy == "swap"


@pytest.mark.parametrize("strategy", ["resident", "swap"])
def test_a_recipe_that_says_so_is_obeyed(strategy: str) -> None:
    found = chosen(TOP_K, 1, strategy=strategy)
    assert found.strategy == strategy
    assert found.reason.startswith("as the recipe says")


def test_without_a_limit_the_machine_is_asked() -> None:
    free = available_bytes()
    assert 2**20 < free < 2**50
    huge = Estimate(student_bytes=free, teacher_bytes=free, chunk_bytes=0)
    assert choose(MemoryConfig(), TOP_K, huge, is_online=True).strategy == "swap"
    assert choose(MemoryConfig(), TOP_K, NEEDED, is_online=True).strategy == "resident"
    assert choose(MemoryConfig(), TOP_K, NEEDED, is_online=True, free_bytes=5).strategy == "swap"
