from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from miniverl_dist.reporting.series import extremes, mean_line, means, sums, thinned

GAPPY = st.lists(st.none() | st.floats(-1e6, 1e6), min_size=1, max_size=300)
VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300)


@given(values=VALUES, limit=st.integers(4, 40))
@settings(deadline=None)
def test_thinning_keeps_ends_and_extremes_and_invents_nothing(
    values: list[float], limit: int
) -> None:
    points = list(enumerate(values))
    kept = extremes(points, limit)
    assert len(kept) <= max(limit, 1)
    assert set(kept) <= set(points)
    assert kept == sorted(kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert min(y for _, y in kept) == min(values)
    assert max(y for _, y in kept) == max(values)


def test_a_spike_of_one_step_stays() -> None:
    points = [(step, 500.0 if step == 7777 else 1.0) for step in range(10_000)]
    assert (7777, 500.0) in extremes(points)
    assert len(extremes(points)) <= 400


def test_short_series_are_as_they_were() -> None:
    points = [(1.0, 2.0), (2.0, 1.0), (5.0, 9.0)]
    assert extremes(points, 4) == means(points, 3) == points


@given(values=VALUES, limit=st.integers(1, 40))
@settings(deadline=None)
def test_means_stay_within_and_keep_order(values: list[float], limit: int) -> None:
    found = means(list(enumerate(values)), limit)
    assert len(found) <= max(limit, min(limit, len(values)))
    assert [x for x, _ in found] == sorted(x for x, _ in found)
    assert all(min(values) - 1e-6 <= y <= max(values) + 1e-6 for _, y in found)


@given(values=GAPPY, limit=st.integers(8, 40))
@settings(deadline=None)
def test_gaps_stay_and_numbers_are_thinned_as_ever(values: list[float | None], limit: int) -> None:
    points = list(enumerate(values))
    for kept in (thinned(points, limit), mean_line(points, limit)):
        assert len(kept) <= limit
        assert [x for x, _ in kept] == sorted(x for x, _ in kept)
        numbers = [y for y in values if y is not None]
        assert bool(numbers) == any(y is not None for _, y in kept)
    kept = thinned(points, limit)
    assert set(kept) <= set(points)
    assert (None in values) == (None in [y for _, y in kept])
    if numbers:
        shown = [y for _, y in kept if y is not None]
        assert (min(shown), max(shown)) == (min(numbers), max(numbers))


def test_one_step_without_a_number_among_many_is_a_gap() -> None:
    points = [(step, None if step == 777 else 1.0) for step in range(10_000)]
    assert (777, None) in thinned(points)
    assert len(thinned(points)) <= 400


def test_means_of_equal_stretches() -> None:
    assert means([(1, 1.0), (2, 3.0), (3, 10.0), (4, 20.0)], 2) == [(1.5, 2.0), (3.5, 15.0)]


def test_counts_are_added_up_and_none_is_lost() -> None:
    counts = [(1.0, 2.0), (2.0, 1.0), (999.0, 5.0), (1000.0, 1.0)]
    assert sums(counts, 1, 1000, 100) == [(5.5, 3.0), (995.5, 6.0)]
    assert sums(counts[:2], 1, 2, 100) == counts[:2]
