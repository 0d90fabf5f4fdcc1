"""Results as CSV."""

from __future__ import annotations

import csv
import io

from loadtest.report.files import csv_table
from loadtest.report.series import Series, series_of_one
from tests.unit.loadtest.report.runs import curve_of, records_of, run_of


def _rows(series: Series) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(csv_table(series))))


def test_a_run_is_a_row_with_units_in_the_names_of_its_columns() -> None:
    (row,) = _rows(series_of_one(run_of(records_of(0.1))))
    assert (row["runs"], row["valid"], row["passed"], row["offered"]) == ("1", "1", "1", "1.0")
    assert row["ttft_p50_ms"] == row["ttft_p50_ms_low"] == row["ttft_p50_ms_high"] == "100"
    assert row["failed_ratio"] == "0"
    assert row["goodput_per_second"] == row["itl_p50_ms"] == ""


def test_a_series_has_a_row_for_each_target_and_load_with_its_spread() -> None:
    rows = _rows(curve_of({"direct": 1.0, 'a,"b"': 2.0}))
    assert [(row["target"], row["load"]) for row in rows][:2] == [("direct", "c1"), ('a,"b"', "c1")]
    assert len(rows) == 6
    low, middle, high = (float(rows[0][f"e2e_p50_ms{end}"]) for end in ("_low", "", "_high"))
    assert low < middle < high


def test_runs_and_series_have_the_same_columns() -> None:
    heads = {
        csv_table(series).splitlines()[0] for series in (series_of_one(run_of(records_of(0.1))), curve_of({"": 1}))
    }
    assert len(heads) == 1
