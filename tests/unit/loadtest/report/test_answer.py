"""Searches, curves and repetitions in words."""

from __future__ import annotations

from random import Random

import pytest

from loadtest.drive.search import Aim, LoadSearch
from loadtest.report.answer import answer_of, carries
from loadtest.report.curve import curve_table, curve_words
from loadtest.report.repeating import half_width, is_settled, spoilt_loads, why_unsettled
from loadtest.report.schema import Bounds
from loadtest.report.series import Ran, series_of
from loadtest.report.statistics import mean_interval
from tests.unit.loadtest.report.runs import ENVIRONMENT, curve_of, records_of, run_of

_BOUNDS = Bounds(ttft_ms=150)


def _ran(aim: Aim, load: float, ttft: float, **more: float) -> Ran:
    plan = {"concurrency": int(load)} if aim is Aim.CONCURRENCY else {"concurrency": None, "rate_per_second": load}
    return Ran("", f"{load:g}", 0, results=run_of(records_of(ttft), _BOUNDS, **more, **plan))  # type: ignore[arg-type]


def _found(aim: Aim, ttfts: dict[float, float]) -> tuple[LoadSearch, list[Ran]]:
    search, ran = LoadSearch(aim), []
    for load, ttft in ttfts.items():
        ran.append(_ran(aim, load, ttft))
        for _ in range(2):
            search.take(load, passed=carries(ran[-1].results))
    return search, ran


@pytest.mark.parametrize(("aim", "unit"), [(Aim.CONCURRENCY, "users"), (Aim.RATE, "requests/s")])
def test_the_answer_names_the_load_the_slo_and_what_limited_it(aim: Aim, unit: str) -> None:
    answer = answer_of(*_found(aim, {8: 0.1, 16: 0.2}))
    assert answer.load == 8
    assert answer.lines[0] == (
        f"8 {unit} within the SLO (TTFT at most 150 ms for 95% of requests), limited by TTFT: "
        f"0.0% of requests kept it, p95 200 ms (at 16 {unit})."
    )
    assert answer.lines[1].startswith(f"At 8 {unit}: ")


def test_no_load_is_an_answer_too() -> None:
    answer = answer_of(*_found(Aim.CONCURRENCY, {8: 0.3, 1: 0.2}))
    assert answer.load is None
    assert answer.lines[0].startswith("No load keeps the SLO")
    assert "At 1 users: TTFT: 0.0% of requests kept it" in answer.lines[0]


def test_a_limit_that_is_the_clients_is_called_so() -> None:
    search, ran = _found(Aim.CONCURRENCY, {8: 0.1})
    ran.append(_ran(Aim.CONCURRENCY, 16, 0.1, lag=0.2))
    search.take(16, passed=carries(ran[-1].results))
    assert "limited by the client itself, not the server: client worker 0" in answer_of(search, ran).lines[0]


def test_users_without_a_request_are_no_load() -> None:
    """A closed loop with fewer requests than users was never as large as it is called."""
    sent = len(records_of(0.1))
    answer = answer_of(*_found(Aim.CONCURRENCY, {sent: 0.1, sent + 1: 0.1}))
    assert answer.load == sent
    assert f"limited by --requests or the file: {sent} requests are fewer than users" in answer.lines[0]


def test_a_server_that_took_everything_has_no_limit() -> None:
    assert "no limit was found" in answer_of(*_found(Aim.CONCURRENCY, {8: 0.1})).lines[0]


def test_the_curve_says_what_users_bring_and_what_each_pays() -> None:
    series = curve_of({"": 1.0})  # the same tokens, whatever the users
    rows = curve_table(series)
    assert [row[0] for row in rows] == ["1", "2", "4"]
    assert rows[2][2] == "1.0x"
    words = curve_words(series)
    assert "each user gets 75% fewer" in words[0]
    assert "it is saturated" in words[1]
    assert curve_words(curve_of({"": 1.0}, users=(4,))) == []


@pytest.mark.parametrize(("last", "words"), [(1.05, "it is saturated"), (2.5, "near"), (3.5, "try more users")])
def test_the_last_step_of_the_curve_says_whether_to_try_more_users(last: float, words: str) -> None:
    series = curve_of({"": 1.0}, users=(1, 4))
    first = series.points[0].figures["output_tokens_per_second"]
    more = first.model_copy(update={"median": last * first.median})
    second = series.points[1]
    second = second.model_copy(update={"figures": second.figures | {"output_tokens_per_second": more}})
    assert words in curve_words(series.model_copy(update={"points": [series.points[0], second]}))[1]


def test_two_targets_are_no_curve() -> None:
    assert curve_words(curve_of({"a": 1.0, "b": 2.0})) == []


def test_a_series_is_settled_when_every_load_is_known_to_the_share_asked_for() -> None:
    def ran(repeat: int, spread: float) -> list[Ran]:
        return [
            Ran(
                "",
                f"c{users}",
                n,
                results=run_of(records_of(0.1, seconds=0.4 * (1 + spread * (n % 2))), concurrency=users),
            )
            for n in range(repeat)
            for users in (1, 2)
        ]

    assert not is_settled([], 0.03)
    assert not is_settled(ran(3, 0.0), 0.03)  # three runs cannot differ from anything
    assert is_settled(ran(4, 0.001), 0.03)
    assert not is_settled(ran(4, 0.2), 0.03)
    assert not is_settled([*ran(4, 0.001), *ran(4, 0.2)], 0.03)


@pytest.mark.parametrize("spread", [0.01, 0.02, 0.04, 0.08])
def test_stopping_at_the_first_narrow_interval_costs_little_confidence(spread: float) -> None:
    draw, held, series = Random(3), 0, 600
    for _ in range(series):
        values = [draw.gauss(100, 100 * spread)]
        while ((width := half_width(values)) is None or width > 0.03) and len(values) < 40:
            values.append(draw.gauss(100, 100 * spread))
        interval = mean_interval(values)
        assert interval is not None
        held += interval[0] <= 100 <= interval[1]
    assert held / series >= 0.90


def test_where_the_client_was_always_the_limit_nothing_is_said_of_the_server() -> None:
    search, ran = LoadSearch(Aim.CONCURRENCY), []
    for load in (8, 1):
        ran.append(_ran(Aim.CONCURRENCY, load, 0.1, lag=0.2))
        search.take(load, passed=carries(ran[-1].results))
    answer = answer_of(search, ran)
    assert answer.load is None
    assert answer.lines[0].startswith("Nothing is known of the server: every run was limited by the client itself")


def test_a_search_that_was_disturbed_says_so_and_what_was_seen_once() -> None:
    search, ran = LoadSearch(Aim.CONCURRENCY), [_ran(Aim.CONCURRENCY, 8, 0.1)]
    search.take(8, passed=True)
    for _ in range(3):
        search.take_spoilt(8)
    answer = answer_of(search, ran)
    assert answer.load is None
    assert answer.lines[0].startswith("The search was given up: other work disturbed the client in 3 runs")
    assert answer.lines[1].startswith("8 users kept the SLO (TTFT at most 150 ms for 95% of requests) in one run")


def test_a_curve_of_runs_that_the_client_spoilt_is_not_the_servers() -> None:
    ran = [
        Ran("", f"c{users}", 0, results=run_of(records_of(0.1), lag=0.9 if users == 2 else 0.001, concurrency=users))
        for users in (1, 2)
    ]
    series = series_of(ran, ENVIRONMENT)
    assert curve_words(series) == ["The client could not keep up at 2 users: this is not the server's curve."]
    assert [row[0] for row in curve_table(series)] == ["1", "2 (invalid)"]


def test_repeating_ends_where_every_run_is_spoilt_and_says_so() -> None:
    spoilt = [Ran("", "c1", n, results=run_of(records_of(0.1), lag=0.9)) for n in range(4)]
    assert spoilt_loads(spoilt[:3]) == []
    assert spoilt_loads(spoilt) == ["c1"]
    assert "no run was valid at c1" in why_unsettled(spoilt, 0.03)
    valid = Ran("", "c1", 4, results=run_of(records_of(0.1)))
    assert spoilt_loads([*spoilt, valid]) == []
    assert why_unsettled([*spoilt, valid], 0.03) == "5 repetitions did not bring the intervals down to ±3%"
