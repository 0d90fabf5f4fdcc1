from math import exp
from random import Random
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core.request import Demand, Usage
from gateway.core.routing.estimates import OutputLengths

UNKNOWN_TOKENS = 512


def most(lengths: OutputLengths, model: str, tenant: str, limit: int | None) -> int:
    """What an answer has at the high quantile."""
    tokens, margin_tokens = lengths.expected(model, tenant, limit)
    return tokens + margin_tokens


def lognormal(seed: int, median: float, sigma: float = 0.8) -> "Lengths":
    return Lengths(Random(seed), median, sigma)


class Lengths:
    """Lengths of answers as chats have them, their true mean and quantile."""

    def __init__(self, random: Random, median: float, sigma: float) -> None:
        self._random, self._median, self._sigma = random, median, sigma

    def next(self) -> int:
        return max(1, round(self._median * self._random.lognormvariate(0, self._sigma)))

    @property
    def mean(self) -> float:
        return self._median * exp(self._sigma**2 / 2)

    @property
    def ninetieth(self) -> float:
        return self._median * exp(NormalDist(0, self._sigma).inv_cdf(0.9))


def test_until_answers_are_known_the_limit_counts_up_to_a_usual_length() -> None:
    lengths = OutputLengths()
    assert [most(lengths, "m", "t", limit) for limit in (None, 10, 5000, 0)] == [512, 10, 512, 0]


@pytest.mark.parametrize("median", [5, 100, 3000])
@pytest.mark.parametrize("seed", range(3))
def test_a_hundred_answers_give_the_high_quantile(median: float, seed: int) -> None:
    lengths, answers = OutputLengths(), lognormal(seed, median)
    for _ in range(100):
        lengths.learn("m", "", answers.next(), None)
    assert most(lengths, "m", "", None) == pytest.approx(answers.ninetieth, rel=0.5, abs=2)


def test_mean_and_quantile_are_unbiased() -> None:
    """A single estimate is worth fifty answers; many of them agree with the true figures."""
    answers, found, means = lognormal(1, 300), [], []
    for _ in range(40):
        lengths = OutputLengths()
        for _ in range(150):
            lengths.learn("m", "", answers.next(), None)
        found.append(most(lengths, "m", "", None))
        means.append(lengths.expected("m", "", None)[0])
    assert sum(found) / len(found) == pytest.approx(answers.ninetieth, rel=0.08)
    assert sum(means) / len(means) == pytest.approx(answers.mean, rel=0.08)


def test_a_limit_bounds_what_is_reserved_and_its_margin() -> None:
    lengths, answers = OutputLengths(), lognormal(1, 300)
    for _ in range(300):
        lengths.learn("m", "", answers.next(), None)
    tokens, margin_tokens = lengths.expected("m", "", None)
    assert lengths.expected("m", "", tokens + margin_tokens // 2) == (tokens, margin_tokens // 2)
    assert lengths.expected("m", "", 20) == (20, 0)


@pytest.mark.parametrize(("before", "after"), [(50, 1500), (1500, 50)])
def test_a_change_is_followed(before: float, after: float) -> None:
    lengths, then, now = OutputLengths(), lognormal(1, before), lognormal(2, after)
    for _ in range(500):
        lengths.learn("m", "", then.next(), None)
    for _ in range(150):
        lengths.learn("m", "", now.next(), None)
    assert most(lengths, "m", "", None) == pytest.approx(now.ninetieth, rel=0.5)


def test_a_tenant_has_lengths_of_its_own_after_enough_answers() -> None:
    lengths = OutputLengths()
    for _ in range(100):
        lengths.learn("m", "short", 10, None)
        lengths.learn("m", "long", 2000, None)
    assert most(lengths, "m", "short", None) in (10, 11)
    assert 1900 <= most(lengths, "m", "long", None) <= 2100
    assert most(lengths, "m", "new", None) == most(lengths, "m", "", None) >= 1500
    for _ in range(10):
        lengths.learn("m", "new", 5, None)
    assert most(lengths, "m", "new", None) == most(lengths, "m", "", None)
    assert most(lengths, "o", "short", None) == UNKNOWN_TOKENS


def test_answers_that_their_limit_cut_say_nothing_of_how_long_others_become() -> None:
    """Nine of ten are allowed one token only; those that are not are as long as they are."""
    lengths = OutputLengths()
    for _ in range(30):
        for _ in range(9):
            lengths.learn("m", "", 1, 1)
        lengths.learn("m", "", 800, None)
    assert most(lengths, "m", "", 1) == 1
    assert 700 <= most(lengths, "m", "", None) <= 900


def test_where_every_answer_reaches_its_limit_the_limit_is_reserved() -> None:
    lengths = OutputLengths()
    for limit in (256, 1024) * 20:
        lengths.learn("m", "", limit, limit)
    assert [most(lengths, "m", "", limit) for limit in (256, 1024, 2048)] == [256, 1024, 2048]
    assert most(lengths, "m", "", 100_000) < 3000


def test_tenants_are_bounded_and_the_longest_unheard_of_is_forgotten() -> None:
    lengths = OutputLengths(max_tenants=3)
    for _ in range(30):
        for tenant in ("a", "b", "c"):
            lengths.learn("m", tenant, 10, None)
    for _ in range(30):
        lengths.learn("m", "a", 10, None)
    lengths.learn("m", "d", 3000, None)
    assert repr(lengths) == "<OutputLengths of 1 models, 3 tenants>"
    for _ in range(50):
        lengths.learn("m", "d", 3000, None)
    assert most(lengths, "m", "a", None) in (10, 11)
    assert most(lengths, "m", "b", None) == most(lengths, "m", "", None) > 2000


def test_weights_stay_bounded_however_many_answers_there_are() -> None:
    lengths = OutputLengths()
    for number in range(30_000):
        lengths.learn("m", "", 100 if number % 20 else 4000, None)
    assert 200 <= most(lengths, "m", "", None) <= 350  # the mean, which is above the quantile here


@given(st.lists(st.tuples(st.integers(0, 1 << 24), st.none() | st.integers(1, 1 << 24)), max_size=60))
def test_whatever_is_learned_a_reservation_is_positive_and_within_its_limit(
    answers: list[tuple[int, int | None]],
) -> None:
    lengths = OutputLengths()
    for tokens, limit in answers:
        lengths.learn("m", "t", tokens, limit)
    for limit in (1, 77, 1 << 30):
        assert 1 <= most(lengths, "m", "t", limit) <= limit
    assert 1 <= most(lengths, "m", "t", None) <= 1 << 21


def test_what_prompts_have_beyond_their_estimate_is_learned_in_the_mean() -> None:
    lengths = OutputLengths(prompt_excess_tokens=32)
    assert most(lengths, "m", "", 0) == 32
    for prompt_tokens in (120, 110) * 100:
        lengths.answered(Demand("m", prompt_tokens=100), Usage(prompt_tokens, 5))
    assert most(lengths, "m", "", 0) == 15
    for _ in range(300):
        lengths.answered(Demand("m", prompt_tokens=100), Usage(80, 0))
    assert most(lengths, "m", "", 0) == 0, "headroom is not given away"
    assert most(lengths, "other", "", 0) == 32


def test_an_excess_is_shared_by_the_sequences_of_a_request() -> None:
    lengths = OutputLengths()
    for _ in range(300):
        lengths.answered(Demand("m", prompt_tokens=100, sequences=4), Usage(140, 0))
    assert most(lengths, "m", "", 0) == 10, "each of the sequences reserves it"
