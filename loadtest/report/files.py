"""Writes a run's files: figures, one line a request, the page; and what a series or a single run comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import orjson

from loadtest.drive.record import Record
from loadtest.report.csv_table import csv_table
from loadtest.report.curves import curve_picture
from loadtest.report.junit import checkpoint_checks, junit_of_run, junit_of_series
from loadtest.report.page import page
from loadtest.report.schema import Results
from loadtest.report.series import Series, series_of_one
from loadtest.report.series_page import series_page


def write_series(series: Series, folder: Path) -> list[Path]:
    """Writes the series' own files into `folder`, where its runs have folders of their own."""
    texts = {
        "series.json": series.model_dump_json(indent=2) + "\n",
        "report.html": series_page(
            series, [name for name in series.folders if (folder / name / "report.html").exists()]
        ),
        "results.csv": csv_table(series),
        "junit.xml": junit_of_series(series, {name: checkpoint_checks(folder / name) for name in series.folders}),
        "throughput.svg": curve_picture(series),
    }
    return _write(folder, texts)


def write_summary(results: Results, folder: Path) -> list[Path]:
    """What a single run comes to, for other programs to read; after its checkpoint, where it has one."""
    return _write(
        folder,
        {
            "results.csv": csv_table(series_of_one(results)),
            "junit.xml": junit_of_run(results, checkpoint_checks(folder)),
        },
    )


def write_results(results: Results, records: Sequence[Record], folder: Path) -> list[Path]:
    """Writes into `folder`, made where it is missing; returns what was written."""
    folder.mkdir(parents=True, exist_ok=True)
    figures, lines = folder / "results.json", folder / "requests.jsonl"
    figures.write_text(results.model_dump_json(indent=2) + "\n", encoding="utf-8")
    with lines.open("wb") as file:
        for record in records:
            file.write(orjson.dumps(asdict(record), option=orjson.OPT_APPEND_NEWLINE))
    return [figures, lines, write_page(results, records, folder)]


def write_page(results: Results, records: Sequence[Record], folder: Path) -> Path:
    (written,) = _write(folder, {"report.html": page(results, records)})
    return written


def _write(folder: Path, texts: dict[str, str | None]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in texts.items():
        if text is not None:
            (folder / name).write_text(text, encoding="utf-8")
            written.append(folder / name)
    return written
