"""The peak to come, against stepping every sequence to its end."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.core.routing.kv_reservations import Growth, PeakForecast

courses = st.builds(Growth, st.integers(0, 40), st.integers(0, 200), st.integers(1, 3))


def stepped(base_tokens: int, running: list[Growth]) -> int:
    """The most that is taken at any step; a request holds all its tokens until the step of its last one is over."""
    return max(
        base_tokens
        + sum(course.present_tokens + step * course.growth_tokens for course in running if step <= course.left_steps)
        for step in range(max((course.left_steps for course in running), default=0) + 1)
    )


@given(base=st.integers(0, 100), running=st.lists(courses, max_size=12))
def test_the_peak_is_that_of_stepping_all_to_their_ends(base: int, running: list[Growth]) -> None:
    assert PeakForecast(base, running).peak_tokens == stepped(base, running)


@given(base=st.integers(0, 100), running=st.lists(courses, max_size=12), newcomer=courses)
def test_a_newcomer_of_one_sequence_is_reckoned_exactly_and_one_of_several_safely(
    base: int, running: list[Growth], newcomer: Growth
) -> None:
    peak, true = PeakForecast(base, running).peak_with(newcomer), stepped(base, [*running, newcomer])
    if newcomer.growth_tokens == 1:
        assert peak == true
    assert (
        true <= peak <= stepped(base, running) + newcomer.present_tokens + newcomer.growth_tokens * newcomer.left_steps
    )


def test_sequences_that_began_together_need_the_sum_and_others_do_not() -> None:
    together = [Growth(100, 0, 1)] * 4
    assert PeakForecast(0, together).peak_tokens == 400
    apart = [Growth(100 - done, done, 1) for done in (0, 25, 50, 75)]
    assert PeakForecast(0, apart).peak_tokens == 250
