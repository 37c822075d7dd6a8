from __future__ import annotations

import pytest

from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.environments.splits import SplitKind, split
from miniverl_dist.errors import ConfigError


def info(number: int, *classes: str) -> TaskInfo:
    return TaskInfo(task_id=f"t{number}", num_calls=3, num_turns=2, classes=tuple(sorted(classes)))


def shelf(**sizes: int) -> dict[str, TaskInfo]:
    kinds = [kind for kind, size in sizes.items() for _ in range(size)]
    return {f"t{number}": info(number, kind) for number, kind in enumerate(kinds)}


def variants(num_families: int, *categories: str) -> dict[str, TaskInfo]:
    """Families f0, f1, ... with one task of each category, category after category."""
    return {
        f"{category}{number}": info(number, "ab"[number % 2]).model_copy(
            update={"category": category, "family": f"f{number}"}
        )
        for category in categories
        for number in range(num_families)
    }


class TestFamilies:
    @pytest.mark.parametrize("kind", ["tail", "stratified"])
    def test_a_family_is_on_one_side_whatever_categories_there_are(self, kind: SplitKind) -> None:
        tasks = variants(10, "x", "y", "z")
        train, evaluation = split(tasks, kind, 12)
        assert (len(train), len(evaluation)) == (18, 12)
        held_out = {tasks[task_id].family for task_id in evaluation}
        assert len(held_out) == 4
        assert not held_out & {tasks[task_id].family for task_id in train}
        alone = variants(10, "y")
        assert {alone[i].family for i in split(alone, kind, 4)[1]} == held_out

    def test_tail_takes_the_last_families(self) -> None:
        assert split(variants(4, "x", "y"), "tail", 2)[1] == ("x3", "y3")

    def test_a_number_that_cuts_a_family_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="num_eval is 5, expected a multiple of 3"):
            split(variants(10, "x", "y", "z"), "stratified", 5)


class TestSplit:
    def test_tail_takes_the_last_ids_in_order(self) -> None:
        train, evaluation = split(shelf(a=6, b=4), "tail", 3)
        assert evaluation == ("t7", "t8", "t9")
        assert train == tuple(f"t{number}" for number in range(7))

    def test_stratified_takes_each_kind_in_proportion(self) -> None:
        tasks = shelf(a=50, b=30, c=20)
        train, evaluation = split(tasks, "stratified", 10, seed=1)
        counts = {kind: sum(tasks[i].classes == (kind,) for i in evaluation) for kind in "abc"}
        assert counts == {"a": 5, "b": 3, "c": 2}
        assert sorted([*train, *evaluation]) == sorted(tasks)
        assert list(evaluation) == [task_id for task_id in tasks if task_id in evaluation]

    def test_stratified_gives_rests_to_the_largest_remainders(self) -> None:
        # Shares 0.2, 1.4, 1.4: one each for the whole parts, the rest to b (before c by name).
        tasks = shelf(c=7, b=7, a=1)
        _, evaluation = split(tasks, "stratified", 3)
        counts = {kind: sum(tasks[i].classes == (kind,) for i in evaluation) for kind in "abc"}
        assert counts == {"a": 0, "b": 2, "c": 1}

    def test_seed_decides_which_and_nothing_else_does(self) -> None:
        tasks = shelf(a=40, b=40)
        first = split(tasks, "stratified", 10, seed=0)
        backwards = dict(reversed(tasks.items()))
        assert first == split(tasks, "stratified", 10, seed=0)
        assert set(first[1]) == set(split(backwards, "stratified", 10, seed=0)[1])
        assert first != split(tasks, "stratified", 10, seed=1)

    @pytest.mark.parametrize("num_eval", [0, 10, 11, -1])
    def test_both_sides_keep_a_task(self, num_eval: int) -> None:
        with pytest.raises(ConfigError, match="expected 1 to 9 of 10"):
            split(shelf(a=10), "tail", num_eval)
