"""Results as terminal tables, and the progress of a run while it lasts."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from loadtest.console import plain_table, say
from loadtest.drive.record import Record, Tick
from loadtest.report.curve import HEAD as CURVE_HEAD
from loadtest.report.curve import curve_table, curve_words
from loadtest.report.formatting import PART_COLUMNS, margin, milliseconds, number, part_cells, percent
from loadtest.report.latencies import POINTS, latency_rows
from loadtest.report.samples import samples_rows
from loadtest.report.schema import Interval, Results, Throughput
from loadtest.report.series import Series
from loadtest.report.series_tables import tables
from loadtest.report.statistics import percentile
from loadtest.report.verdict import loop_lag_limit


def show(results: Results, console: Console) -> None:
    """Prints everything a user decides by; the rest is in results.json."""
    console.print(Group(*_parts(results)))


def show_series(series: Series, console: Console) -> None:
    """Prints the tables of a series and its verdict."""
    for title, head, rows in tables(series, compact=True):
        console.print(plain_table(title, head, rows))
    if rows := curve_table(series):
        console.print(plain_table("Batch-size curve", CURVE_HEAD, rows))
    for line in curve_words(series):
        say(console, line)
    lines = [Text(f"✗ {reason}", style="red") for reason in series.reasons]
    console.print(_panel("passed" if series.passed else "failed", series.passed, lines))


def _parts(results: Results) -> list[RenderableType]:
    parts: list[RenderableType] = [_summary(results), _latencies(results)]
    if results.parts:
        parts.append(_mix(results))
    if results.routing.backends:
        parts.append(_backends(results))
    parts.append(_verdict(results))
    return parts


def _summary(results: Results) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    requests, tokens = results.requests, results.tokens
    counts = f"{requests.succeeded} of {requests.offered} offered"
    extra = {"failed": requests.failed, "dropped": requests.dropped, "interrupted": requests.interrupted}
    counts += "".join(f", {count} {name}" for name, count in extra.items() if count)
    table.add_row("requests", counts + (f", {requests.late} sent late" if requests.late else ""))
    for kind, count in requests.errors.items():
        table.add_row("", Text(f"{count} x {kind}: {requests.error_examples.get(kind, '')}", style="red"))
    known = results.intervals
    table.add_row("throughput", _rates(results.overall, {} if results.steady else known))
    if results.steady is not None:
        table.add_row("  steady part", _rates(results.steady, known))
    table.add_row("in flight", f"peak {results.concurrency.peak}, mean {number(results.concurrency.mean)}")
    cached = f", {tokens.cached:,} from cache" if tokens.cached is not None else ""
    table.add_row("tokens", f"{tokens.prompt:,} in{cached}, {tokens.completion:,} out")
    if (hit := results.routing.hit_ratio) is not None:
        ideal, affinity = results.routing.ideal_hit_ratio, results.routing.affinity
        text = f"{percent(hit)} of prompt tokens"
        text += f" (ideal {percent(ideal)})" if ideal is not None else ""
        text += f", {percent(affinity)} of requests on their group's main backend" if affinity is not None else ""
        table.add_row("prefix cache hits", text)
    if (audio := results.audio) is not None:
        speed = f"{number(audio.seconds_per_second)} s of audio per second (real-time factor)"
        each = f"{number(audio.request_seconds_per_second)} in the median request"
        table.add_row("audio", f"{number(audio.seconds)} s; {speed}, {each}")
    if results.streaming is not None:
        packing = results.streaming
        text = f"{packing.tokens_per_event:.2f} tokens an event, {packing.events_per_read:.2f} events a read"
        table.add_row("streaming", text)
    if (slo := results.slo) is not None:
        rate = slo.goodput_per_second
        met = f"{percent(slo.attainment)} of offered ({slo.met} of {slo.offered}), {number(rate)}/s"
        met += margin(rate, known.get("goodput_per_second"))
        table.add_row("goodput", Text(met, style="green" if slo.passed else "red"))
    table.add_row("client", _client(results))
    for what, how in samples_rows(results.samples) if results.samples else []:
        table.add_row(what, Text(how))
    return table


def _rates(rates: Throughput, intervals: Mapping[str, Interval]) -> str:
    """Intervals are by figure of a series."""
    tokens, kind = rates.output_tokens_per_second, "output"
    if not tokens:
        tokens, kind = rates.prompt_tokens_per_second, "prompt"
    requests = rates.requests_per_second
    text = f"{number(requests)}{margin(requests, intervals.get('requests_per_second'))} requests/s, "
    text += f"{number(tokens)}{margin(tokens, intervals.get(f'{kind}_tokens_per_second'))} {kind} tokens/s"
    return f"{text} over {rates.end - rates.start:.1f} s"


def _client(results: Results) -> str:
    client = results.client
    lags = [worker.loop_lag_p99 for worker in client.workers if worker.loop_lag_p99 is not None]
    shares = [worker.cpu_share_p90 for worker in client.workers if worker.cpu_share_p90 is not None]
    text = f"{len(client.workers)} worker{'s' if len(client.workers) != 1 else ''}"
    text += f", loop lag p99 {milliseconds(max(lags))} (limit {milliseconds(loop_lag_limit(results))})" if lags else ""
    text += f", {max(shares):.0%} of a core" if shares else ""
    if client.send_lag:
        text += f", send lag p99 {milliseconds(client.send_lag.p99)} (limit {milliseconds(client.lag_limit)})"
    return text


def _latencies(results: Results) -> Table:
    title = "Latency of successful requests, from the intended and from the actual send"
    title += ", ± 95 % confidence within this run" if results.intervals else ""
    table = plain_table(title, ("", *POINTS))
    for row in latency_rows(results):
        table.add_row(row.name, *(milliseconds(row.points[point]) if point in row.points else "-" for point in POINTS))
        if any(row.intervals.values()):
            margins = (margin(at, row.intervals[point]).strip() for point, at in row.points.items())
            table.add_row("", *margins, style="dim")
    return table


def _mix(results: Results) -> Table:
    rows = map(part_cells, results.parts)
    return plain_table("Parts of the mix, from the intended send", ("part", *PART_COLUMNS), rows)


def _backends(results: Results) -> Table:
    head = ("backend", "requests", "share", "peak in flight", "TTFT p50", "hit", "predicted hit")
    table = plain_table("Backends", head)
    for backend in results.routing.backends:
        table.add_row(
            backend.name,
            number(backend.requests),
            percent(backend.share),
            number(backend.peak_in_flight),
            milliseconds(backend.ttft_p50),
            percent(backend.hit_ratio),
            percent(backend.predicted_ratio),
        )
    return table


def _verdict(results: Results) -> Panel:
    verdict = results.verdict
    title = "passed" if verdict.passed else "failed"
    if not verdict.valid:
        title = "invalid: limited by the client, so not the server's figures"
    lines = [Text(f"✗ {reason}", style="red") for reason in verdict.reasons]
    lines += [Text(f"! {warning}", style="yellow") for warning in verdict.warnings]
    return _panel(title, verdict.passed, lines)


def _panel(title: str, passed: bool, lines: Sequence[Text]) -> Panel:
    style, shown = "green" if passed else "red", lines or [Text("no complaints")]
    return Panel(Group(*shown), title=title, title_align="left", border_style=style, expand=False)


_WINDOW_SECONDS = 10.0
_PLAIN_INTERVAL_SECONDS = 5.0


class Recent:
    """Rates and latencies over the last ten seconds, and counts since the start."""

    def __init__(self) -> None:
        self._records: deque[Record] = deque()
        self._elapsed = 0.0
        self.done = 0
        self.failed = 0
        self.in_flight = 0

    @property
    def elapsed(self) -> float:
        return self._elapsed

    def take(self, tick: Tick) -> None:
        """Adds news and forgets what is too old to be recent."""
        self._elapsed, self.in_flight = tick.elapsed_seconds, tick.in_flight
        self.done += len(tick.records)
        self.failed += sum(not record.ok for record in tick.records)
        self._records.extend(tick.records)
        while self._records and self._records[0].end < self._elapsed - _WINDOW_SECONDS:
            self._records.popleft()

    def figures(self) -> dict[str, str]:
        """What is shown, by its label."""
        length = max(min(self._elapsed, _WINDOW_SECONDS), 1e-9)
        good = [record for record in self._records if record.ok]
        ttft = sorted((r.first_token - r.due) * 1e3 for r in good if r.first_token is not None)
        e2e = sorted((record.end - record.due) * 1e3 for record in good)
        shown, values = ("TTFT", ttft) if ttft else ("E2E", e2e)
        return {
            "elapsed": f"{self._elapsed:.0f} s",
            "done": number(self.done),
            "in flight": number(self.in_flight),
            "req/s": number(len(good) / length),
            "tok/s": number(sum(record.completion_tokens or 0 for record in good) / length),
            f"{shown} p50": milliseconds(percentile(values, 50) if values else None),
            f"{shown} p99": milliseconds(percentile(values, 99) if values else None),
            "errors": number(self.failed),
        }


class Progress:
    """Shows `Recent` for the length of a `with` block."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._recent = Recent()
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._next_line_seconds = _PLAIN_INTERVAL_SECONDS

    def __enter__(self) -> Self:
        say(self._console, self._title, "bold")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def take(self, tick: Tick) -> None:
        self._recent.take(tick)
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif self._recent.elapsed >= self._next_line_seconds:
            self._next_line_seconds += _PLAIN_INTERVAL_SECONDS
            line = "  ".join(f"{label} {value}" for label, value in self._recent.figures().items())
            say(self._console, line)

    def _table(self) -> Table:
        figures = self._recent.figures()
        table = Table(box=None, padding=(0, 2), header_style="dim")
        for label in figures:
            table.add_column(label, justify="right")
        failed = self._recent.failed
        table.add_row(*figures.values(), style="red" if failed and failed == self._recent.done else "")
        return table
