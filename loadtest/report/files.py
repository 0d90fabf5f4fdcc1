"""Writes a run's files: results.json, one line a request, and the report as a page of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from loadtest.drive.record import Record
from loadtest.report.page import page
from loadtest.report.schema import Results
from loadtest.report.series import Series
from loadtest.report.series_page import series_page


def write_series(series: Series, folder: Path) -> list[Path]:
    """Writes the series' own files into `folder`, where its runs have folders of their own."""
    folder.mkdir(parents=True, exist_ok=True)
    figures, report = folder / "series.json", folder / "report.html"
    figures.write_text(series.model_dump_json(indent=2) + "\n", encoding="utf-8")
    report.write_text(series_page(series), encoding="utf-8")
    return [figures, report]


def write_results(results: Results, records: Sequence[Record], folder: Path) -> list[Path]:
    """Writes into `folder`, made where it is missing; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    figures, lines, report = folder / "results.json", folder / "requests.jsonl", folder / "report.html"
    figures.write_text(results.model_dump_json(indent=2) + "\n", encoding="utf-8")
    with lines.open("wb") as file:
        for record in records:
            file.write(orjson.dumps(asdict(record), option=orjson.OPT_APPEND_NEWLINE))
    report.write_text(page(results, records), encoding="utf-8")
    return [figures, lines, report]
