import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.routing.estimates import Estimates, Measure


def test_at_first_a_token_is_4_bytes_and_an_answer_200_tokens() -> None:
    estimates = Estimates()
    assert estimates.bytes_per_token("m") == 4.0
    assert estimates.expected_output_tokens("m", None) == 200.0


def test_the_first_answer_replaces_the_guess_and_later_ones_are_averaged() -> None:
    estimates = Estimates()
    estimates.learn("m", 3000, 1000, 50)
    assert estimates.bytes_per_token("m") == pytest.approx(3.0)
    assert estimates.expected_output_tokens("m", None) == pytest.approx(50.0)
    estimates.learn("m", 5000, 1000, 150)
    assert estimates.bytes_per_token("m") == pytest.approx(4.0)
    assert estimates.expected_output_tokens("m", None) == pytest.approx(100.0)


def test_each_model_has_its_own_ratio() -> None:
    estimates = Estimates()
    estimates.learn("m", 3000, 1000, 50)
    assert estimates.bytes_per_token("other") == 4.0
    assert estimates.expected_output_tokens("other", None) == 200.0


def test_models_that_come_and_go_are_forgotten() -> None:
    estimates = Estimates()
    for number in range(3000):
        estimates.learn(f"adapter {number}", 3000, 1000, 50)
    assert estimates.bytes_per_token("adapter 0") == 4.0
    assert estimates.expected_output_tokens("adapter 0", None) == 200.0
    assert estimates.expected_output_tokens("adapter 2999", None) == 50.0


@pytest.mark.parametrize(("prompt_bytes", "prompt_tokens"), [(255, 100), (4000, 63), (0, 0)])
def test_short_prompts_leave_the_ratio(prompt_bytes: int, prompt_tokens: int) -> None:
    estimates = Estimates()
    estimates.learn("m", prompt_bytes, prompt_tokens, 10)
    assert estimates.bytes_per_token("m") == 4.0


def test_an_answer_without_tokens_leaves_the_mean_length() -> None:
    estimates = Estimates()
    estimates.learn("m", 3000, 1000, 0)
    assert estimates.expected_output_tokens("m", None) == 200.0


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
    assert estimates.expected_output_tokens("m", None) > 0


# Prompts that an engine has counted.

KEYS, EDGES = tuple(range(1, 9)), tuple(range(400, 3201, 400))


def measure(
    estimates: Estimates, blocks: int = 8, turn: int = 0, turn_end: int = 0, size: int | None = None
) -> Measure:
    edges = EDGES[:blocks]
    return estimates.measure("m", KEYS[:blocks], edges, edges[-1] if size is None else size, turn, turn_end)


def test_a_prompt_that_no_engine_has_counted_is_estimated_by_its_bytes() -> None:
    assert measure(Estimates()) == Measure(800)
    assert Estimates().measure("m", (), (), 0, 0, 0) == Measure(1)


def test_a_prompt_that_was_counted_is_known() -> None:
    estimates = Estimates()
    estimates.remember(KEYS[7], 900, 50)
    assert measure(estimates) == Measure(900, 3200, 900)
    assert measure(estimates, size=4000) == Measure(1000)  # its text goes on where there are no keys


def test_of_a_longer_conversation_only_what_is_new_is_guessed() -> None:
    estimates = Estimates()
    estimates.remember(KEYS[3], 500, 200)
    assert measure(estimates, turn=4, turn_end=6) == Measure(700 + 200, 2400, 700, True)


@pytest.mark.parametrize(
    ("output", "whole"), [(91, False), (92, True), (200, True), (432, True), (433, False), (0, False), (100_000, False)]
)
def test_an_answer_counts_if_it_came_back_about_as_long_as_it_was(output: int, whole: bool) -> None:
    estimates = Estimates()
    estimates.remember(KEYS[3], 500, output)
    found = measure(estimates, turn=4, turn_end=6)  # 800 bytes, 4 a token
    assert found.answer_is_whole is whole
    assert found.prompt_tokens == (500 + output + 200 if whole else 500 + 400)
    assert found.anchor_size == (2400 if whole else 1600)


def test_a_turn_that_is_asked_again_is_known_as_a_whole_and_its_answer_too() -> None:
    estimates = Estimates()
    estimates.remember(KEYS[3], 500, 200)
    estimates.remember(KEYS[7], 950, 20)
    assert measure(estimates, turn=4, turn_end=6) == Measure(950, 3200, 950, True)


def test_a_later_count_replaces_an_earlier_one() -> None:
    estimates = Estimates()
    for tokens in (900, 901):
        estimates.remember(KEYS[7], tokens, 50)
    assert measure(estimates).prompt_tokens == 901


def test_counts_that_were_longest_unused_are_forgotten() -> None:
    estimates = Estimates()
    for key in range(65_536 + 1024):
        estimates.remember(key, 7, 5)
    assert estimates.measure("m", (0,), (400,), 400, 0, 0).prompt_tokens == 7
    estimates.remember(0, 7, 5)
    estimates.remember(65_536 + 1024, 7, 5)
    assert estimates.measure("m", (0,), (400,), 400, 0, 0).prompt_tokens == 7
    assert estimates.measure("m", (1024,), (400,), 400, 0, 0).prompt_tokens == 100
    assert estimates.measure("m", (1025,), (400,), 400, 0, 0).prompt_tokens == 7
