"""The report of a run, and of a series, as one HTML page that needs no network."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Sequence

from loadtest.drive.record import Record
from loadtest.report import curve
from loadtest.report.diagnosis import GPU_TARGET_PERCENT, gpu_percent, gpu_watts, tokens_per_joule
from loadtest.report.document import render
from loadtest.report.formatting import (
    PART_COLUMNS,
    load_text,
    margin,
    milliseconds,
    number,
    part_cells,
    percent,
    requested_text,
)
from loadtest.report.latencies import POINTS, latency_rows
from loadtest.report.run_charts import pictures
from loadtest.report.samples import samples_rows
from loadtest.report.schema import Interval, Results, Verdict
from loadtest.report.series import Series
from loadtest.report.series_charts import series_charts
from loadtest.report.series_tables import tables
from loadtest.report.single_requests import shown_requests
from loadtest.report.tested import CheckpointFields, what_was_tested
from loadtest.report.verdict import loop_lag_limit


def page(results: Results, records: Sequence[Record], checkpoint: CheckpointFields | None = None) -> str:
    """The whole page of a run. `checkpoint`: what its checkpoint.json has, where there is one."""
    plan, environment = results.plan, results.environment
    facts = {**environment.host, **environment.versions, **{f"server {k}": v for k, v in environment.server.items()}}
    plan_facts = {**{k: v for k, v in plan.items() if k != "workload"}, **plan["workload"]}
    shown = shown_requests(records)
    return render(
        "run.html",
        f"Load test of {plan['model']}",
        f"{plan['url']} · {requested_text(plan)} · {load_text(plan)} · {environment.started_at}",
        pictures(results, records, shown),
        more_scripts=["requests.js"] if records else [],
        shown=shown,
        results=results,
        head=_verdict(results.verdict),
        tiles=_tiles(results),
        tested=what_was_tested(results, checkpoint or {}),
        latency_head=("", "count", *POINTS),
        latencies=_latencies(results),
        mix_head=("part", *PART_COLUMNS),
        mix=[part_cells(part) for part in results.parts],
        errors=_errors(results),
        workers=_workers(results),
        loop_limit=loop_lag_limit(results),
        samples=samples_rows(results.samples) if results.samples is not None else [],
        command=shlex.join(environment.command),
        plan={key: value for key, value in plan_facts.items() if value is not None}.items(),
        facts=facts.items(),
        counters=[(name, number(value)) for name, value in results.metrics_delta.items()],
    )


def _verdict(verdict: Verdict) -> str:
    if verdict.valid:
        return "Passed." if verdict.passed else "Failed."
    return "Invalid: the client could not keep up, so these are not the server's figures."


def _tiles(results: Results) -> list[tuple[str, str, str]]:
    latency, requests, known = results.latency, results.requests, results.intervals
    rates, part = (results.steady, "steady part") if results.steady else (results.overall, "whole run")
    tiles = [
        (
            "succeeded",
            percent(requests.succeeded / requests.offered if requests.offered else None),
            f"{number(requests.succeeded)} of {number(requests.offered)}",
        ),
        ("requests/s", _rate(rates.requests_per_second, known.get("requests_per_second")), part),
        ("output tokens/s", _rate(rates.output_tokens_per_second, known.get("output_tokens_per_second")), part)
        if rates.output_tokens_per_second
        else ("prompt tokens/s", number(rates.prompt_tokens_per_second), part),
    ]
    for name, values in (
        ("TTFT", latency.ttft_from_intended),
        ("TPOT", latency.tpot),
        ("E2E", latency.e2e_from_intended),
    ):
        if values is not None:
            p50 = milliseconds(values.p50) + margin(values.p50, known.get(f"{name.lower()}_p50"))
            tiles.append((f"{name} p50", p50, f"p99 {milliseconds(values.p99)}"))
    tiles.append(("peak in flight", number(results.concurrency.peak), f"mean {number(results.concurrency.mean)}"))
    if results.routing.hit_ratio is not None:
        ideal = results.routing.ideal_hit_ratio
        facts = f"ideal {percent(ideal)}" if ideal is not None else "of prompt tokens"
        tiles.append(("prefix cache hits", percent(results.routing.hit_ratio), facts))
    if (audio := results.audio) is not None:
        each = f"{number(audio.request_seconds_per_second)} in the median request"
        tiles.append(("audio, seconds a second", number(audio.seconds_per_second), each))
    if (busy := gpu_percent(results.samples, rates)) is not None:
        tiles.append(("GPU utilisation", f"{busy:.0f} %", f"target {GPU_TARGET_PERCENT:g} %"))
    if (joule := tokens_per_joule(results.samples, rates)) is not None:
        tiles.append(("tokens per joule", number(joule), f"{number(gpu_watts(results.samples, rates))} W"))
    if results.slo is not None:
        goodput = _rate(results.slo.goodput_per_second, known.get("goodput_per_second"))
        tiles.append(("goodput", percent(results.slo.attainment), f"{goodput} requests/s"))
    return tiles


def _rate(value: float, interval: Interval | None) -> str:
    return number(value) + margin(value, interval)


def _latencies(results: Results) -> list[list[str]]:
    return [
        [
            row.name,
            number(row.count),
            *(milliseconds(at) + margin(at, row.intervals.get(point)) for point, at in row.points.items()),
            *["-"] * (len(POINTS) - len(row.points)),
        ]
        for row in latency_rows(results)
    ]


def _errors(results: Results) -> list[list[str]]:
    requests = results.requests
    counts = {**requests.errors, "dropped": requests.dropped, "interrupted": requests.interrupted}
    return [[kind, number(count), requests.error_examples.get(kind, "")] for kind, count in counts.items() if count]


def _workers(results: Results) -> list[list[str]]:
    return [
        [
            f"worker {worker.worker}",
            *map(milliseconds, (worker.loop_lag_p50, worker.loop_lag_p99, worker.loop_lag_max)),
            *map(percent, (worker.cpu_share, worker.cpu_share_p90)),
        ]
        for worker in results.client.workers
    ]


def series_page(series: Series, there: Collection[str], tested: tuple[Results, CheckpointFields] | None = None) -> str:
    """The whole page. `there`: the runs whose own pages can be linked; `tested`: the first run, with its checkpoint."""
    return render(
        "series.html",
        f"Load tests of {series.plan['model']}",
        f"{requested_text(series.plan)} · {series.environment.started_at}",
        series_charts(series),
        series=series,
        tables=tables(series),
        curve_head=curve.HEAD,
        curve=curve.curve_table(series),
        curve_words=curve.curve_words(series),
        there=there,
        tested=_tested_of_series(series, tested),
        command=shlex.join(series.environment.command),
    )


def _tested_of_series(series: Series, tested: tuple[Results, CheckpointFields] | None) -> list[tuple[str, str]]:
    """As of its first run, with all loads; without that run's files, by what the series itself has."""
    targets = dict.fromkeys(point.target for point in series.points if point.target)
    loads = ", ".join(dict.fromkeys(point.load for point in series.points))
    rows = [("targets", ", ".join(targets))] if targets else []
    if tested is None:
        versions = ", ".join(f"{name} {value}" for name, value in series.environment.versions.items())
        return [*rows, ("server", str(series.plan["url"])), ("loads", loads), ("client", versions)]
    own = {"load": ("loads", loads), "requests": ("requests", requested_text(series.plan))}
    return rows + [own.get(name, (name, value)) for name, value in what_was_tested(*tested)]
