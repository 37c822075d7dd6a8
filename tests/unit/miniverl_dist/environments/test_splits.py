from __future__ import annotations

import pytest

from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.environments.splits import split
from miniverl_dist.errors import ConfigError


def info(number: int, *classes: str) -> TaskInfo:
    return TaskInfo(task_id=f"t{number}", num_calls=3, num_turns=2, classes=tuple(sorted(classes)))


def shelf(**sizes: int) -> dict[str, TaskInfo]:
    kinds = [kind for kind, size in sizes.items() for _ in range(size)]
    return {f"t{number}": info(number, kind) for number, kind in enumerate(kinds)}


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
