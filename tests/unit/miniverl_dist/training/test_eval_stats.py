from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.ports import Assignment
from miniverl_dist.schemas.evaluation import EvaluationRow, TailCalls, TaskOutcome
from miniverl_dist.schemas.messages import CallError, ParsedCall, ParseStatus
from miniverl_dist.schemas.trajectory import HARNESS_TERMINATIONS, Termination, Trajectory
from miniverl_dist.training import eval_stats
from miniverl_dist.training.eval_stats import (
    BOOTSTRAP_SEED,
    NUM_RESAMPLES,
    mean_pass_at_k,
    paired_difference,
    pass_at_k,
    resample_counts,
    summaries,
    summarize,
    task_interval,
    wilson_interval,
)
from miniverl_dist.training.evaluate import EvaluationJob
from tests.fakes import FakeRollouts, ok_call, trajectory
from tests.reference import eval_stats as oracle


def score_roots(num_passed: int, num_episodes: int) -> tuple[float, float]:
    """Both rates p at which the score test is exactly at its 5 % bound, by bisection."""
    rate, z = num_passed / num_episodes, 1.959963984540054

    def distance(p: float) -> float:
        return abs(rate - p) - z * math.sqrt(p * (1 - p) / num_episodes)

    def root(inside: float, outside: float) -> float:
        for _ in range(200):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if distance(middle) < 0 else (inside, middle)
        return (inside + outside) / 2

    return root(rate, 0.0), root(rate, 1.0)


class TestWilson:
    @settings(deadline=None, max_examples=200)
    @given(st.integers(1, 2000).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
    def test_it_solves_the_score_equation(self, counts: tuple[int, int]) -> None:
        num_passed, num_episodes = counts
        low, high = wilson_interval(num_passed, num_episodes)
        assert 0 <= low <= num_passed / num_episodes <= high <= 1
        if 0 < num_passed < num_episodes:
            assert (low, high) == pytest.approx(score_roots(num_passed, num_episodes), abs=1e-9)

    def test_it_does_not_collapse_at_the_ends(self) -> None:
        assert wilson_interval(0, 10) == pytest.approx((0.0, 0.277532), abs=1e-6)
        assert wilson_interval(10, 10) == pytest.approx((1 - 0.277532, 1.0), abs=1e-6)

    def test_without_episodes_nothing_is_known(self) -> None:
        assert wilson_interval(0, 0) == (0.0, 1.0)


def outcomes(*tasks: tuple[int, int], tail_calls: int = 1) -> list[TaskOutcome]:
    """(passes, episodes) of tasks ``t0``, ``t1``, ...; the reward is the pass."""
    return [
        TaskOutcome(
            task_id=f"t{index}",
            tail_calls=tail_calls,
            num_episodes=played,
            num_passed=passed,
            reward_sum=float(passed),
        )
        for index, (passed, played) in enumerate(tasks)
    ]


EPISODES = st.integers(1, 6).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


class TestPassAtK:
    @pytest.mark.parametrize("num_episodes", range(1, 8))
    def test_it_is_the_share_of_subsets_with_a_pass(self, num_episodes: int) -> None:
        for passed, k in itertools.product(range(num_episodes + 1), range(1, num_episodes + 1)):
            assert pass_at_k(num_episodes, passed, k) == pytest.approx(
                oracle.pass_at_k(num_episodes, passed, k), abs=1e-12
            )

    @pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
    @pytest.mark.parametrize(("n", "k"), [(4, 1), (4, 2), (4, 4), (9, 5)])
    def test_it_is_unbiased(self, n: int, k: int, p: float) -> None:
        expected = math.fsum(
            math.comb(n, c) * p**c * (1 - p) ** (n - c) * pass_at_k(n, c, k) for c in range(n + 1)
        )
        assert expected == pytest.approx(1 - (1 - p) ** k, abs=1e-12)

    def test_the_mean_leaves_out_tasks_with_too_few_episodes(self) -> None:
        assert mean_pass_at_k(outcomes((1, 2), (1, 1), (0, 0))) == (0.75, 1.0)

    def test_the_first_entry_is_the_pass_rate_where_all_tasks_have_as_many_episodes(self) -> None:
        found = mean_pass_at_k(outcomes((1, 4), (3, 4), (0, 4)))
        assert found[0] == pytest.approx(4 / 12)
        assert list(found) == sorted(found)
        assert len(found) == 4


class TestResampling:
    def test_the_draws_never_change(self) -> None:
        """Numbers of a file must come out again in any later version and on any machine."""
        first = [resample_counts(5)[i].astype(int).tolist() for i in (0, 1, NUM_RESAMPLES - 1)]
        assert first == [[1, 1, 1, 0, 2], [0, 1, 0, 2, 2], [1, 0, 1, 1, 2]]

    @pytest.mark.parametrize("num_tasks", [1, 2, 7])
    def test_each_resample_draws_as_many_tasks_as_there_are_as_the_oracle_does(
        self, num_tasks: int
    ) -> None:
        counts = resample_counts(num_tasks)
        assert counts.shape == (NUM_RESAMPLES, num_tasks)
        assert (counts.sum(axis=1) == num_tasks).all()
        for row, drawn in zip(
            counts, oracle.draws(num_tasks, NUM_RESAMPLES, BOOTSTRAP_SEED), strict=True
        ):
            assert row.tolist() == [drawn.count(i) for i in range(num_tasks)]

    def test_every_task_is_drawn_equally_often(self) -> None:
        share = resample_counts(3).mean(axis=0)
        assert share == pytest.approx([1.0, 1.0, 1.0], abs=0.03)


class TestTaskInterval:
    @settings(deadline=None, max_examples=15)
    @given(st.lists(EPISODES, min_size=2, max_size=6))
    def test_it_equals_plain_loops(self, tasks: list[tuple[int, int]]) -> None:
        found = task_interval(outcomes(*tasks))
        assert found is not None
        expected = oracle.interval(tasks, NUM_RESAMPLES, BOOTSTRAP_SEED)
        assert (found.low, found.high) == pytest.approx(expected, abs=1e-11)

    @settings(deadline=None, max_examples=10)
    @given(st.permutations(range(9)))
    def test_the_order_of_the_tasks_does_not_matter(self, order: list[int]) -> None:
        tasks = outcomes(*((index, 9 + index * index) for index in range(9)))
        assert task_interval([tasks[index] for index in order]) == task_interval(tasks)

    def test_its_width_follows_the_spread_between_tasks(self) -> None:
        """Of means of equal clusters the standard error is known."""
        passes = [0, 4, 1, 3, 2, 0, 4, 4, 1, 2, 3, 0, 1, 4, 2, 2]
        found = task_interval(outcomes(*((p, 4) for p in passes)))
        error = float(np.std([p / 4 for p in passes])) / math.sqrt(len(passes))
        assert found is not None
        assert found.high - found.low == pytest.approx(2 * 1.96 * error, rel=0.05)

    def test_episodes_of_one_task_add_no_certainty(self) -> None:
        """Tasks that pass always or never: ten episodes say what one says; Wilson's shrinks."""
        tasks = [0, 1, 1, 0, 1, 0, 1, 1]
        once, often = (task_interval(outcomes(*((n * t, n) for t in tasks))) for n in (1, 10))
        assert once is not None
        assert often is not None
        assert (once.low, once.high) == (often.low, often.high)
        low, high = wilson_interval(50, 80)
        assert often.high - often.low > high - low

    def test_horizons_of_one_task_are_drawn_together(self) -> None:
        alone = outcomes((2, 4), (0, 4), (4, 4))
        both = alone + outcomes((2, 4), (0, 4), (4, 4), tail_calls=2)
        assert task_interval(both) == task_interval(alone)

    def test_variants_of_one_task_are_drawn_together(self) -> None:
        alone = outcomes((2, 4), (0, 4), (4, 4))
        variants = [
            o.model_copy(update={"task_id": f"{o.task_id}-{name}", "family": o.task_id})
            for o in alone
            for name in ("base", "miss_func")
        ]
        assert task_interval(variants) == task_interval(alone)
        apart = task_interval([o.model_copy(update={"family": ""}) for o in variants])
        assert apart != task_interval(alone)
        both = paired_difference(variants, variants)
        assert both is not None
        assert both.num_tasks == 6

    @pytest.mark.parametrize("tasks", [[], [(1, 4)], [(1, 4), (0, 0)]])
    def test_fewer_than_two_tasks_cannot_be_resampled(self, tasks: list[tuple[int, int]]) -> None:
        assert task_interval(outcomes(*tasks)) is None


class TestPairedDifference:
    @settings(deadline=None, max_examples=15)
    @given(st.lists(st.tuples(EPISODES, EPISODES), min_size=2, max_size=5))
    def test_it_equals_plain_loops(
        self, pairs: list[tuple[tuple[int, int], tuple[int, int]]]
    ) -> None:
        a, b = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        found = paired_difference(outcomes(*a), outcomes(*b))
        assert found is not None
        assert found.interval is not None
        expected = oracle.difference_interval(a, b, NUM_RESAMPLES, BOOTSTRAP_SEED)
        assert (found.interval.low, found.interval.high) == pytest.approx(expected, abs=1e-11)
        assert found.value == pytest.approx(oracle.rate(a) - oracle.rate(b))

    def test_what_tasks_share_cancels(self) -> None:
        """Each task gains one pass of four: certain, although the rates differ widely."""
        base, gained = [0, 1, 2, 3, 0, 3, 1, 2], [1, 2, 3, 4, 1, 4, 2, 3]
        found = paired_difference(
            outcomes(*((p, 4) for p in gained)), outcomes(*((p, 4) for p in base))
        )
        assert found is not None
        assert found.interval == eval_stats.Interval(0.25, 0.25)

    def test_a_swap_turns_the_sign(self) -> None:
        a, b = outcomes((1, 4), (3, 4), (2, 4)), outcomes((0, 4), (4, 4), (1, 4))
        one, other = paired_difference(a, b), paired_difference(b, a)
        assert one is not None
        assert other is not None
        assert one.interval is not None
        assert other.interval is not None
        assert one.value == -other.value
        assert (one.interval.low, one.interval.high) == (-other.interval.high, -other.interval.low)

    def test_only_places_that_both_have_played_count(self) -> None:
        a = outcomes((4, 4), (0, 4), (4, 4), (0, 0))
        b = outcomes((0, 4), (0, 4), (0, 0), (4, 4))
        b += outcomes((4, 4), tail_calls=2)
        found = paired_difference(a, b)
        assert found is not None
        assert (found.rate_a, found.rate_b, found.num_tasks) == (0.5, 0.0, 2)

    def test_nothing_in_common_has_no_difference_and_one_task_no_interval(self) -> None:
        assert paired_difference(outcomes((1, 1)), outcomes((1, 1), tail_calls=2)) is None
        found = paired_difference(outcomes((1, 2)), outcomes((0, 2)))
        assert found is not None
        assert (found.value, found.interval) == (0.5, None)

    def test_rewards_are_compared_the_same_way(self) -> None:
        a = [o.model_copy(update={"reward_sum": 3.0}) for o in outcomes((0, 4), (0, 4))]
        found = paired_difference(a, outcomes((1, 4), (0, 4)), of="reward")
        assert found is not None
        assert (found.rate_a, found.rate_b) == (0.75, 0.125)


def place(task_id: str, tail_calls: int = 1) -> Assignment:
    return Assignment(ticket=0, task_id=task_id, prefix_calls=0, tail_calls=tail_calls)


def job(tail_calls: TailCalls = 1) -> EvaluationJob:
    return EvaluationJob("student", "after", 7, FakeRollouts([], lambda: 0), tail_calls, 2)


def row_of(told: Sequence[Trajectory]) -> EvaluationRow:
    return summarize(job(), 1, told, [place("a")])


def with_calls(
    told: Trajectory, *calls: tuple[ParsedCall, bool, CallError | None], kinds: bool = True
) -> Trajectory:
    """The same episode with calls, whether each worked, and what was wrong."""
    return told.model_copy(
        update={
            "tool_calls": tuple(call for call, _, _ in calls),
            "exec_successes": tuple(worked for _, worked, _ in calls),
            "call_errors": tuple(kind for _, _, kind in calls) if kinds else (),
        }
    )


UNREADABLE = ParsedCall(status=ParseStatus.MALFORMED, raw="x")


class TestSummarize:
    def test_means_over_what_counts(self) -> None:
        told = [
            trajectory("ab", reward=1.0, passed=True, calls=[ok_call("f"), ok_call("g")]),
            trajectory("abcd", reward=0.5, termination=Termination.MAX_TURNS),
        ]
        row = row_of(told)
        assert (row.policy, row.tag, row.policy_version, row.tail_calls) == (
            "student",
            "after",
            7,
            1,
        )
        assert (row.pass_rate, row.reward_mean, row.calls_per_episode) == (0.5, 0.75, 1.0)
        assert (row.pass_low, row.pass_high) == wilson_interval(1, 2)
        assert row.tokens_per_episode == 4.0
        assert (row.official_per_turn_rate, row.state_only_rate) == (0.5, 0.5)
        assert row.reward_parts == {"mean_partial": 0.75}
        assert row.terminations == {"final_answer": 1, "max_turns": 1}

    def test_checks_that_an_environment_lacks_have_no_rate(self) -> None:
        told = [t.model_copy(update={"verdict": {"reason": None}}) for t in (trajectory("ab"),)]
        row = row_of(told)
        assert (row.official_per_turn_rate, row.state_only_rate) == (None, None)

    @pytest.mark.parametrize("termination", sorted(HARNESS_TERMINATIONS))
    def test_defect_harness_faults_are_not_failures(self, termination: Termination) -> None:
        told = [
            trajectory(reward=1.0, passed=True),
            trajectory(reward=0.0, termination=termination),
        ]
        row = row_of(told)
        assert (row.pass_rate, row.reward_mean) == (1.0, 1.0)
        assert (row.num_episodes, row.num_faults) == (1, 1)
        assert row.terminations == {termination.value: 1, "final_answer": 1}

    def test_nothing_but_faults_says_that_nothing_is_known(self) -> None:
        row = row_of([trajectory(termination=Termination.ENGINE_ERROR)])
        assert (row.num_episodes, row.pass_low, row.pass_high) == (0, None, None)

    def test_errors_by_kind(self) -> None:
        calls = [
            (UNREADABLE, False, None),
            (ok_call("f"), False, CallError.UNKNOWN_TOOL),
            (ok_call("f"), False, CallError.ARGUMENTS),
            (ok_call("f"), False, CallError.EXECUTION),
            (ok_call("f"), True, None),
        ]
        lost = with_calls(trajectory(termination=Termination.DEADLINE), *calls)
        row = row_of([with_calls(trajectory(), *calls), with_calls(trajectory(), calls[1]), lost])
        assert row.errors == {
            "parse": 1,
            "unknown_tool": 2,
            "arguments": 1,
            "execution": 1,
            "harness_fault": 1,
        }

    def test_records_without_kinds_count_as_failed_calls(self) -> None:
        told = with_calls(
            trajectory(),
            (UNREADABLE, False, None),
            (ok_call("f"), False, None),
            (ok_call("f"), True, None),
            kinds=False,
        )
        errors = row_of([told]).errors
        assert (errors["parse"], errors["execution"]) == (1, 1)

    def test_the_parsed_call_rate_counts_episodes(self) -> None:
        told = [
            with_calls(trajectory(), (UNREADABLE, False, None)),
            with_calls(trajectory(), (UNREADABLE, False, None), (ok_call("f"), False, None)),
            trajectory(calls=[ok_call("f"), ok_call("g")]),
            trajectory(),
        ]
        assert row_of(told).parsed_call_rate == 0.5

    def test_first_call_match_comes_from_the_verdict(self) -> None:
        told = [
            trajectory().model_copy(update={"verdict": {"first_call_match": match}})
            for match in (True, False, False, True, True)
        ]
        assert row_of(told).first_call_match_rate == 0.6
        assert row_of([trajectory()]).first_call_match_rate is None

    def test_outcomes_by_task_stand_in_the_order_played(self) -> None:
        places = [place("b"), place("a"), place("c")]
        told = [
            trajectory(place=places[1], passed=True, reward=0.5),
            trajectory(place=places[0], passed=False, reward=0.25),
            trajectory(place=places[1], passed=False, reward=0.25),
            trajectory(place=places[2], termination=Termination.DEADLINE),
        ]
        row = summarize(job(), 1, told, places)
        assert [(o.task_id, o.num_passed, o.num_episodes, o.reward_sum) for o in row.tasks] == [
            ("b", 0, 1, 0.25),
            ("a", 1, 2, 0.75),
            ("c", 0, 0, 0.0),
        ]
        assert row.pass_at_k == (0.25, 1.0)
        expected = task_interval(row.tasks)
        assert expected is not None
        assert (row.pass_low_by_task, row.pass_high_by_task) == (expected.low, expected.high)
        assert (row.num_tasks, row.num_episodes) == (3, 3)


class TestSummaries:
    def test_every_t_has_a_row_and_the_last_is_for_all(self) -> None:
        places = [place("a", 2), place("a", 1), place("b", 1)]
        told = [trajectory(place=p, passed=p.task_id == "a") for p in places]
        rows = summaries(job("all"), told, places)
        assert [(r.tail_calls, r.num_tasks, r.num_episodes, r.pass_rate) for r in rows] == [
            (1, 2, 2, 0.5),
            (2, 1, 1, 1.0),
            ("all", 2, 3, pytest.approx(2 / 3)),
        ]

    def test_one_t_has_one_row_though_a_task_may_have_fewer_calls(self) -> None:
        places = [place("a", 3), place("b", 1)]
        [row] = summaries(job(3), [trajectory(place=p) for p in places], places)
        assert (row.tail_calls, row.num_tasks) == (3, 2)
        assert [o.tail_calls for o in row.tasks] == [3, 1]

    def test_families_reach_the_outcomes(self) -> None:
        places = [place("a-1"), place("a-2"), place("b")]
        known = dataclasses.replace(job(), families={"a-1": "a", "a-2": "a"})
        [row] = summaries(known, [trajectory(place=p) for p in places], places)
        assert [o.family for o in row.tasks] == ["a", "a", ""]

    def test_a_row_reads_back_as_it_was(self) -> None:
        rows = summaries(job("all"), [trajectory(place=place("a"))], [place("a")])
        for row in rows:
            again = EvaluationRow.model_validate_json(row.model_dump_json(), strict=True)
            assert again == row
