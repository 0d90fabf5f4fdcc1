"""Makes and writes the checkpoint of each run, and checks that its accounts agree (caps, token usage)."""

from __future__ import annotations

import asyncio
import re
import secrets
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from rich.console import Console

from gateway import __version__
from loadtest.access import Access
from loadtest.checkpoint import redaction
from loadtest.checkpoint.document import (
    Checkpoint,
    Finding,
    Freeze,
    GreedyAnswer,
    Hardware,
    Role,
    Runtime,
    SentWorkload,
    ServerInfo,
    SourceTree,
    Status,
    Summary,
    failed,
)
from loadtest.checkpoint.fingerprints import artefacts, freeze, plan_sha256, sent_sha256, source
from loadtest.checkpoint.machine import hardware, runtime
from loadtest.checkpoint.markdown import check_line, markdown
from loadtest.checkpoint.questions import open_asker
from loadtest.checkpoint.servers import Neighbours, look, neighbours
from loadtest.checkpoint.verification import questions_of, verify_live
from loadtest.console import say, say_written
from loadtest.drive.options import RunOptions
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.drive.target import Target, base_url
from loadtest.report.files import PAGE_NAME, write_page
from loadtest.report.schema import Bounds, PageSeries, Results
from loadtest.report.statistics import value_of
from loadtest.report.timeline import peak, sweep

# An end reaches the client later than it frees the place for the next one, and a client that lags sees it later yet.
DELIVERY_SECONDS = 0.02
_COUNTER = re.compile(r"^(?:(?P<page>[^{]*) )?(?P<name>[^ {]+)(?P<labels>\{.*\})?$")
_PROMPT, _GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"


def caps(results: Results, records: Sequence[Record], servers: Sequence[ServerInfo]) -> list[Finding]:
    """For each backend that answers named: its true peak in flight is within the gateway's cap."""
    driven = next(server for server in servers if server.driven)
    name = "caps held"
    if driven.role is Role.ENGINE:
        return [Finding(name=name, status=Status.NOT_CHECKED, why="no gateway: nothing caps")]
    if not driven.backends:
        why = "the caps are not known: give --admin-url"
        return [Finding(name=name, status=Status.NOT_CHECKED, why=why)]
    known = {str(backend["name"]): backend for backend in driven.backends}
    sent: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.backend is not None and record.was_sent:
            sent[record.backend].append(record)
    if not sent:
        return [Finding(name=name, status=Status.NOT_CHECKED, why="answers do not name their backend")]
    pages = _pages(results, servers)
    late_seconds = DELIVERY_SECONDS + max((w.loop_lag_max or 0.0 for w in results.client.workers), default=0.0) / 1e3
    checks = []
    for backend in sorted(sent):
        cap = known.get(backend, {}).get("limit_upper")
        # A list of inputs that is longer than the cap is let through alone, and an engine counts its inputs.
        page = None if isinstance(cap, int) and _longest_list(results) > cap else pages.get(backend)
        seen = peak(sweep(_seen(record) for record in sent[backend]))
        surely = peak(sweep(_surely(record, late_seconds) for record in sent[backend]))
        checks.append(_cap(backend, cap, surely, seen=seen, by_engine=None if page is None else _most(page)))
    return checks


def _seen(record: Record) -> tuple[float, float]:
    """From when until when the client takes it to be with its backend."""
    start = record.sent + (record.queue_seconds or 0.0)
    return start, max(start, record.end)


def _surely(record: Record, late_seconds: float) -> tuple[float, float]:
    """When it was with its backend beyond doubt.

    On the way there it is late by an unknown time, so it counts from its first token; its end reaches the client late.
    """
    start, end = _seen(record)
    start = start + late_seconds if record.first_token is None else record.first_token
    return start, max(start, end - late_seconds)


def _longest_list(results: Results) -> int:
    specs = [part["workload"] for part in results.plan.get("mix", [])] or [results.plan.get("workload", {})]
    return max(int(spec.get("inputs", (1, 1))[-1]) for spec in specs)


def _cap(backend: str, cap: object, surely: int, seen: int, by_engine: int | None) -> Finding:
    name = f"cap of {backend} held"
    if not isinstance(cap, int):
        return Finding(name=name, status=Status.NOT_CHECKED, why="the gateway does not list this backend's cap")
    found = f"surely {surely}; {seen} as the client sees it, late"
    if by_engine is not None:
        found += f"; {by_engine} by the engine, once a second"
    held = max(surely, by_engine or 0) <= cap
    return Finding(name=name, status=Status.OK if held else Status.FAILED, expected=f"at most {cap}", found=found)


def _most(page: PageSeries) -> int | None:
    """The most that ran and waited at a time, as the page was read."""
    both = zip(page.running, page.waiting, strict=True)
    seen = [int(running + (waiting or 0)) for running, waiting in both if running is not None]
    return max(seen, default=None)


def usage(results: Results, servers: Sequence[ServerInfo]) -> Finding:
    """Prompt and output tokens reported to clients, against the engines' own counters."""
    name = "usage sums"
    why = _uncountable(results, servers)
    if why:
        return Finding(name=name, status=Status.NOT_CHECKED, why=why)
    engines = _engine_pages(results)
    counted = {_PROMPT: 0.0, _GENERATED: 0.0}
    for key, change in results.metrics_delta.items():
        found = _COUNTER.match(key)
        if found is None:
            continue
        page, counter = found["page"], found["name"]
        if counter in counted and (page is None or page in engines):
            counted[counter] += change
    reported = (results.tokens.prompt, results.tokens.completion)
    engine = (round(counted[_PROMPT]), round(counted[_GENERATED]))
    partly = results.requests.failed or results.requests.interrupted
    fits = all(map(int.__ge__, engine, reported)) if partly else engine == reported
    more = f"at least, for {partly} requests did not end well: " if partly else ""
    return Finding(
        name=name,
        status=Status.OK if fits else Status.FAILED,
        expected=f"{more}{reported[0]:,} + {reported[1]:,} tokens, as reported to clients",
        found=f"{engine[0]:,} + {engine[1]:,} by the engines",
        why="" if fits else "others used the engines, requests were sent twice, or usage is wrong",
    )


def _uncountable(results: Results, servers: Sequence[ServerInfo]) -> str:
    """Why the sums cannot be compared; empty if they can."""
    if not results.metrics_delta:
        return "no counter could be read after the run"
    if results.audio is not None:
        return "the usage of audio is its seconds, or counts tokens that engines do not"
    if results.tokens.without_usage:
        return f"{results.tokens.without_usage} answers reported no usage"
    engines = _engine_pages(results)
    if not engines:
        return "no engine's metrics were read: name the engines by --backends, or give --admin-url or --metrics-url"
    driven = next(server for server in servers if server.driven)
    if driven.role is Role.ENGINE:
        used = {urlsplit(driven.url).netloc}
    else:
        used = {backend.name for backend in results.routing.backends}
        if not used:
            return "answers do not name their backend, so it is not known which engines worked"
    read = _pages(results, servers)
    if missing := sorted(name for name in used if name not in read):
        return f"metrics of {', '.join(missing)} were not read"
    return ""


def _engine_pages(results: Results) -> dict[str, PageSeries]:
    """Pages by name that only an engine has."""
    pages = results.samples.pages if results.samples is not None else []
    return {page.name: page for page in pages if any(value is not None for value in page.prefix_queries)}


def _pages(results: Results, servers: Sequence[ServerInfo]) -> Mapping[str, PageSeries]:
    """Engines' pages by every name under which a backend may be known: the page's, host and port, the gateway's."""
    known: dict[str, PageSeries] = {}
    by_place = {}
    for name, page in _engine_pages(results).items():
        by_place[urlsplit(page.url).netloc] = page
        known |= {name: page, urlsplit(page.url).netloc: page}
    for server in servers:
        named = [(server.name, server.url)]
        named += [(str(backend["name"]), str(backend.get("url", ""))) for backend in server.backends]
        known |= {name: by_place[place] for name, url in named if (place := urlsplit(url).netloc) in by_place}
    return known


JSON_NAME, MARKDOWN_NAME = "checkpoint.json", "checkpoint.md"


@dataclass(frozen=True, slots=True)
class CommandContext:
    """What is the same for all runs of one command. Looked at when the first run has ended: that takes a while."""

    runtime: Runtime = field(default_factory=runtime)
    hardware: Hardware = field(default_factory=hardware)
    source: SourceTree = field(default_factory=source)
    _: KW_ONLY
    packages: Freeze = field(default_factory=freeze)


@dataclass(slots=True)
class Checkpoints:
    """Makes the checkpoints of a command's runs."""

    neighbours: Neighbours
    verify: bool
    access: Access = field(default_factory=Access, repr=False)
    _: KW_ONLY
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    site: CommandContext | None = None

    def keep(
        self,
        target: str,
        plan: Plan,
        bounds: Bounds,
        results: Results,
        records: Sequence[Record],
        written: Sequence[Path],
    ) -> Checkpoint:
        """Verifies and writes. `target` is the driven server's name, `written` the run's files, all in one folder."""
        site = self.site = self.site or CommandContext()
        skipped = "" if self.verify else "--no-verify"
        skipped = skipped or ("the run was ended by hand" if results.verdict.ended_early else "")
        servers, checks, answers = asyncio.run(self._asked(target, plan, skipped))
        if not skipped:
            checks += [*caps(results, records, servers), usage(results, servers)]
        made = Checkpoint(
            id=secrets.token_hex(8),
            started_at=results.environment.started_at,
            ended_at=self.now().isoformat(timespec="seconds"),
            command=results.environment.command,
            runtime=site.runtime,
            hardware=site.hardware,
            source=site.source,
            packages=site.packages,
            gateway_version=__version__,
            servers=[_without_users(server) for server in servers],
            workload=workload_of(plan, records),
            bounds=bounds,
            summary=summary_of(results),
            checks=checks,
            answers=answers,
            passed=results.verdict.passed and not failed(checks),
            artefacts={},
        )
        folder = written[0].parent
        write(made, folder)
        # The page has what was tested, so it is made with the rest of the checkpoint, before the hashes.
        if folder / PAGE_NAME in written:
            write_page(results, records, folder)
        made = made.model_copy(update={"artefacts": artefacts(written)})
        write(made, folder)
        return made

    async def _asked(
        self, target: str, plan: Plan, skipped: str
    ) -> tuple[list[ServerInfo], list[Finding], list[GreedyAnswer]]:
        """The servers, and the live checks, unless there is a reason to skip them."""
        async with open_asker(self.access) as session:
            servers = [
                await look(
                    session,
                    server.name,
                    server.url,
                    driven=server.driven,
                    named=server.named,
                    admin_url=server.admin_url,
                )
                for server in self.neighbours.around(target)
            ]
            if skipped:
                return servers, [Finding(name="all", status=Status.NOT_CHECKED, why=skipped)], []
            checks, answers = await verify_live(session, servers, *questions_of(plan, lambda: secrets.token_hex(8)))
            return servers, checks, answers


def _without_users(server: ServerInfo) -> ServerInfo:
    shown = {name: redaction.text(getattr(server, name)) for name in ("url", "admin_url")}
    return server.model_copy(update=shown)


def write(made: Checkpoint, folder: Path) -> list[Path]:
    document, page = folder / JSON_NAME, folder / MARKDOWN_NAME
    document.write_text(made.model_dump_json(indent=2) + "\n", encoding="utf-8")
    page.write_text(markdown(made), encoding="utf-8")
    return [document, page]


def workload_of(plan: Plan, records: Sequence[Record]) -> SentWorkload:
    """Hashes of what was to be sent, and of what was."""
    specs = [part.workload for part in plan.mix] or [plan.workload]
    return SentWorkload(
        plan_sha256=plan_sha256(plan),
        seed=plan.seed,
        files={spec.file.path: spec.file.sha256 for spec in specs if spec.file is not None},
        requests=len(records),
        sent_sha256=sent_sha256(records),
    )


def summary_of(results: Results) -> Summary:
    rates, latency = results.steady or results.overall, results.latency

    return Summary(
        offered=results.requests.offered,
        succeeded=results.requests.succeeded,
        failed=results.requests.failed,
        prompt_tokens=results.tokens.prompt,
        completion_tokens=results.tokens.completion,
        requests_per_second=rates.requests_per_second,
        output_tokens_per_second=rates.output_tokens_per_second,
        ttft_p50_ms=value_of(latency.ttft_from_intended, "p50"),
        ttft_p99_ms=value_of(latency.ttft_from_intended, "p99"),
        tpot_p50_ms=value_of(latency.tpot, "p50"),
        e2e_p99_ms=value_of(latency.e2e_from_intended, "p99"),
        valid=results.verdict.valid,
        passed=results.verdict.passed,
        reasons=results.verdict.reasons,
    )


_STYLES = {Status.OK: "green", Status.FAILED: "red", Status.NOT_CHECKED: "dim"}


@dataclass(slots=True)
class Keeping:
    """Writes the checkpoint of each run, and remembers whether every check held."""

    checkpoints: Checkpoints
    console: Console
    _: KW_ONLY
    brief: bool = False
    passed: bool = True

    def keep(
        self,
        target: str,
        plan: Plan,
        bounds: Bounds,
        results: Results,
        records: Sequence[Record],
        written: Sequence[Path],
    ) -> None:
        """Prints a line for each check; of a series, for those that failed."""
        made = self.checkpoints.keep(target, plan, bounds=bounds, results=results, records=records, written=written)
        for check in failed(made.checks) if self.brief else made.checks:
            say(self.console, check_line(check), _STYLES[check.status])
        if self.brief:
            counts = Counter(check.status for check in made.checks)
            say(self.console, f"checks: {', '.join(f'{count} {status}' for status, count in counts.items())}", "dim")
        else:
            say_written(self.console, [written[0].parent / name for name in (JSON_NAME, MARKDOWN_NAME)])
        self.passed = self.passed and not failed(made.checks)


def prepared(
    options: RunOptions, looked: Mapping[str, Target], console: Console
) -> tuple[dict[str, Target], Keeping | None]:
    """The targets with the metrics pages behind them; nothing is asked and kept without --out."""
    if options.out is None:
        return dict(looked), None
    admin_url = base_url(options.admin_url) if options.admin_url else None
    known = asyncio.run(neighbours(options.target_urls, options.engine_urls, admin_url, options.access))
    targets = {
        name: target if target.metrics_url else replace(target, pages_behind=known.pages_behind(name))
        for name, target in looked.items()
    }
    return targets, Keeping(Checkpoints(known, options.verify, options.access), console, brief=options.runs > 1)
