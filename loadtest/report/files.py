"""Writes and reads the files of runs and series: results.json, requests, pages, CSV and JUnit's XML."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from xml.etree.ElementTree import Element, SubElement, indent, tostring

import orjson
from pydantic import BaseModel, ValidationError

from loadtest.drive.record import Record
from loadtest.report.pages import page, series_page
from loadtest.report.schema import SCHEMA_VERSION, Check, Results
from loadtest.report.series import (
    FIGURES,
    SERIES_SCHEMA_VERSION,
    UNITS,
    Point,
    Ran,
    Series,
    folder_of,
    series_of,
    series_of_one,
)
from loadtest.report.timeline import sweep, timeline

# XML 1.0 has no way at all to write these.
_UNWRITABLE = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_INVALID = "the client was the limit, so the figures are not the server's"
PAGE_NAME = "report.html"
Suite = tuple[str, Sequence[Check]]
_PASSED = {"ok": True, "failed": False}


class _SavedFinding(BaseModel):
    """A check in the form of checkpoint.json; its other fields are not read."""

    name: str
    status: str
    expected: str = ""
    found: str = ""
    why: str = ""


class _File(BaseModel):
    checks: list[_SavedFinding]


def junit_of_run(results: Results, checkpoint: Sequence[Check] = ()) -> str:
    """One suite, and one of what the checkpoint checked; they fail exactly where the run did."""
    suites: list[Suite] = [(f"load test of {results.plan['model']}", run_checks(results))]
    return junit([*suites, ("checkpoint", checkpoint)] if checkpoint else suites)


def run_checks(results: Results) -> list[Check]:
    """One by one; files without checks have the verdict only."""
    verdict = results.verdict
    if verdict.checks:
        return verdict.checks
    found = "; ".join(verdict.reasons)
    valid = Check(name="client keeps up", passed=verdict.valid, message="" if verdict.valid else found)
    passed = verdict.passed if verdict.valid else None
    return [valid, Check(name="errors and SLO", passed=passed, message="" if verdict.passed else found)]


def junit_of_series(series: Series, checkpoints: Mapping[str, Sequence[Check]] | None = None) -> str:
    """A suite for each target, and for what the checkpoint of each run checked; they fail where the series did.

    A load that is more than a target carries is a finding.
    """
    suites: list[Suite] = []
    for target in dict.fromkeys(point.target for point in series.points):
        its = [point for point in series.points if point.target == target]
        checks = [check for point in its for check in _of_point(point)]
        carried = any(point.passed == point.valid and point.valid for point in its)
        found = "no load passed in all its valid runs"
        suites.append(
            (target or "load tests", [*checks, Check(name="some load is carried", passed=carried, message=found)])
        )
    lost = [Check(name=name, passed=False, message=why) for name, why in series.failures.items()]
    suites += [("runs that could not be made", lost)] if lost else []
    suites += [(f"checkpoint of {folder}", checks) for folder, checks in (checkpoints or {}).items() if checks]
    return junit(suites)


def junit(suites: Sequence[Suite]) -> str:
    root = Element("testsuites")
    for name, checks in suites:
        failures, skipped = (sum(check.passed is outcome for check in checks) for outcome in (False, None))
        counts = {"tests": len(checks), "failures": failures, "errors": 0, "skipped": skipped}
        suite = SubElement(root, "testsuite", {"name": _written(name), **{key: str(n) for key, n in counts.items()}})
        for check in checks:
            case = SubElement(suite, "testcase", classname=_written(f"loadtest.{name}"), name=_written(check.name))
            if check.passed is False:
                SubElement(case, "failure", message=_written(check.message))
            elif check.passed is None:
                SubElement(case, "skipped", message=_written(check.message or _INVALID))
    indent(root)
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n"


def _of_point(point: Point) -> list[Check]:
    found = f"{point.runs - point.valid} of {point.runs} runs are invalid: {_INVALID}"
    valid = Check(name=f"{point.load}: client keeps up", passed=point.valid == point.runs, message=found)
    all_passed = point.valid and point.passed == point.valid
    message = f"{point.passed} of {point.valid} valid runs passed"
    return [valid, Check(name=f"{point.load}: passes", passed=True if all_passed else None, message=message)]


def _written(text: str) -> str:
    return _UNWRITABLE.sub("\ufffd", text)


def checkpoint_checks(folder: Path) -> list[Check]:
    """The checks of a run's checkpoint; none without one that can be read: `loadtest verify` reports more of it."""
    try:
        found = _File.model_validate_json((folder / "checkpoint.json").read_bytes()).checks
    except (OSError, ValidationError):
        return []
    return [Check(name=one.name, passed=_PASSED.get(one.status), message=_message(one)) for one in found]


def _message(found: _SavedFinding) -> str:
    differs = f"expected {found.expected}, found {found.found}" if found.expected or found.found else ""
    return "; ".join(filter(None, (differs, found.why))) if found.status != "ok" else ""


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


def write_series(series: Series, folder: Path) -> list[Path]:
    """Writes the series' own files into `folder`, where its runs have folders of their own."""
    first = folder / next(iter(series.folders), "")
    tested = None
    if (first / "results.json").exists():
        tested = _valid(Results, _document(first / "results.json"), first, SCHEMA_VERSION), _checkpoint(first)
    texts = {
        "series.json": series.model_dump_json(indent=2) + "\n",
        "report.html": series_page(
            series, [name for name in series.folders if (folder / name / "report.html").exists()], tested
        ),
        "results.csv": csv_table(series),
        "junit.xml": junit_of_series(series, {name: checkpoint_checks(folder / name) for name in series.folders}),
    }
    return _write(folder, texts)


def write_summary(results: Results, folder: Path) -> list[Path]:
    """The result of a single run, for other programs to read; after its checkpoint, if it has one."""
    return _write(
        folder,
        {
            "results.csv": csv_table(series_of_one(results)),
            "junit.xml": junit_of_run(results, checkpoint_checks(folder)),
        },
    )


def write_results(results: Results, records: Sequence[Record], folder: Path) -> list[Path]:
    """Writes into `folder`, made if missing; returns the written results."""
    folder.mkdir(parents=True, exist_ok=True)
    figures, lines = folder / "results.json", folder / "requests.jsonl"
    figures.write_text(results.model_dump_json(indent=2) + "\n", encoding="utf-8")
    with lines.open("wb") as file:
        for record in records:
            file.write(orjson.dumps(asdict(record), option=orjson.OPT_APPEND_NEWLINE))
    return [figures, lines, write_page(results, records, folder)]


def write_page(results: Results, records: Sequence[Record], folder: Path) -> Path:
    """With the contents of the checkpoint next to it, if there is one."""
    (written,) = _write(folder, {PAGE_NAME: page(results, records, _checkpoint(folder))})
    return written


def _checkpoint(folder: Path) -> dict[str, Any]:
    try:
        document = orjson.loads((folder / "checkpoint.json").read_bytes())
    except (OSError, orjson.JSONDecodeError):
        return {}
    return document if isinstance(document, dict) else {}


def _write(folder: Path, texts: dict[str, str]) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


_Kind = TypeVar("_Kind", Results, Series)
_FIELDS = {field.name for field in fields(Record)}
_TIMELINE_VERSION = 3


class UnreadableError(Exception):
    """There are no results there, or none that can be read; the message says why, for the user."""


@dataclass(frozen=True, slots=True)
class Saved:
    """The contents of a folder: a series, or a run, which can be read as a series of one as well."""

    name: str
    folder: Path
    series: Series
    _: KW_ONLY
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
        return Saved(name, folder, _summed_up_anew(series, folder), run=None, records=[])
    run = _valid(Results, document, file, SCHEMA_VERSION)
    records = _records(folder / "requests.jsonl")
    if records and run.schema_version < _TIMELINE_VERSION:
        levels = sweep((record.sent, record.end) for record in records if record.was_sent)
        run = run.model_copy(update={"timeline": timeline(records, levels)})
    return Saved(name, folder, series_of_one(run), run=run, records=records)


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
    ran = []
    for name, file in files.items():
        target, load, repetition = places[name]
        ran.append(Ran(target, load, repetition, results=_valid(Results, _document(file), file, SCHEMA_VERSION)))
    anew = series_of(ran, series.environment, series.failures)
    if not series.answer:
        return anew
    # Of a search, loads beyond the limit are findings; its answer is made as it ends.
    return anew.model_copy(update={name: getattr(series, name) for name in ("passed", "reasons", "answer")})


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
                found = orjson.loads(line)
                made.append(Record(**{name: value for name, value in found.items() if name in _FIELDS}))
            except (orjson.JSONDecodeError, TypeError, AttributeError):
                raise UnreadableError(f"{file}, line {number}: not a request") from None
    return made
