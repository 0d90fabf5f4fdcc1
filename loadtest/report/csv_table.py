"""Results as CSV: a row for a run, or for each target and load of a series; units stand in the names of columns."""

from __future__ import annotations

import csv
import io

from loadtest.report.series import FIGURES, UNITS, Series

_PLACE = ("target", "load", "offered", "runs", "valid", "passed")
_ENDS = ("", "_low", "_high")


def csv_table(series: Series) -> str:
    """All figures: the median of the valid runs, the lowest and the highest; empty where a figure was not measured."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_PLACE, *(column(name) + end for name in FIGURES for end in _ENDS)])
    for point in series.points:
        row: list[object] = [getattr(point, name) for name in _PLACE]
        for name in FIGURES:
            spread = point.figures.get(name)
            row += ["", "", ""] if spread is None else [_plain(v) for v in (spread.median, spread.low, spread.high)]
        writer.writerow(row)
    return text.getvalue()


def column(figure: str) -> str:
    """The name of a figure's column."""
    unit = UNITS[figure]
    return f"{figure}_{unit}" if unit else figure


def _plain(value: float) -> str:
    """Six significant digits, never an exponent that a spreadsheet might not read."""
    return f"{float(f'{value:.6g}'):f}".rstrip("0").rstrip(".")
