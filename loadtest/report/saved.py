"""Reads what runs and series have written, of this version and of older ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError

from loadtest.drive.record import Record
from loadtest.report.concurrency import sweep
from loadtest.report.schema import SCHEMA_VERSION, Results
from loadtest.report.series import SERIES_SCHEMA_VERSION, Ran, Series, folder_of, series_of, series_of_one
from loadtest.report.timeline import timeline

_Kind = TypeVar("_Kind", Results, Series)
_FIELDS = {field.name for field in fields(Record)}
_TIMELINE_VERSION = 3


class UnreadableError(Exception):
    """There are no results there, or none that can be read; the message says why, for the user."""


@dataclass(frozen=True, slots=True)
class Saved:
    """What a folder holds: a series, or a run, which is told as a series of one as well."""

    name: str
    folder: Path
    series: Series
    run: Results | None
    records: Sequence[Record]


def read(path: Path) -> Saved:
    """A folder of a run or of a series, or its results.json or series.json. Raises UnreadableError."""
    file = path
    if path.is_dir():
        file = next((path / name for name in ("series.json", "results.json") if (path / name).exists()), path)
        if file == path:
            raise UnreadableError(f"{path} holds neither a results.json nor a series.json")
    document = _document(file)
    folder = file.parent
    name = path.name if path.is_dir() and path.name else str(path)
    if "points" in document:
        series = _valid(Series, document, file, SERIES_SCHEMA_VERSION)
        return Saved(name, folder, _summed_up_anew(series, folder), None, [])
    run = _valid(Results, document, file, SCHEMA_VERSION)
    records = _records(folder / "requests.jsonl")
    if records and run.schema_version < _TIMELINE_VERSION:
        levels = sweep((record.sent, record.end) for record in records if record.was_sent)
        run = run.model_copy(update={"timeline": timeline(records, levels)})
    return Saved(name, folder, series_of_one(run), run, records)


def runs_of(saved: Saved) -> list[Saved]:
    """The runs of a series whose files are still there."""
    there = [saved.folder / name for name in saved.series.folders if (saved.folder / name / "results.json").exists()]
    return [read(folder) for folder in there]


def _summed_up_anew(series: Series, folder: Path) -> Series:
    """With the figures of this version, if all its runs are still there."""
    most = len(series.folders) + len(series.failures)
    places = {
        folder_of(point.target, point.load, repetition): (point.target, point.load, repetition)
        for point in series.points
        for repetition in range(most)
    }
    files = {name: folder / name / "results.json" for name in series.folders}
    if not all(name in places and file.exists() for name, file in files.items()):
        return series
    ran = [Ran(*places[name], _valid(Results, _document(file), file, SCHEMA_VERSION)) for name, file in files.items()]
    return series_of(ran, series.environment, series.failures)


def _document(file: Path) -> dict[str, Any]:
    try:
        document = orjson.loads(file.read_bytes())
    except OSError as error:
        raise UnreadableError(f"cannot read {file}: {error.strerror}") from None
    except orjson.JSONDecodeError as error:
        raise UnreadableError(f"{file} is not JSON: {error}") from None
    if not isinstance(document, dict) or not {"points", "verdict"} & set(document):
        raise UnreadableError(f"{file} holds the results of neither a run nor a series")
    return document


def _valid(kind: type[_Kind], document: dict[str, Any], file: Path, newest: int) -> _Kind:
    version = document.get("schema_version", 1)
    if isinstance(version, int) and version > newest:
        raise UnreadableError(f"{file} is of version {version}, and this loadtest reads versions up to {newest}")
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise UnreadableError(f"{file}: {place}: {first['msg']}") from None


def _records(file: Path) -> list[Record]:
    if not file.exists():
        return []
    made = []
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                told = orjson.loads(line)
                made.append(Record(**{name: value for name, value in told.items() if name in _FIELDS}))
            except (orjson.JSONDecodeError, TypeError, AttributeError):
                raise UnreadableError(f"{file}, line {number}: not a request") from None
    return made
