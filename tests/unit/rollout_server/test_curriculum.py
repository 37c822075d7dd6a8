from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.config.recipe import CurriculumConfig
from miniverl_dist.environments.base import TaskInfo
from miniverl_dist.errors import CheckpointError, ConfigError
from miniverl_dist.ports import Assignment, Curriculum, ScoredGroup
from miniverl_dist.schemas.trajectory import Termination
from rollout_server.curriculum import ReverseK
from tests.fakes import group, trajectory

SIZES = {"a": 4, "b": 1, "c": 7, "none": 0}


def infos(sizes: dict[str, int]) -> dict[str, TaskInfo]:
    return {
        name: TaskInfo(task_id=name, num_calls=size, num_turns=1, classes=())
        for name, size in sizes.items()
    }


def curriculum(
    sizes: dict[str, int] = SIZES, *, seed: int = 0, ids: Sequence[str] | None = None, **config: Any
) -> ReverseK:
    return ReverseK(
        infos(sizes), list(ids or sizes), CurriculumConfig.model_validate(config), seed=seed
    )


def finished(place: Assignment, *passed: bool, faults: int = 0) -> ScoredGroup:
    members = [trajectory(place=place, member=i, passed=p) for i, p in enumerate(passed)]
    members += [
        trajectory(place=place, member=9, termination=Termination.DEADLINE) for _ in range(faults)
    ]
    return group(place, members)


def horizon(of: ReverseK, task_id: str) -> int:
    tails: dict[str, int] = of.state()["tail_calls"]
    return tails[task_id]


def place_of(of: ReverseK, task_id: str) -> Assignment:
    return next(p for p in map(of.assign, range(99)) if p.task_id == task_id)


def test_it_implements_the_port() -> None:
    port: Curriculum = curriculum()
    assert port.assign(0).attempt == 0


class TestAssign:
    def test_each_epoch_visits_every_usable_task_once(self) -> None:
        order = [curriculum().assign(ticket).task_id for ticket in range(30)]
        epochs = [order[i : i + 3] for i in range(0, 30, 3)]
        assert all(sorted(epoch) == ["a", "b", "c"] for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > 2

    def test_prefix_and_tail_make_up_the_task(self) -> None:
        for initial in (1, 3, 50):
            for ticket in range(9):
                place = curriculum(initial_tail_calls=initial).assign(ticket)
                assert place.prefix_calls + place.tail_calls == SIZES[place.task_id]
                assert place.tail_calls == min(initial, SIZES[place.task_id])
                assert place.ticket == ticket

    @settings(deadline=None, max_examples=30)
    @given(st.integers(0, 500), st.integers(0, 5))
    def test_it_is_a_function_of_ticket_seed_and_state_alone(self, ticket: int, seed: int) -> None:
        asked_before = curriculum(seed=seed)
        for other in (3, 999, ticket):
            asked_before.assign(other)
        assert asked_before.assign(ticket) == curriculum(seed=seed).assign(ticket)

    def test_the_order_depends_on_the_seed(self) -> None:
        orders = {
            tuple(curriculum(seed=seed).assign(t).task_id for t in range(9)) for seed in range(8)
        }
        assert len(orders) > 4

    def test_tasks_without_a_call_cannot_be_trained_on(self) -> None:
        with pytest.raises(ConfigError, match="none of the 2 training tasks has an expert call"):
            curriculum({"x": 0, "y": 0})


class TestReassign:
    def test_another_task_in_the_same_place(self) -> None:
        made = curriculum()
        for ticket in range(20):
            place = made.assign(ticket)
            for attempt in range(1, 5):
                again = made.reassign(place)
                assert (again.ticket, again.attempt) == (ticket, attempt)
                assert again.task_id != place.task_id
                assert again == made.reassign(place)
                place = again

    def test_the_same_one_where_there_is_no_other(self) -> None:
        made = curriculum({"a": 4})
        again = made.reassign(made.assign(3))
        assert (again.task_id, again.attempt, again.group_id) == ("a", 1, "000003.1")

    def test_the_horizon_is_that_of_the_other_task(self) -> None:
        made = curriculum(initial_tail_calls=5)
        for ticket in range(9):
            again = made.reassign(made.assign(ticket))
            assert again.tail_calls == min(5, SIZES[again.task_id])


class TestFixed:
    def test_the_horizon_grows_after_each_batch_up_to_n(self) -> None:
        made = curriculum(schedule="fixed")
        for committed in range(1, 12):
            made.advance([])
            for task_id in ("a", "b", "c"):
                assert horizon(made, task_id) == min(1 + committed, SIZES[task_id])

    def test_results_do_not_matter(self) -> None:
        made = curriculum(schedule="fixed")
        made.advance([finished(place_of(made, "c"), False, False)])
        assert horizon(made, "c") == 2

    def test_config_may_stop_it_earlier(self) -> None:
        made = curriculum(schedule="fixed", max_tail_calls=3)
        for _ in range(9):
            made.advance([])
        assert made.state()["tail_calls"] == {"a": 3, "b": 1, "c": 3}


class TestOnSuccess:
    @pytest.mark.parametrize(
        ("passed", "grows"),
        [
            ((True, True, False, False), False),
            ((True, True, True, False, False), True),
            ((True, True, True), True),
            ((False, False), False),
        ],
    )
    def test_a_task_grows_when_its_group_passes_often_enough(
        self, passed: tuple[bool, ...], grows: bool
    ) -> None:
        made = curriculum(pass_threshold=0.6)
        made.advance([finished(place_of(made, "c"), *passed)])
        assert horizon(made, "c") == 1 + grows
        assert horizon(made, "a") == 1

    def test_harness_faults_do_not_count(self) -> None:
        made = curriculum()
        made.advance([finished(place_of(made, "c"), True, faults=7)])
        assert horizon(made, "c") == 2
        made.advance([finished(place_of(made, "a"), faults=4)])
        assert horizon(made, "a") == 1

    def test_results_at_a_former_horizon_are_ignored(self) -> None:
        made = curriculum()
        place = place_of(made, "c")
        # Two groups of the same task in one batch, and a late one of an older batch.
        made.advance([finished(place, True), finished(place, True)])
        assert horizon(made, "c") == 2
        made.advance([finished(place, True)])
        assert horizon(made, "c") == 2
        made.advance([finished(place_of(made, "c"), True)])
        assert horizon(made, "c") == 3
        made.advance([finished(place, True)])
        assert horizon(made, "c") == 3

    def test_it_never_exceeds_n_and_then_the_task_is_finished(self) -> None:
        made = curriculum()
        for _ in range(12):
            made.advance([finished(place_of(made, "a"), True)])
        assert horizon(made, "a") == 4
        assert made.state()["finished"] == ["a"]
        assert made.summary() == {"finished_tasks_fraction": 1 / 3}
        assert made.histogram() == {1: 2, 4: 1}

    def test_a_task_at_its_limit_is_not_finished_before_it_passes(self) -> None:
        made = curriculum()
        made.advance([finished(place_of(made, "b"), False)])
        assert made.state()["finished"] == []
        made.advance([finished(place_of(made, "b"), True)])
        assert made.state()["finished"] == ["b"]


class TestState:
    def test_defect_curriculum_state_survives_a_restart(self) -> None:
        made = curriculum(seed=4)
        for task_id in ("a", "c", "c", "b"):
            made.advance([finished(place_of(made, task_id), True)])
        state = json.loads(json.dumps(made.state()))
        again = curriculum(seed=4)
        again.restore(state)
        assert again.state() == made.state()
        assert [again.assign(t) for t in range(12)] == [made.assign(t) for t in range(12)]
        assert again.summary() == made.summary()
        again.advance([finished(place_of(again, "a"), True)])
        assert horizon(again, "a") == horizon(made, "a") + 1

    def test_a_state_is_a_copy(self) -> None:
        made = curriculum()
        state = made.state()
        made.advance([finished(place_of(made, "a"), True)])
        assert state["tail_calls"]["a"] == 1
        made.restore(state)
        made.advance([finished(place_of(made, "a"), True)])
        assert state["tail_calls"]["a"] == 1

    @pytest.mark.parametrize("ids", [("a", "b"), ("a", "b", "d"), ("a", "b", "c", "d")])
    def test_the_state_of_other_tasks_is_refused(self, ids: tuple[str, ...]) -> None:
        other = curriculum({**SIZES, "d": 3}, ids=ids)
        with pytest.raises(CheckpointError, match="resume needs the config that the run began"):
            curriculum().restore(other.state())


def test_groups_dropped_from_a_place_teach_as_well() -> None:
    of = curriculum(schedule="on_success", pass_threshold=0.5)
    dropped, kept = place_of(of, "c"), place_of(of, "a")
    with_dropped = finished(kept, False, False).model_copy(
        update={"replaced": (finished(dropped, True, True).outcome,)}
    )
    of.advance([with_dropped])
    assert (horizon(of, "c"), horizon(of, "a")) == (2, 1)


def test_under_fixed_a_task_is_finished_when_it_has_reached_its_limit() -> None:
    of = curriculum({"a": 2, "b": 1}, schedule="fixed")
    assert of.summary()["finished_tasks_fraction"] == 0.5
    of.advance([])
    assert of.summary()["finished_tasks_fraction"] == 1.0
