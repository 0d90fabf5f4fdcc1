"""Whether a checkpoint still holds by its own files: nothing is asked of any server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from pydantic import ValidationError

from loadtest.checkpoint import accounts
from loadtest.checkpoint.document import Check, Checkpoint, Status, failed
from loadtest.checkpoint.hashes import NoSource, sha256_of, unlike_the_plan
from loadtest.checkpoint.keep import MARKDOWN_NAME, summary_of, workload_of
from loadtest.checkpoint.markdown import markdown
from loadtest.drive.fleet import Harvest
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.report.definitions import redefined
from loadtest.report.schema import Results
from loadtest.report.summarise import Bounds, summarise
from loadtest.report.verdict import judge

RESULTS_NAME, RECORDS_NAME = "results.json", "requests.jsonl"
_MOST_NAMED = 20
_MOST_PROMPTS = 2000
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
    """Hashes, sums, figures, and the verdict."""
    checks = [*_artefacts(made, folder), *files.unreadable]
    results, records = files.results, files.records
    if results is not None:
        checks += _compared("summary", made.summary.model_dump(), summary_of(results).model_dump(), RESULTS_NAME)
    if results is None or records is None:
        return checks
    try:
        again, plan = recomputed(results, records, made.bounds), Plan.model_validate(results.plan)
    except ValueError as error:
        return [*checks, _bad(f"plan in {RESULTS_NAME}", "a plan", _first_line(error))]
    checks += _figures(results, again)
    sent = workload_of(plan, records).model_dump()
    checks += _compared("workload", made.workload.model_dump(), sent, f"{RESULTS_NAME} and {RECORDS_NAME}")
    checks.append(_prompts(plan, records))
    return [*checks, *_accounts(made, results, records), _passed(made, results)]


def recomputed(results: Results, records: Sequence[Record], bounds: Bounds) -> Results:
    """The results anew from the requests. What requests.jsonl does not hold (ITL, the client's load) is taken over.

    Raises ValueError where the plan is none.
    """
    harvest = Harvest(records=list(records), stopped_early=results.verdict.ended_early)
    where, plan = results.environment, Plan.model_validate(results.plan)
    made = summarise(plan, harvest, bounds, where, results.metrics_delta, results.samples)
    made = made.model_copy(
        update={
            "schema_version": results.schema_version,
            "definitions": results.definitions,
            "latency": made.latency.model_copy(update={"itl": results.latency.itl}),
            "client": made.client.model_copy(update={"workers": results.client.workers, "lost": results.client.lost}),
        }
    )
    told = judge(made, bounds.max_error_ratio, backlog=None, ended_early=results.verdict.ended_early)
    return made.model_copy(update={"verdict": told.model_copy(update={"warnings": made.verdict.warnings})})


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


def _figures(recorded: Results, again: Results) -> list[Check]:
    """All figures follow from the requests; where one differs that is defined otherwise today, nothing can be said."""
    wrong = list(differences(recorded.model_dump(mode="json"), again.model_dump(mode="json")))
    changed = {path: versions for path, _, _ in wrong if (versions := redefined(path, recorded.definitions))}
    checks = _told("figures", [one for one in wrong if one[0] not in changed], RECORDS_NAME)
    if changed:
        named = [
            f"{', '.join(path for path in changed if changed[path] == (then, now))}: "
            f"definition {then} in the file, {now} today"
            for then, now in dict.fromkeys(changed.values())
        ]
        checks.append(Check(name="figures defined otherwise today", status=Status.NOT_CHECKED, why="; ".join(named)))
    return checks


def _compared(name: str, recorded: Any, found: Any, source: str) -> list[Check]:
    """One check that all values follow from `source`, or one for each that does not."""
    return _told(name, list(differences(recorded, found)), source)


def _told(name: str, wrong: Sequence[tuple[str, str, str]], source: str) -> list[Check]:
    if not wrong:
        return [Check(name=name, status=Status.OK, expected=f"follows from {source}", found=f"follows from {source}")]
    checks = [
        _bad(f"{name}: {path}", f"{by_source}, by {source}", written)
        for path, written, by_source in wrong[:_MOST_NAMED]
    ]
    if len(wrong) > _MOST_NAMED:
        checks.append(_bad(name, "no difference", f"{len(wrong) - _MOST_NAMED} more"))
    return checks


def _prompts(plan: Plan, records: Sequence[Record]) -> Check:
    """Whether workload and seed give the bodies that were sent."""
    name = "prompts follow from workload and seed"
    try:
        made, wrong = unlike_the_plan(plan, records, _MOST_PROMPTS)
    except NoSource as error:
        return Check(name=name, status=Status.NOT_CHECKED, why=_first_line(error))
    if not made:
        return Check(name=name, status=Status.NOT_CHECKED, why="no request has the hash of its body")
    found = f"{made - len(wrong)} of {made}" + (f"; not request {wrong[0]}" if wrong else "")
    return Check(name=name, status=Status.FAILED if wrong else Status.OK, expected=f"{made} of {made}", found=found)


def _accounts(made: Checkpoint, results: Results, records: Sequence[Record]) -> Iterator[Check]:
    """Caps and sums once more, from the files; each must come out as it is recorded."""
    known = {check.name: check for check in made.checks}
    for check in [*accounts.caps(results, records, made.servers), accounts.usage(results, made.servers)]:
        written = known.get(check.name)
        if written is None:
            continue  # --no-verify
        same = written == check
        verdict = Status.OK if same else Status.FAILED
        yield Check(
            name=f"{check.name}, again", status=verdict, expected=_outcome(check), found=_outcome(written)
        )  # fmt: skip


def _outcome(check: Check) -> str:
    return f"{check.status}: {check.found or check.why}"


def _passed(made: Checkpoint, results: Results) -> Check:
    follows = results.verdict.passed and not failed(made.checks)
    verdict = Status.OK if follows == made.passed else Status.FAILED
    return Check(name="passed", status=verdict, expected=f"{follows}, by verdict and checks", found=str(made.passed))


def _bad(name: str, expected: str, found: str) -> Check:
    return Check(name=name, status=Status.FAILED, expected=expected, found=found)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
