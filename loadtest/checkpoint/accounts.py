"""Whether the books agree: caps against what was in flight, what clients were told against what engines counted."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from loadtest.checkpoint.document import Check, Role, Server, Status
from loadtest.drive.record import Record
from loadtest.report.concurrency import peak, sweep
from loadtest.report.schema import PageSeries, Results

# An end reaches the client later than it frees the place for the next one, and a client that lags sees it later yet.
DELIVERY_SECONDS = 0.02
_COUNTER = re.compile(r"^(?:(?P<page>[^{]*) )?(?P<name>[^ {]+)(?P<labels>\{.*\})?$")
_PROMPT, _GENERATED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total"
_CACHED = re.compile(r'source="cached"')


def caps(results: Results, records: Sequence[Record], servers: Sequence[Server]) -> list[Check]:
    """For each backend that answers named: its true peak in flight is within the gateway's cap."""
    driven = next(server for server in servers if server.driven)
    name = "caps held"
    if driven.role is Role.ENGINE:
        return [Check(name=name, status=Status.NOT_CHECKED, why="no gateway: nothing caps")]
    if not driven.backends:
        why = "the caps are not known: give --admin-url"
        return [Check(name=name, status=Status.NOT_CHECKED, why=why)]
    known = {str(backend["name"]): backend for backend in driven.backends}
    sent: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        if record.backend is not None and record.was_sent:
            sent[record.backend].append(record)
    if not sent:
        return [Check(name=name, status=Status.NOT_CHECKED, why="answers do not name their backend")]
    pages = _pages(results, servers)
    late_seconds = DELIVERY_SECONDS + max((w.loop_lag_max or 0.0 for w in results.client.workers), default=0.0) / 1e3
    checks = []
    for backend in sorted(sent):
        cap = known.get(backend, {}).get("limit_upper")
        # A list of inputs that is longer than the cap is let through alone, and an engine counts its inputs.
        page = None if isinstance(cap, int) and _longest_list(results) > cap else pages.get(backend)
        seen = peak(sweep(_seen(record) for record in sent[backend]))
        surely = peak(sweep(_surely(record, late_seconds) for record in sent[backend]))
        checks.append(_cap(backend, cap, surely, seen, None if page is None else _most(page)))
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


def _cap(backend: str, cap: object, surely: int, seen: int, by_engine: int | None) -> Check:
    name = f"cap of {backend} held"
    if not isinstance(cap, int):
        return Check(name=name, status=Status.NOT_CHECKED, why="the gateway does not list this backend's cap")
    found = f"surely {surely}; {seen} as the client sees it, late"
    if by_engine is not None:
        found += f"; {by_engine} by the engine, once a second"
    held = max(surely, by_engine or 0) <= cap
    return Check(name=name, status=Status.OK if held else Status.FAILED, expected=f"at most {cap}", found=found)


def _most(page: PageSeries) -> int | None:
    """The most that ran and waited at a time, as the page was read."""
    both = zip(page.running, page.waiting, strict=True)
    seen = [int(running + (waiting or 0)) for running, waiting in both if running is not None]
    return max(seen, default=None)


def usage(results: Results, servers: Sequence[Server]) -> Check:
    """Prompt and output tokens that clients were told of, against the engines' own counters."""
    name = "usage sums"
    why = _uncountable(results, servers)
    if why:
        return Check(name=name, status=Status.NOT_CHECKED, why=why)
    engines = _engine_pages(results)
    counted = {_PROMPT: 0.0, _GENERATED: 0.0}
    for key, change in results.metrics_delta.items():
        found = _COUNTER.match(key)
        if found is None:
            continue
        page, counter = found["page"], found["name"]
        if counter in counted and (page is None or page in engines):
            counted[counter] += change
    told = (results.tokens.prompt, results.tokens.completion)
    engine = (round(counted[_PROMPT]), round(counted[_GENERATED]))
    partly = results.requests.failed or results.requests.interrupted
    fits = all(map(int.__ge__, engine, told)) if partly else engine == told
    more = f"at least, for {partly} requests did not end well: " if partly else ""
    return Check(
        name=name,
        status=Status.OK if fits else Status.FAILED,
        expected=f"{more}{told[0]:,} + {told[1]:,} tokens, as clients were told",
        found=f"{engine[0]:,} + {engine[1]:,} by the engines",
        why="" if fits else "others used the engines, requests were sent twice, or usage is wrong",
    )


def _uncountable(results: Results, servers: Sequence[Server]) -> str:
    """Why the sums cannot be compared; empty if they can."""
    if not results.metrics_delta:
        return "no counter could be read after the run"
    if results.tokens.without_usage:
        return f"{results.tokens.without_usage} answers told no usage"
    if any(_CACHED.search(key) and "gateway_embedding_inputs_total" in key for key in results.metrics_delta):
        return "the gateway answered some embeddings from its cache"
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


def _pages(results: Results, servers: Sequence[Server]) -> Mapping[str, PageSeries]:
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
