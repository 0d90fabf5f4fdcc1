"""What differs between two runs or series."""

from __future__ import annotations

from random import Random
from statistics import median

import pytest

from loadtest.report.diff import Diff, colour, diff, figure_rows
from loadtest.report.schema import Results
from loadtest.report.series import FIGURES, Point, Series, Spread, series_of_one
from tests.unit.loadtest.report.runs import ENVIRONMENT, curve_of, records_of, run_of


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


def test_single_runs_are_compared_and_nothing_is_distinguished() -> None:
    (pair,) = _diff(series_of_one(_run(0.1)), series_of_one(_run(0.12, concurrency=2))).pairs
    rows = {cells[0]: cells[1:] for _, cells in figure_rows(pair)}
    assert rows["TTFT p50"] == ["100 ms", "120 ms", "+20.0%", "too few runs"]
    assert rows["failed"] == ["0.0%", "0.0%", "same", "too few runs"]
    assert {colour(change) for change in pair.changes} == {None}


@pytest.mark.parametrize(
    ("repeat", "speed", "significance", "reported"),
    [(3, 1.5, "too few runs", None), (4, 1.5, "yes", "better"), (4, 0.5, "yes", "worse"), (4, 1.001, "no, tie", None)],
)
def test_a_change_is_better_or_worse_only_where_enough_runs_shows_it(
    repeat: int, speed: float, significance: str, reported: str | None
) -> None:
    pair = _diff(curve_of({"a": 1.0}, repeat), curve_of({"a": speed}, repeat)).pairs[0]
    change = next(change for change in pair.changes if change.figure == "requests_per_second")
    assert (change.significance, colour(change)) == (significance, reported)


def test_figures_of_two_definitions_are_never_distinguished() -> None:
    before, after = curve_of({"a": 1.0}, 4), curve_of({"a": 2.0}, 4)
    before = before.model_copy(update={"definitions": before.definitions | {"steady": 0}})
    reported = {change.figure: change.significance for change in _diff(before, after).pairs[0].changes}
    assert reported["requests_per_second"] == reported["output_tokens_per_second"] == "defined otherwise"
    assert reported["ttft_p50"] == "yes"


def _series(draw: Random, runs: int, shift: float, shared: float) -> Series:
    """A load with every figure there is; `shared`: how much of a run's luck all of its figures have in common."""
    luck = [draw.gauss(0, 1) for _ in range(runs)]
    figures = {}
    for name in FIGURES:
        values = [100 + shift + shared * one + (1 - shared**2) ** 0.5 * draw.gauss(0, 1) for one in luck]
        figures[name] = Spread(median=median(values), low=min(values), high=max(values), values=values)
    point = Point(target="", load="c1", offered=1, runs=runs, valid=runs, passed=runs, figures=figures)
    return Series(environment=ENVIRONMENT, plan={}, points=[point], differences=[], folders=[], passed=True, reasons=[])


def _named(draw: Random, runs: int, shift: float, shared: float) -> int:
    """How many of the figures of a report are called significant."""
    pairs = _diff(_series(draw, runs, 0, shared), _series(draw, runs, shift, shared)).pairs
    return sum(change.significance == "yes" for pair in pairs for change in pair.changes)


def test_of_equal_runs_one_report_in_twenty_at_most_calls_any_figure_different() -> None:
    draw, reports = Random(7), 150
    cases = [(runs, shared) for runs in (3, 4, 5, 8) for shared in (0, 0.7, 0.99)]
    wrong = {case: sum(_named(draw, case[0], 0, case[1]) > 0 for _ in range(reports)) for case in cases}
    assert sum(wrong.values()) <= 0.05 * reports * len(cases)
    # Each by itself, as far as so many reports can show it: 5 % and three standard errors.
    assert max(wrong.values()) <= 0.05 * reports + 3 * (0.05 * 0.95 * reports) ** 0.5
    assert all(not count for (runs, _), count in wrong.items() if runs == 3)


def test_more_runs_see_more_of_a_true_change() -> None:
    draw = Random(7)
    found = [sum(_named(draw, runs, 2, 0.7) for _ in range(20)) / (20 * len(FIGURES)) for runs in (4, 6, 10)]
    assert found == sorted(found)
    assert found[-1] > 0.95


def test_series_are_paired_by_target_and_load_and_what_is_left_is_named() -> None:
    found = _diff(curve_of({"a": 1, "b": 1}), curve_of({"b": 1, "c": 1}, users=(2, 4, 8)))
    assert [pair.label for pair in found.pairs] == ["b c2", "b c4"]
    assert "only before: b c1" in found.unmatched
    assert "only after: c c8" in found.unmatched
    (first, *_) = _diff(curve_of({"old": 1}), curve_of({"new": 1})).pairs
    assert first.label == "old c1, then new c1"
