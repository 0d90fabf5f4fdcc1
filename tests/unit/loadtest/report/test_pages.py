"""The report page, the terminal tables and the live display."""

from __future__ import annotations

import base64
import hashlib
import io
from array import array
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from loadtest.checkpoint.machine import environment
from loadtest.drive.plan import Plan
from loadtest.drive.record import Harvest, Record, Tick, WorkerHealth
from loadtest.report.pages import page
from loadtest.report.schema import BackendGauges, Bounds, Environment, PageSeries, Results, Samples
from loadtest.report.summarise import summarise
from loadtest.report.terminal import Progress, Recent, show
from tests.unit.loadtest.report.pages import assert_it_needs_nothing, plots_of, read


def _records(count: int, **more: Any) -> list[Record]:
    made = []
    for index in range(count):
        start = index / 10
        fields: dict[str, Any] = {
            "first_token": start + 0.1,
            "completion_tokens": 10,
            "prompt_tokens": 100,
            "cached_tokens": 50,
            "backend": f"gpu-{index % 2}",
            "events": 10,
            "reads": 10,
        }
        made.append(Record(index, index % 3, start, sent=start, end=start + 0.5, outcome="ok", **(fields | more)))
    return made


def _results(records: list[Record], **plan: Any) -> Results:
    chosen = Plan.model_validate({"url": "http://x", "model": "m<b>", "requests": 9, "concurrency": 4, **plan})
    health = WorkerHealth(0, array("d", [0.001]), array("d", [0.2]))
    environment = Environment(
        versions={"loadtest": "1"}, command=["loadtest", "run"], started_at="2026", host={"cpus": 2}, server={}
    )
    return summarise(chosen, Harvest(records, Counter({900: 3}), [health]), Bounds(), environment, {"hits_total": 3.0})


_HOSTILE = "</script><script>alert(1)</script><!--\u2028"


def test_the_page_needs_no_network_and_escapes_its_input() -> None:
    records = [
        *_records(120, backend=_HOSTILE),
        Record(120, 0, 3.0, sent=3.0, end=3.1, outcome="http_500", detail=f"{_HOSTILE}<img src=x onerror=alert(1)>"),
    ]
    results = _results(records, url=f"http://x/{_HOSTILE}")
    html = page(results, records)
    reader = assert_it_needs_nothing(html)
    assert "<script>alert(1)" not in html
    assert "m<b>" not in html
    assert reader.tags["script"] == 5
    assert reader.tags["img"] == 0
    assert any(plot["title"] == f"In flight on {_HOSTILE}" for plot in plots_of(html))


def test_the_policy_admits_the_scripts_of_the_page_and_no_others() -> None:
    records = _records(5)
    reader = read(page(_results(records), records))
    ran = [script for script in reader.texts["script"] if not script.startswith(("[", "{"))]
    assert len(ran) == 3
    for script in ran:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in reader.policy


def test_the_page_shows_every_picture_and_backend() -> None:
    records = _records(120)
    html = page(_results(records), records)
    assert [plot["title"] for plot in plots_of(html)] == [
        "TTFT over time",
        "TPOT over time",
        "E2E over time",
        "Output tokens per second",
        "Requests ended per second",
        "Distribution of latency",
        "Histogram of latency",
        "Requests in flight",
        "In flight on gpu-0",
        "In flight on gpu-1",
    ]
    for page_series in ("gpu-0", "gpu-1", "hits_total", "cap not known"):
        assert page_series in html
    assert html.count("data-plot=") == 10
    assert read(html).tags["svg"] == 0


def test_latency_over_time_has_percentiles_that_grow() -> None:
    records = _records(120)
    ttft, tpot, *_ = plots_of(page(_results(records), records))
    assert [line["name"] for line in ttft["lines"]] == ["p50", "p95", "p99"]
    p50, p95, p99 = ttft["data"][1:]
    known = [values for values in zip(p50, p95, p99, strict=True) if None not in values]
    assert known
    assert all(values == tuple(sorted(values)) for values in known)
    assert {value for value in tpot["data"][1] if value is not None} == {44.44}


def test_a_backend_is_drawn_against_the_cap_that_the_gateway_reported() -> None:
    records = _records(120, queue_seconds=0.05)
    gauges = BackendGauges(in_flight=[1, 3, 2], limit=[4, 4, 4])
    page_series = PageSeries(name="gateway", url="u", at=[0.0, 4.0, 8.0], running=[1, 3, 2], backends={"gpu-0": gauges})
    results = _results(records).model_copy(update={"samples": Samples(gpus=[], no_gpu="none", pages=[page_series])})
    drawn = {plot["title"]: plot for plot in plots_of(page(results, records))}
    first, other = drawn["In flight on gpu-0"], drawn["In flight on gpu-1"]
    assert [line["name"] for line in first["lines"]] == ["in flight, by the client", "by the gateway", "cap"]
    assert set(first["data"][3]) == {4}
    assert set(first["data"][2]) == {1, 2, 3}
    assert max(first["data"][1]) == results.routing.backends[0].peak_in_flight
    assert [line["name"] for line in other["lines"]] == ["in flight, by the client"]


def test_time_above_the_cap_is_reported() -> None:
    records = [Record(n, 0, 0.0, sent=0.0, end=end, outcome="ok", backend="a") for n, end in enumerate((1.0, 2.0, 2.5))]
    page_series = PageSeries(
        name="g", url="u", at=[0.0], running=[1], backends={"a": BackendGauges(in_flight=[3], limit=[2])}
    )
    results = _results(records).model_copy(update={"samples": Samples(gpus=[], no_gpu="none", pages=[page_series])})
    assert "peak 3, cap 2; above it for 1.00 s at most, as seen by the client" in page(results, records)


def test_audio_has_its_speed_on_the_page_and_in_the_terminal() -> None:
    records = _records(50, audio_seconds=20.0)
    results, file = _results(records), io.StringIO()
    show(results, Console(file=file, width=80))
    for text in (page(results, records), file.getvalue()):
        assert "40 in the median request" in " ".join(text.split())
    assert "audio, seconds a second" not in page(_results(_records(50)), records)


@pytest.mark.parametrize(
    "records",
    [
        [],
        _records(1),
        _records(3, first_token=None, completion_tokens=None, backend=None, cached_tokens=None, events=0, reads=0),
        [Record(0, 0, 0.0, sent=0.0, end=0.0, outcome="connect", detail="refused")],
        [Record(0, 0, 0.0, sent=0.0, end=0.0, outcome="dropped")],
        _records(5000),
    ],
    ids=["nothing", "one", "embeddings", "one failure", "one dropped", "many"],
)
def test_any_run_can_be_shown(records: list[Record]) -> None:
    results = _results(records)
    html = page(results, records)
    read(html)
    assert len(html) < 400_000
    console = Console(file=io.StringIO(), width=80)
    show(results, console)


def test_the_terminal_reports_failures_latencies_and_backends_in_80_columns() -> None:
    records = [*_records(50), Record(50, 0, 3.0, sent=3.0, end=3.1, outcome="http_500", detail="[bold]odd[/] markup")]
    file = io.StringIO()
    show(_results(records), Console(file=file, width=80))
    shown = file.getvalue()
    for expected in ("http_500: [bold]odd[/] markup", "TTFT, intended", "gpu-1", "1 of 51 requests failed"):
        assert expected in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_engines_say_of_queue_and_prefill_stands_below_ttft() -> None:
    counted = {
        f"vllm:request_{part}_time_seconds_{kind}": value
        for part, seconds in (("queue", 0.2), ("prefill", 3.0))
        for kind, value in (("sum", seconds), ("count", 4.0))
    }
    results = _results(_records(4)).model_copy(update={"metrics_delta": counted})
    file = io.StringIO()
    show(results, Console(file=file, width=80))
    for name, mean in (("engine queue", "50.0 ms"), ("engine prefill", "750 ms")):
        assert mean in file.getvalue().split(name)[1].splitlines()[0]
        assert mean in page(results, _records(4)).split(name)[1].split("</tr>")[0]


def test_a_mix_has_a_row_for_each_part() -> None:
    records = [*_records(4, part="chat"), *_records(2, part="embeddings", first_token=None)]
    results = _results(records)
    assert [(part.name, part.requests.offered) for part in results.parts] == [("chat", 4), ("embeddings", 2)]
    assert results.parts[1].latency.ttft is None
    file = io.StringIO()
    show(results, Console(file=file, width=80))
    assert "embeddings" in file.getvalue()
    assert max(map(len, file.getvalue().splitlines())) <= 80
    assert "Parts of the mix" in page(results, records)


def test_recent_figures_forget_what_is_older_than_ten_seconds() -> None:
    recent = Recent()
    recent.take(
        Tick(5.0, [Record(0, 0, 0.0, sent=0.0, end=4.0, outcome="ok", first_token=3.0, completion_tokens=100)], 7)
    )
    assert recent.figures()["TTFT p50"] == "3.00 s"
    assert recent.figures()["tok/s"] == "20"
    recent.take(
        Tick(20.0, [Record(1, 0, 19.0, sent=19.0, end=19.5, outcome="ok", first_token=19.1, completion_tokens=50)], 2)
    )
    figures = recent.figures()
    assert figures["TTFT p50"] == "100 ms"
    assert (figures["done"], figures["in flight"], figures["tok/s"]) == ("2", "2", "5")


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    file = io.StringIO()
    with Progress(Console(file=file, width=200), "a run") as progress:
        for second in range(12):
            progress.take(Tick(float(second), [], 3))
    lines = file.getvalue().splitlines()
    assert lines[0] == "a run"
    assert [line.split("  ")[0] for line in lines[1:]] == ["elapsed 5 s", "elapsed 10 s"]


def test_secrets_are_starred_out_of_the_recorded_command() -> None:
    command = ["run", "http://me:pw@host", "--api-key", "sk-1", "-c", "2", "--api-key=sk-1"]
    found = environment(command, datetime(2026, 1, 1, tzinfo=UTC), {}).command
    assert found == ["run", "http://***@host", "--api-key", "***", "-c", "2", "--api-key=***"]
