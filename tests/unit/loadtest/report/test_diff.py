"""What differs between two runs or series."""

from __future__ import annotations

from pathlib import Path

from loadtest.report.diff import Diff, diff
from loadtest.report.diff_page import diff_page
from loadtest.report.diff_tables import colour, figure_rows
from loadtest.report.saved import Saved
from loadtest.report.schema import Results
from loadtest.report.series import Series, series_of_one
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of
from tests.unit.loadtest.report.runs import curve_of, records_of, run_of

_HOSTILE = "</script><b>a"


def _diff(before: Series, after: Series) -> Diff:
    return diff(before, after, {}, {})


def _run(ttft: float, **plan: object) -> Results:
    return run_of(records_of(ttft), **plan)  # type: ignore[arg-type]


def test_what_was_planned_otherwise_is_named_first_and_what_always_differs_is_not() -> None:
    before, after = (series_of_one(_run(0.1, **more)) for more in ({"cache_salt": "x"}, {"max_in_flight": 7}))
    later = after.environment.model_copy(update={"versions": {"loadtest": "2.0"}, "started_at": "2027"})
    after = after.model_copy(update={"environment": later})
    found = diff(
        before,
        after,
        {"servers": [{"name": "a", "pid": 1, "command": ["vllm", "--max-num-seqs", "8"]}]},
        {"servers": [{"name": "a", "pid": 2, "command": ["vllm", "--max-num-seqs", "16"]}]},
    )
    assert found.made == [
        ("plan.max_in_flight", "10000", "7"),
        ("environment.versions.loadtest", "1.0", "2.0"),
        ("servers.a.command", '["vllm", "--max-num-seqs", "8"]', '["vllm", "--max-num-seqs", "16"]'),
    ]


def test_single_runs_are_compared_without_a_spread() -> None:
    (pair,) = _diff(series_of_one(_run(0.1)), series_of_one(_run(0.12, concurrency=2))).pairs
    rows = {cells[0]: cells[1:] for _, cells in figure_rows(pair)}
    assert rows["TTFT p50"] == ["100.0 ms", "120 ms", "+20.0%", "no spread known"]
    assert rows["failed"] == ["0.0%", "0.0%", "same", "no spread known"]
    worse = next(change for change in pair.changes if change.figure == "ttft_p50")
    assert colour(pair, worse) == "worse"


def test_a_change_within_the_spread_is_neither_better_nor_worse() -> None:
    near, far = curve_of({"a": 1.001}), curve_of({"a": 1.5})
    for after, beyond, told in ((near, False, None), (far, True, "better")):
        pair = _diff(curve_of({"a": 1.0}), after).pairs[0]
        change = next(change for change in pair.changes if change.figure == "requests_per_second")
        assert (pair.beyond(change), colour(pair, change)) == (beyond, told)
        assert change.better


def test_series_are_paired_by_target_and_load_and_what_is_left_is_named() -> None:
    found = _diff(curve_of({"a": 1, "b": 1}), curve_of({"b": 1, "c": 1}, users=(2, 4, 8)))
    assert [pair.label for pair in found.pairs] == ["b c2", "b c4"]
    assert "only before: b c1" in found.unmatched
    assert "only after: c c8" in found.unmatched
    (first, *_) = _diff(curve_of({"old": 1}), curve_of({"new": 1})).pairs
    assert first.label == "old c1, then new c1"


def test_the_page_of_two_runs_lays_their_curves_over_each_other() -> None:
    before, after = _run(0.1, url=f"http://{_HOSTILE}"), _run(0.2)
    sides = [
        Saved(name, Path(), series_of_one(run), run, records_of(ttft))
        for name, run, ttft in ((_HOSTILE, before, 0.1), ("b", after, 0.2))
    ]
    found = _diff(sides[0].series, sides[1].series)
    html = diff_page(sides[0], sides[1], found, [f"rule {_HOSTILE}"])
    assert_it_needs_nothing(html)
    assert "<b>a" not in html
    plots = {plot["title"]: plot for plot in plots_of(html)}
    assert {"TTFT p95 over time", "Output tokens per second", "Distribution of TTFT"} <= set(plots)
    assert [line["name"] for line in plots["TTFT p95 over time"]["lines"]] == ["before", "after"]
    assert "Rules are broken." in html
    assert html.index("How they were made") < html.index("Both in one") < html.index("beyond the spread")


def test_the_page_of_two_series_has_their_batch_size_curves() -> None:
    before, after = (Saved(name, Path(), curve_of({"gw": speed}), None, []) for name, speed in (("a", 1), ("b", 2)))
    html = diff_page(before, after, _diff(before.series, after.series), [])
    assert_it_needs_nothing(html)
    first, per_user, *_ = plots_of(html)
    assert [line["name"] for line in first["lines"]] == ["before: gw", "after: gw"]
    assert first["data"][2][0] > 1.9 * first["data"][1][0]
    assert per_user["title"] == "Output tokens per second and user"
