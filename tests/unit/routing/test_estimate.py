import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.routing.estimate import Estimates


def test_until_an_answer_has_told_a_token_is_4_bytes_and_an_answer_200_tokens() -> None:
    estimates = Estimates()
    assert estimates.bytes_per_token("m") == 4.0
    assert estimates.output_tokens == 200.0


def test_the_first_answer_replaces_the_guess_and_later_ones_are_averaged() -> None:
    estimates = Estimates()
    estimates.learn("m", 3000, 1000, 50)
    assert estimates.bytes_per_token("m") == pytest.approx(3.0)
    assert estimates.output_tokens == pytest.approx(50.0)
    estimates.learn("m", 5000, 1000, 150)
    assert estimates.bytes_per_token("m") == pytest.approx(4.0)
    assert estimates.output_tokens == pytest.approx(100.0)


def test_each_model_has_its_own_ratio() -> None:
    estimates = Estimates()
    estimates.learn("m", 3000, 1000, 50)
    assert estimates.bytes_per_token("other") == 4.0


@pytest.mark.parametrize(("prompt_bytes", "prompt_tokens"), [(255, 100), (4000, 63), (0, 0)])
def test_short_prompts_tell_nothing_of_the_ratio(prompt_bytes: int, prompt_tokens: int) -> None:
    estimates = Estimates()
    estimates.learn("m", prompt_bytes, prompt_tokens, 10)
    assert estimates.bytes_per_token("m") == 4.0


def test_an_answer_without_tokens_tells_nothing_of_lengths() -> None:
    estimates = Estimates()
    estimates.learn("m", 3000, 1000, 0)
    assert estimates.output_tokens == 200.0


def test_old_answers_are_forgotten_at_the_rate_of_the_newest_fifty() -> None:
    estimates = Estimates()
    for _ in range(500):
        estimates.learn("m", 3000, 1000, 50)
    for _ in range(150):
        estimates.learn("m", 6000, 1000, 50)
    assert 5.8 < estimates.bytes_per_token("m") < 6.0


@given(
    st.lists(st.tuples(st.integers(0, 10**9), st.integers(0, 10**7), st.integers(0, 10**6)), max_size=30),
)
def test_no_report_however_wrong_drives_the_ratio_out_of_bounds(reports: list[tuple[int, int, int]]) -> None:
    estimates = Estimates()
    for report in reports:
        estimates.learn("m", *report)
    assert 0.5 <= estimates.bytes_per_token("m") <= 16.0
    assert estimates.output_tokens > 0
