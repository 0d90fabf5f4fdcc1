"""What the script of a page draws its plots from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.report.chart import Chart, ChartSeries, doubling, linear, logarithmic
from loadtest.report.document import plot_data, render
from tests.unit.loadtest.report.pages import plots_of, read

_TIME = linear(0, 10, 0, 100, 5, " s")
_COUNTS = linear(0, 4, 100, 0, 4)


def _chart(*series: ChartSeries, **more: object) -> Chart:
    fields = {"title": "t", "note": "n", "x": _TIME, "y": _COUNTS, "series": series} | more
    return Chart(**fields)  # type: ignore[arg-type]


def test_lines_share_their_moments_and_gaps_stay_gaps() -> None:
    data = plot_data(
        _chart(ChartSeries("a", "s1", [(0, 1), (1, None), (2, 3)]), ChartSeries("b", "s2", [(0, 2), (1, 2), (2, 2)]))
    )
    assert data["data"] == [[0, 1, 2], [1, None, 3], [2, 2, 2]]
    assert [line["joined"] for line in data["lines"]] == [False, False]
    assert data["x"]["time"]
    assert data["y"]["range"] == [0, 4]


def test_a_line_with_moments_of_its_own_goes_on_over_those_of_others() -> None:
    data = plot_data(_chart(ChartSeries("a", "s1", [(0, 1), (2, 3)]), ChartSeries("b", "s2", [(0, 2), (1, 2), (2, 2)])))
    assert data["data"] == [[0, 1, 2], [1, None, 3], [2, 2, 2]]
    assert [line["joined"] for line in data["lines"]] == [True, False]


def test_along_a_doubling_axis_positions_are_reported_and_values_are_names() -> None:
    line = ChartSeries("a", "s1", [(1, 1), (2, 2), (4, 4)], spread=[(1, 1), (1.5, 2.5), None])
    data = plot_data(_chart(line, x=doubling([1, 2, 4], 1, 4, 0, 100), x_shown=["1", "2", "4"]))
    assert data["data"][0] == pytest.approx([0, 50, 100])
    assert data["x"]["labels"] == ["1", "2", "4"]
    assert data["x"]["ticks"] == [[0, "1"], [50, "2"], [100, "4"]]
    assert data["lines"][0]["spread"] == [[1, 1], [1.5, 2.5], None]


def test_a_log_axis_has_its_values_and_says_so() -> None:
    data = plot_data(_chart(ChartSeries("a", "s1", [(0, 20)]), y=logarithmic(10, 100, 100, 0)))
    assert (data["y"]["log"], data["y"]["unit"], data["y"]["range"]) == (True, "ms", [10, 100])


@given(st.text())
def test_no_name_leaves_the_script_that_it_stands_in(name: str) -> None:
    page = render("page.html", "", "", [_chart(ChartSeries(name, "s1", [(0, 1)]), title=name, note=name)])
    assert plots_of(page)[0]["lines"][0]["name"] == name
    assert read(page).tags["script"] == 3


def test_a_figure_has_a_caption_and_a_place_for_its_plot() -> None:
    line = ChartSeries("a", "s1", [(0, 1), (1, 2)])
    charts = [_chart(line, title="first <b>"), _chart(line, dots=[(0.5, 1)], marks=[1.0])]
    page = render("page.html", "", "", charts)
    assert "first &lt;b&gt;" in page
    assert [f'data-plot="{number}"' in page for number in range(3)] == [True, True, False]
    assert plots_of(page)[1]["dots"] == [[0.5], [1]]
    assert read(page).tags["svg"] == 0
