"""The event sweep."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.timeline import Level, highest_within, mean, peak, span_at_least, sweep

_INTERVALS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda pair: (float(pair[0]), float(sum(pair)))), max_size=40
)


@given(_INTERVALS)
def test_the_peak_is_the_most_intervals_that_cover_one_moment(intervals: list[tuple[float, float]]) -> None:
    moments = [start for start, _ in intervals]
    expected = max((sum(a <= moment < b for a, b in intervals) for moment in moments), default=0)
    assert peak(sweep(intervals)) == expected


@given(_INTERVALS)
def test_the_area_under_the_levels_is_the_sum_of_the_lengths(intervals: list[tuple[float, float]]) -> None:
    levels = sweep(intervals)
    length = levels[-1].start - levels[0].start if levels else 0.0
    assert abs(mean(levels) * length - sum(b - a for a, b in intervals)) < 1e-6
    assert not levels or levels[-1].in_flight == 0


def test_back_to_back_requests_of_one_slot_never_count_as_two() -> None:
    assert peak(sweep([(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)])) == 1


def test_the_span_at_a_level_goes_from_its_first_start_to_its_last_end() -> None:
    levels = sweep([(0.0, 10.0), (2.0, 5.0), (6.0, 8.0)])
    assert span_at_least(levels, 2) == (2.0, 8.0)
    assert span_at_least(levels, 3) is None


@given(_INTERVALS)
def test_the_highest_of_all_buckets_is_the_peak(intervals: list[tuple[float, float]]) -> None:
    levels = sweep(intervals)
    highest = highest_within(levels, [float(edge) for edge in range(0, 81, 4)])
    assert max(highest) == peak(levels)


def test_a_level_reaches_into_the_buckets_after_it() -> None:
    assert highest_within([Level(0.5, 2), Level(2.5, 0)], [0.0, 1.0, 2.0, 3.0, 4.0]) == [2, 2, 2, 0]
