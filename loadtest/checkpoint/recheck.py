"""Checks a run's files against its checkpoint, without asking a server: hashes, completeness, known definitions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from loadtest.checkpoint.document import Check, Checkpoint, Status, failed
from loadtest.checkpoint.hashes import sha256_of
from loadtest.checkpoint.keep import MARKDOWN_NAME, summary_of, workload_of
from loadtest.checkpoint.markdown import markdown
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.report.definitions import DEFINITIONS, redefined
from loadtest.report.schema import Results

RESULTS_NAME, RECORDS_NAME = "results.json", "requests.jsonl"
_MOST_NAMED = 20
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Files:
    """A run's files, as far as they can be read."""

    results: Results | None
    records: Sequence[Record] | None
    unreadable: Sequence[Check]


def read_files(folder: Path) -> Files:
    """Results and requests; a check that failed for each that is not what a run writes."""
    results: Results | None = None
    records: list[Record] | None = None
    bad: list[Check] = []
    try:
        results = Results.model_validate_json((folder / RESULTS_NAME).read_bytes())
    except (OSError, ValidationError) as error:
        bad.append(_bad(f"schema of {RESULTS_NAME}", "what a run writes", _first_line(error)))
    try:
        lines = (folder / RECORDS_NAME).read_bytes().splitlines()
        records = [Record(**orjson.loads(line)) for line in lines]
    except (OSError, TypeError, ValueError) as error:
        bad.append(_bad(f"schema of {RECORDS_NAME}", "what a run writes", _first_line(error)))
    return Files(results, records, bad)


def recheck(made: Checkpoint, folder: Path, files: Files) -> list[Check]:
    """Hashes and completeness of the files, their definitions, and the summary and verdict taken from results.json."""
    checks = [*_artefacts(made, folder), *files.unreadable]
    results, records = files.results, files.records
    if results is None:
        return checks
    checks += [_definitions(results), _passed(made, results)]
    checks += _compared("summary", made.summary.model_dump(), summary_of(results).model_dump(), RESULTS_NAME)
    if records is None:
        return checks
    try:
        sent = workload_of(Plan.model_validate(results.plan), records).model_dump()
    except ValueError as error:
        return [*checks, _bad(f"plan in {RESULTS_NAME}", "a plan", _first_line(error))]
    return [*checks, *_compared("workload", made.workload.model_dump(), sent, f"{RESULTS_NAME} and {RECORDS_NAME}")]


def differences(recorded: Any, found: Any, path: str = "") -> Iterator[tuple[str, str, str]]:
    """(path, recorded, found) of every value that differs between two JSON documents."""
    if isinstance(recorded, Mapping) and isinstance(found, Mapping):
        for name in dict.fromkeys([*recorded, *found]):
            inner = f"{path}.{name}" if path else str(name)
            yield from differences(recorded.get(name, _ABSENT), found.get(name, _ABSENT), inner)
    elif isinstance(recorded, list | tuple) and isinstance(found, list | tuple) and len(recorded) == len(found):
        for place, (one, other) in enumerate(zip(recorded, found, strict=True)):
            yield from differences(one, other, f"{path}[{place}]")
    elif recorded != found:
        yield path, str(recorded), str(found)


def _artefacts(made: Checkpoint, folder: Path) -> Iterator[Check]:
    for name in (RESULTS_NAME, RECORDS_NAME):
        if name not in made.artefacts:
            yield _bad(f"sha256 of {name}", "a hash in checkpoint.json", "none")
    for name, digest in made.artefacts.items():
        try:
            found = sha256_of(folder / Path(name).name)
        except OSError as error:
            found = error.strerror or str(error)
        verdict = Status.OK if found == digest else Status.FAILED
        yield Check(name=f"sha256 of {name}", status=verdict, expected=digest, found=found)
    try:
        same = (folder / MARKDOWN_NAME).read_text(encoding="utf-8") == markdown(made)
    except (OSError, UnicodeDecodeError):
        same = False
    told = "it does" if same else "it says something else"
    verdict = Status.OK if same else Status.FAILED
    yield Check(name=MARKDOWN_NAME, status=verdict, expected="says what checkpoint.json says", found=told)


def _definitions(results: Results) -> Check:
    """Every definition in the file is one that this version knows; older ones are named."""
    recorded = results.definitions
    unknown = [f"{path} {number}" for path, number in recorded.items() if not 1 <= number <= DEFINITIONS.get(path, 0)]
    if unknown:
        found = f"unknown: {', '.join(unknown)}"
        return _bad("definitions", "versions that this loadtest knows", found)
    older = [f"{path} {both[0]} (now {both[1]})" for path in DEFINITIONS if (both := redefined(path, recorded))]
    found = f"known; not those of today: {', '.join(older)}" if older else "those of today"
    return Check(name="definitions", status=Status.OK, expected="known", found=found)


def _compared(name: str, recorded: Any, found: Any, source: str) -> list[Check]:
    """One check that all values are those of `source`, or one for each that is not."""
    wrong = list(differences(recorded, found))
    if not wrong:
        return [Check(name=name, status=Status.OK, expected=f"follows from {source}", found=f"follows from {source}")]
    checks = [
        _bad(f"{name}: {path}", f"{by_source}, by {source}", written)
        for path, written, by_source in wrong[:_MOST_NAMED]
    ]
    if len(wrong) > _MOST_NAMED:
        checks.append(_bad(name, "no difference", f"{len(wrong) - _MOST_NAMED} more"))
    return checks


def _passed(made: Checkpoint, results: Results) -> Check:
    follows = results.verdict.passed and not failed(made.checks)
    verdict = Status.OK if follows == made.passed else Status.FAILED
    return Check(name="passed", status=verdict, expected=f"{follows}, by verdict and checks", found=str(made.passed))


def _bad(name: str, expected: str, found: str) -> Check:
    return Check(name=name, status=Status.FAILED, expected=expected, found=found)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
