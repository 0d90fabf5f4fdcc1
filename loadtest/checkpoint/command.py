"""`loadtest verify`: checks a run against its checkpoint again, ends with an exit code.

Files are checked offline: hashes, completeness, known definitions. Servers are compared with what they were then.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from pydantic import ValidationError
from rich.console import Console

from loadtest.access import Access
from loadtest.checkpoint.document import Checkpoint, Finding, GreedyAnswer, ServerInfo, Status, failed
from loadtest.checkpoint.fingerprints import sha256_of
from loadtest.checkpoint.keep import JSON_NAME, MARKDOWN_NAME, summary_of, workload_of
from loadtest.checkpoint.markdown import check_line, markdown
from loadtest.checkpoint.questions import open_asker
from loadtest.checkpoint.servers import look
from loadtest.checkpoint.verification import questions_of, server_label, verify_live
from loadtest.console import say
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.target import base_url
from loadtest.report.schema import DEFINITIONS, Results, redefined

RESULTS_NAME, RECORDS_NAME = "results.json", "requests.jsonl"
_MOST_NAMED = 20
_ABSENT = "absent"


@dataclass(frozen=True, slots=True)
class Files:
    """A run's files, as far as they can be read."""

    results: Results | None
    records: Sequence[Record] | None
    unreadable: Sequence[Finding]


def read_files(folder: Path) -> Files:
    """Results and requests; a check that failed for each that is not what a run writes."""
    results: Results | None = None
    records: list[Record] | None = None
    bad: list[Finding] = []
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


def recheck(made: Checkpoint, folder: Path, files: Files) -> list[Finding]:
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


def _artefacts(made: Checkpoint, folder: Path) -> Iterator[Finding]:
    for name in (RESULTS_NAME, RECORDS_NAME):
        if name not in made.artefacts:
            yield _bad(f"sha256 of {name}", "a hash in checkpoint.json", "none")
    for name, digest in made.artefacts.items():
        try:
            found = sha256_of(folder / Path(name).name)
        except OSError as error:
            found = error.strerror or str(error)
        verdict = Status.OK if found == digest else Status.FAILED
        yield Finding(name=f"sha256 of {name}", status=verdict, expected=digest, found=found)
    try:
        same = (folder / MARKDOWN_NAME).read_text(encoding="utf-8") == markdown(made)
    except (OSError, UnicodeDecodeError):
        same = False
    text = "it does" if same else "it says something else"
    verdict = Status.OK if same else Status.FAILED
    yield Finding(name=MARKDOWN_NAME, status=verdict, expected="says what checkpoint.json says", found=text)


def _definitions(results: Results) -> Finding:
    """Every definition in the file is one that this version knows; older ones are named."""
    recorded = results.definitions
    unknown = [f"{path} {number}" for path, number in recorded.items() if not 1 <= number <= DEFINITIONS.get(path, 0)]
    if unknown:
        found = f"unknown: {', '.join(unknown)}"
        return _bad("definitions", "versions that this loadtest knows", found)
    older = [f"{path} {both[0]} (now {both[1]})" for path in DEFINITIONS if (both := redefined(path, recorded))]
    found = f"known; not those of today: {', '.join(older)}" if older else "those of today"
    return Finding(name="definitions", status=Status.OK, expected="known", found=found)


def _compared(name: str, recorded: Any, found: Any, source: str) -> list[Finding]:
    """One check that all values are those of `source`, or one for each that is not."""
    wrong = list(differences(recorded, found))
    if not wrong:
        return [Finding(name=name, status=Status.OK, expected=f"follows from {source}", found=f"follows from {source}")]
    checks = [
        _bad(f"{name}: {path}", f"{by_source}, by {source}", written)
        for path, written, by_source in wrong[:_MOST_NAMED]
    ]
    if len(wrong) > _MOST_NAMED:
        checks.append(_bad(name, "no difference", f"{len(wrong) - _MOST_NAMED} more"))
    return checks


def _passed(made: Checkpoint, results: Results) -> Finding:
    follows = results.verdict.passed and not failed(made.checks)
    verdict = Status.OK if follows == made.passed else Status.FAILED
    return Finding(name="passed", status=verdict, expected=f"{follows}, by verdict and checks", found=str(made.passed))


def _bad(name: str, expected: str, found: str) -> Finding:
    return Finding(name=name, status=Status.FAILED, expected=expected, found=found)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# Facts that make a server the same one; when it was started, and as which process, do not.
_FACTS = (
    "refused",
    "role",
    "version",
    "models",
    "cache_config",
    "server_info",
    "model_files",
    "backends",
    "configuration",
)
_PROCESS_FACTS = ("command", "environment", "directory", "freeze")


async def live(made: Checkpoint, plan: Plan, urls: Mapping[str, str], access: Access) -> list[Finding]:
    """Looks at the recorded servers again, at other URLs where `urls` names some, and verifies anew.

    A server that is gone is not checked, unless its URL was given.
    """
    async with open_asker(access) as session:
        servers, checks = [], list[Finding]()
        for server in made.servers:
            url = urls.get(server.name, server.url)
            admin_url = server.admin_url if url == server.url else ""
            now = await look(session, server.name, url, driven=server.driven, named=True, admin_url=admin_url)
            if now.unreachable:
                checks.append(_gone(now, given=server.name in urls))
            else:
                servers.append(now)
                checks += drift(server, now)
        if not any(server.driven for server in servers):
            return checks
        again, answers = await verify_live(session, servers, *questions_of(plan, lambda: secrets.token_hex(8)))
    return [*checks, *again, *_as_recorded(made.answers, answers)]


def drift(recorded: ServerInfo, now: ServerInfo) -> Iterator[Finding]:
    """A check for each fact of the server that is not as it was recorded, and one for all that are."""
    before, after = recorded.model_dump(mode="json"), now.model_dump(mode="json")
    facts = {fact: (before[fact], after[fact]) for fact in _FACTS if before[fact] or after[fact]}
    if recorded.process is not None and now.process is not None:
        facts |= {fact: (before["process"][fact], after["process"][fact]) for fact in _PROCESS_FACTS}
    changed = [fact for fact, (was, is_now) in facts.items() if was != is_now]
    if not changed:
        all_facts = ", ".join(facts)
        yield Finding(
            name=f"{server_label(recorded)} is as recorded", status=Status.OK, expected=all_facts, found=all_facts
        )
    for fact in changed:
        yield _changed(f"{fact} of {server_label(recorded)}", *facts[fact])
    if recorded.process is not None and now.process is None:
        yield Finding(name=f"command of {server_label(recorded)}", status=Status.NOT_CHECKED, why=now.process_unknown)


def _changed(name: str, recorded: Any, now: Any) -> Finding:
    wrong = list(differences(recorded, now))
    expected = "; ".join(f"{path} {was}".strip() for path, was, _ in wrong)
    found = "; ".join(f"{path} {is_now}".strip() for path, _, is_now in wrong)
    return Finding(name=name, status=Status.FAILED, expected=expected, found=found)


def _gone(server: ServerInfo, *, given: bool) -> Finding:
    name = f"{server_label(server)} at {server.url}"
    if given:
        return Finding(name=name, status=Status.FAILED, expected="an answer", found=server.unreachable)
    return Finding(name=name, status=Status.NOT_CHECKED, why=f"it is not up: {server.unreachable}")


def _as_recorded(recorded: Sequence[GreedyAnswer], now: Sequence[GreedyAnswer]) -> Iterator[Finding]:
    """The same question has the same greedy answer as then."""
    known = {(answer.server, answer.model, answer.endpoint): answer for answer in recorded}
    for answer in now:
        before = known.get((answer.server, answer.model, answer.endpoint))
        if before is not None:
            same = before == answer
            yield Finding(
                name=f"greedy answer of {answer.model} by {answer.server or 'the target'}, as recorded",
                status=Status.OK if same else Status.FAILED,
                expected=f"{before.text!r}, {before.prompt_tokens} + {before.completion_tokens} tokens",
                found=f"{answer.text!r}, {answer.prompt_tokens} + {answer.completion_tokens} tokens",
            )


_STYLES = {Status.OK: "green", Status.FAILED: "red", Status.NOT_CHECKED: "dim"}


def verify(
    path: Annotated[
        Path, typer.Argument(exists=True, help="checkpoint.json, or a folder that has some.", metavar="CHECKPOINT")
    ],
    targets: Annotated[
        str | None,
        typer.Option(
            help="Where recorded servers are now, NAME=URL between commas, or the URL of the only target."
            " Default: where they were, if they are still up."
        ),
    ] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="LOADTEST_API_KEY", help="Sent as a bearer token, never recorded.")
    ] = None,
    header: Annotated[
        list[str] | None, typer.Option(help="NAME:VALUE of every request, never recorded; several times.")
    ] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Accept any certificate.")] = False,
    cacert: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="PEM file of the certificates to trust.")
    ] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Look at the files alone, ask no server.")] = False,
) -> None:
    """Check a checkpoint again: its files (hashes, completeness, definitions), and its servers as far as they are up.

    Exit code 0: all holds. 1: something does not. 2: usage.
    """
    console = Console()
    if offline and targets:
        raise typer.BadParameter("--offline asks no server: leave out --targets")
    try:
        access = Access.of(api_key, header or (), insecure=insecure, ca_file=cacert)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    files = [path] if path.is_file() else sorted(path.rglob(JSON_NAME))
    if not files:
        raise typer.BadParameter(f"{path} holds no {JSON_NAME}")
    wrong = 0
    for file in files:
        checks = _checked(file, None if offline else _urls(targets), access)
        say(console, file, "bold")
        for check in checks:
            say(console, check_line(check), _STYLES[check.status])
        wrong += len(failed(checks))
    text = "all that was checked holds" if not wrong else f"{wrong} thing{'s' if wrong > 1 else ''} not as it should be"
    say(console, text, "red" if wrong else "green")
    raise typer.Exit(1 if wrong else 0)


def _checked(file: Path, urls: Mapping[str, str] | None, access: Access) -> list[Finding]:
    try:
        made = Checkpoint.model_validate_json(file.read_bytes())
    except (OSError, ValidationError) as error:
        found = str(error).splitlines()[0]
        return [Finding(name="schema", status=Status.FAILED, expected="what a run writes", found=found)]
    if urls and (unknown := urls.keys() - {server.name for server in made.servers}):
        names = ", ".join(server.name or "the only target" for server in made.servers)
        raise typer.BadParameter(f"--targets: no server {', '.join(sorted(unknown))!r}; {file} has {names}")
    run = read_files(file.parent)
    checks = recheck(made, file.parent, run)
    if urls is None:
        return [*checks, Finding(name="servers", status=Status.NOT_CHECKED, why="--offline")]
    try:
        plan = None if run.results is None else Plan.model_validate(run.results.plan)
    except ValidationError:
        plan = None  # reported above
    if plan is None:
        return [*checks, Finding(name="servers", status=Status.NOT_CHECKED, why="what to ask is in results.json")]
    return [*checks, *asyncio.run(live(made, plan, urls, access))]


def _urls(targets: str | None) -> dict[str, str]:
    """By name; a URL without one is the only target's."""
    found: dict[str, str] = {}
    for part in filter(None, map(str.strip, (targets or "").split(","))):
        name, equals, url = part.partition("=")
        if not equals or "/" in name:
            name, url = "", part
        found[name] = base_url(url)
    return found
