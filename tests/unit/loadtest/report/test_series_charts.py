"""The batch-size curve and targets against each other."""

from __future__ import annotations

import pytest

from loadtest.report.document import plot_data
from loadtest.report.pages import series_page
from loadtest.report.series import Ran, series_of
from loadtest.report.series_charts import batch_size_curve, ratio_charts, series_charts
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of
from tests.unit.loadtest.report.runs import ENVIRONMENT, curve_of, records_of, run_of


def test_the_batch_size_curve_is_in_all_and_for_each_user_over_doubling_users() -> None:
    in_all, per_user = batch_size_curve(curve_of({"direct": 1.0, "gateway": 2.0}))
    assert [name for _, name in in_all.x.ticks] == ["1", "2", "4"]
    places = [in_all.x.place(value) for value, _ in in_all.x.ticks]
    assert places[1] - places[0] == pytest.approx(places[2] - places[1])
    for total, each in zip(in_all.series, per_user.series, strict=True):
        for (users, tokens), (_, its) in zip(total.points, each.points, strict=True):
            assert tokens is not None
            assert its == pytest.approx(tokens / users)
    spread = in_all.series[0].spread[0]
    assert spread is not None
    assert spread[0] < (in_all.series[0].points[0][1] or 0) < spread[1]


def test_ratios_have_their_spread_at_each_number_of_users() -> None:
    series = curve_of({"direct": 1.0, "gateway": 2.0})
    tokens, *_ = ratio_charts(series)
    (line,) = tokens.series
    assert tokens.title == "Output tokens/s, as a ratio to direct"
    assert [users for users, _ in line.points] == [1, 2, 4]
    assert all(value == pytest.approx(2.0, rel=0.01) for _, value in line.points)
    assert plot_data(tokens)["lines"][0]["spread"] is not None
    html = series_page(series, series.folders)
    assert_it_needs_nothing(html, [f"{folder}/report.html" for folder in series.folders])
    assert "To direct, pair by pair" in html


def test_rates_are_drawn_evenly_and_one_load_not_at_all() -> None:
    rated = [Ran("", f"r{r}", 0, results=run_of(records_of(0.1), concurrency=None, rate_per_second=r)) for r in (1, 2)]
    titles = [chart.title for chart in series_charts(series_of(rated, ENVIRONMENT))]
    assert titles[0] == "Requests/s by requests/s offered"
    assert series_charts(curve_of({"a": 1.0}, users=(4,))) == []
    assert plots_of(series_page(series_of(rated, ENVIRONMENT), []))[0]["data"][0] == [1, 2]
