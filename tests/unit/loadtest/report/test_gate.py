"""Rules that fail a comparison."""

from __future__ import annotations

import pytest

from loadtest.report.diff import Pair, RuleError, broken, diff, rule_of
from loadtest.report.series import series_of_one
from tests.unit.loadtest.report.runs import records_of, run_of


def _pairs(before: float, after: float, *, lag: float = 0.001, fails: int = 0) -> list[Pair]:
    first = series_of_one(run_of(records_of(before)))
    other = series_of_one(run_of(records_of(after, fails=fails), lag=lag))
    return diff(first, other, {}, {}).pairs


@pytest.mark.parametrize(
    ("rule", "complaint"),
    [
        ("ttft_p95>+5%", "ttft_p95 went from 100 to 120 ms (+20.0%) [ttft_p95>+5%]"),
        ("ttft_p95>+25%", None),
        ("ttft_p95 > +19", "ttft_p95 went from 100 to 120 ms [ttft_p95 > +19]"),
        ("ttft_p95>+21", None),
        ("ttft_p95>119.5", "ttft_p95 is 120 ms [ttft_p95>119.5]"),
        ("ttft_p95>121", None),
        ("tpot_p50<-1%", "tpot_p50 went from 75.0 to 70 ms (-6.7%) [tpot_p50<-1%]"),
        ("tpot_p50<-10%", None),
        ("requests_per_second<+0.5%", "requests_per_second went from 2.63 to 2.63 (+0.0%) [requests_per_second<+0.5%]"),
        ("failed_ratio>0", None),
    ],
)
def test_a_rule_is_about_a_change_or_a_value(rule: str, complaint: str | None) -> None:
    assert broken([rule_of(rule)], _pairs(0.1, 0.12)) == ([complaint] if complaint else [])


def test_from_zero_any_growth_is_more_than_every_percentage() -> None:
    assert broken([rule_of("failed_ratio>+900%")], _pairs(0.1, 0.1, fails=1)) != []
    assert broken([rule_of("failed_ratio>+0%")], _pairs(0.1, 0.1)) == []


def test_what_cannot_be_believed_or_was_not_measured_breaks_the_rule() -> None:
    assert broken([rule_of("ttft_p95>+50%")], _pairs(0.1, 0.1, lag=0.9)) == ["no valid run after [ttft_p95>+50%]"]
    assert broken([rule_of("attainment<0.5")], _pairs(0.1, 0.1)) == ["no attainment after [attainment<0.5]"]
    assert broken([rule_of("ttft_p95>5")], []) == ["nothing was measured in both"]
    assert broken([], []) == []


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ttft_p95", "a rule is such as"),
        ("ttft_p95>=5", "a rule is such as"),
        ("ttft_p95>5ms", "a rule is such as"),
        ("ttft>5", "no figure is called ttft; there are requests_per_second, "),
        ("ttft_p95>5%", "a percentage is a change, so it has a sign: ttft_p95>+5%"),
    ],
)
def test_a_rule_that_cannot_be_read_says_why(text: str, why: str) -> None:
    with pytest.raises(RuleError) as error:
        rule_of(text)
    assert why in str(error.value)
