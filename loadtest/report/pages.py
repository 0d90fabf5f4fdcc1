"""The report of a run, and of a series, as one HTML page that needs no network."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence
from html import escape

from loadtest.drive.record import Record
from loadtest.report.document import Plots, document, table, table_head
from loadtest.report.formatting import (
    PART_COLUMNS,
    load_text,
    milliseconds,
    number,
    part_cells,
    percent,
    requested_text,
)
from loadtest.report.run_charts import pictures
from loadtest.report.samples import samples_rows
from loadtest.report.schema import BackendShare, Distribution, Results
from loadtest.report.series import Series
from loadtest.report.series_charts import series_charts
from loadtest.report.series_tables import tables
from loadtest.report.verdict import loop_lag_limit


def page(results: Results, records: Sequence[Record]) -> str:
    plots = Plots()
    charts = plots.figures(pictures(results, records))
    return document(
        f"Load test of {results.plan['model']}",
        _subtitle(results),
        f"{_verdict(results)}{_tiles(results)}"
        f"<h2>Over the run</h2>{charts}"
        f"<h2>Latency</h2>{_latencies(results)}{_mix(results)}"
        f"{_backends(results.routing.backends)}{_errors(results)}{_client(results)}"
        f"{_watched(results)}{_details(results)}",
        plots,
    )


def _subtitle(results: Results) -> str:
    plan, environment = results.plan, results.environment
    return f"{plan['url']} · {requested_text(plan)} · {load_text(plan)} · {environment.started_at}"


def _verdict(results: Results) -> str:
    verdict = results.verdict
    if verdict.passed:
        head = "Passed."
    elif verdict.valid:
        head = "Failed."
    else:
        head = "Invalid: the client could not keep up, so these are not the server's figures."
    items = [f"<li>{escape(reason)}</li>" for reason in verdict.reasons]
    items += [f'<li class="warning">{escape(warning)}</li>' for warning in verdict.warnings]
    listed = f"<ul>{''.join(items)}</ul>" if items else ""
    return f'<div class="verdict{" passed" if verdict.passed else ""}"><b>{head}</b>{listed}</div>'


def _tiles(results: Results) -> str:
    latency, requests = results.latency, results.requests
    rates, part = (results.steady, "steady part") if results.steady else (results.overall, "whole run")
    tiles = [
        ("succeeded", percent(requests.succeeded / requests.offered if requests.offered else None),
         f"{number(requests.succeeded)} of {number(requests.offered)}"),
        ("requests/s", number(rates.requests_per_second), part),
        ("output tokens/s", number(rates.output_tokens_per_second), part)
        if rates.output_tokens_per_second
        else ("prompt tokens/s", number(rates.prompt_tokens_per_second), part),
    ]  # fmt: skip
    for name, values in (
        ("TTFT p50", latency.ttft_from_intended),
        ("TPOT p50", latency.tpot),
        ("E2E p50", latency.e2e_from_intended),
    ):
        if values is not None:
            tiles.append((name, milliseconds(values.p50), f"p99 {milliseconds(values.p99)}"))
    tiles.append(("peak in flight", number(results.concurrency.peak), f"mean {number(results.concurrency.mean)}"))
    if results.routing.hit_ratio is not None:
        ideal = results.routing.ideal_hit_ratio
        facts = f"ideal {percent(ideal)}" if ideal is not None else "of prompt tokens"
        tiles.append(("prefix cache hits", percent(results.routing.hit_ratio), facts))
    if results.slo is not None:
        tiles.append(
            ("goodput", percent(results.slo.attainment), f"{number(results.slo.goodput_per_second)} requests/s")
        )
    drawn = (
        f'<div class="tile"><span>{escape(name)}</span><strong>{escape(value)}</strong>'
        f"<span>{escape(facts)}</span></div>"
        for name, value, facts in tiles
    )
    return f'<div class="tiles">{"".join(drawn)}</div>'


def _latencies(results: Results) -> str:
    latency = results.latency
    rows: list[tuple[str, Distribution | None]] = [
        ("TTFT from the intended send", latency.ttft_from_intended),
        ("TTFT from the actual send", latency.ttft),
        ("TPOT", latency.tpot),
        ("ITL", latency.itl),
        ("E2E from the intended send", latency.e2e_from_intended),
        ("E2E from the actual send", latency.e2e),
        ("Queue in the gateway", latency.gateway_queue),
    ]
    return table(
        ("", "count", "mean", "p50", "p90", "p95", "p99", "max"),
        (
            [name, number(d.count), *map(milliseconds, (d.mean, d.p50, d.p90, d.p95, d.p99, d.max))]
            for name, d in rows
            if d is not None
        ),
    )


def _mix(results: Results) -> str:
    if not results.parts:
        return ""
    return f"<h2>Parts of the mix</h2>{table(('part', *PART_COLUMNS), map(part_cells, results.parts))}"


def _backends(backends: Sequence[BackendShare]) -> str:
    if not backends:
        return ""
    head = ("backend", "requests", "share", "prefix cache hits", "predicted hits", "peak in flight", "TTFT p50")
    rows = [
        f"<tr><td>{escape(backend.name)}</td><td>{number(backend.requests)}</td>"
        f"<td>{_bar(backend.share, 's1')}</td><td>{_bar(backend.hit_ratio, 's3')}</td>"
        f"<td>{_bar(backend.predicted_ratio, 's3')}</td><td>{number(backend.peak_in_flight)}</td>"
        f"<td>{milliseconds(backend.ttft_p50)}</td></tr>"
        for backend in backends
    ]
    return f'<h2>Backends</h2><div class="card"><table>{table_head(head)}{"".join(rows)}</table></div>'


def _bar(ratio: float | None, style: str) -> str:
    if ratio is None:
        return percent(None)
    return f'<span class="bar {style}"><i style="width:{ratio * 100:.1f}%"></i></span>{percent(ratio)}'


def _errors(results: Results) -> str:
    requests = results.requests
    counts = dict(requests.errors)
    counts |= {"dropped": requests.dropped} if requests.dropped else {}
    counts |= {"interrupted": requests.interrupted} if requests.interrupted else {}
    if not counts:
        return ""
    rows = ([kind, number(count), requests.error_examples.get(kind, "")] for kind, count in counts.items())
    return f"<h2>Requests that did not succeed</h2>{table(('kind', 'requests', 'example'), rows)}"


def _client(results: Results) -> str:
    client = results.client
    rows = [
        [
            f"worker {worker.worker}",
            milliseconds(worker.loop_lag_p50),
            milliseconds(worker.loop_lag_p99),
            milliseconds(worker.loop_lag_max),
            percent(worker.cpu_share),
            percent(worker.cpu_share_p90),
        ]
        for worker in client.workers
    ]
    head = ("client", "loop lag p50", "p99", "max", "of a core, mean", "p90")
    lag = f"Requests left {milliseconds(client.send_lag.p99)} late at p99. " if client.send_lag else ""
    limits = f"{milliseconds(loop_lag_limit(results))} for the loop, {milliseconds(client.lag_limit)} for sends"
    note = f'<p class="note">{lag}The run is invalid above a lag p99 of {limits}.</p>'
    return f"<h2>The client itself</h2>{table(head, rows)}{note}"


def _watched(results: Results) -> str:
    if results.samples is None:
        return ""
    return f"<h2>Beside the load</h2>{table(('', ''), samples_rows(results.samples))}"


def _details(results: Results) -> str:
    environment = results.environment
    facts = {**environment.host, **environment.versions, **{f"server {k}": v for k, v in environment.server.items()}}
    plan = {**{k: v for k, v in results.plan.items() if k != "workload"}, **results.plan["workload"]}
    parts = [
        ("Command", f"<code>{escape(shlex.join(environment.command))}</code>"),
        ("Plan", table(("", ""), ([key, str(value)] for key, value in plan.items() if value is not None))),
        ("Environment", table(("", ""), ([key, str(value)] for key, value in facts.items()))),
    ]
    if results.metrics_delta:
        rows = ([name, number(value)] for name, value in results.metrics_delta.items())
        parts.append(("Counters of the target over the run", table(("counter", "change"), rows)))
    return "<h2>How it was made</h2>" + "".join(
        f"<details><summary>{name}</summary>{body}</details>" for name, body in parts
    )


def series_page(series: Series, there: Collection[str]) -> str:
    """The whole page. `there`: the runs whose own pages can be linked."""
    heading = f"Load tests of {series.plan['model']}"
    plots = Plots()
    charts = plots.figures(series_charts(series))
    tabled = "".join(f"<h2>{escape(title)}</h2>{table(head, rows)}" for title, head, rows in tables(series))
    links = "".join(
        f'<li><a href="{escape(folder)}/report.html">{escape(folder)}</a></li>'
        if folder in there
        else f"<li>{escape(folder)}</li>"
        for folder in series.folders
    )
    return document(
        heading,
        f"{requested_text(series.plan)} · {series.environment.started_at}",
        f"{_series_verdict(series)}"
        + (f"<h2>By load</h2>{charts}" if charts else "")
        + f"{tabled}<h2>Runs, in order</h2><ul>{links}</ul>"
        f"<h2>Command</h2><code>{escape(shlex.join(series.environment.command))}</code>",
        plots if charts else None,
    )


def _series_verdict(series: Series) -> str:
    items = "".join(f"<li>{escape(reason)}</li>" for reason in series.reasons)
    head = "Passed." if series.passed else "Failed."
    listed = f"<ul>{items}</ul>" if items else ""
    return f'<div class="verdict{" passed" if series.passed else ""}"><b>{head}</b>{listed}</div>'
