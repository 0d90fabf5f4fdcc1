"""The report page, the terminal tables and the live display."""

from __future__ import annotations

import io
from array import array
from collections import Counter
from html.parser import HTMLParser
from typing import Any

import pytest
from rich.console import Console

from loadtest.drive.fleet import Harvest, Tick
from loadtest.drive.health import WorkerHealth
from loadtest.drive.plan import Plan
from loadtest.drive.record import Record
from loadtest.report.environment import without_secrets
from loadtest.report.live import Progress, Recent
from loadtest.report.page import page
from loadtest.report.schema import Environment, Results
from loadtest.report.summarise import Bounds, summarise
from loadtest.report.terminal import show

_VOID = {"meta", "br", "link", "img", "input", "hr"}


class _Reader(HTMLParser):
    """Collects tags and what they refer to, and fails on tags that do not nest."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: Counter[str] = Counter()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "xlink:href")]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


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
        made.append(Record(index, index % 3, start, start, start + 0.5, "ok", **(fields | more)))
    return made


def _results(records: list[Record], **plan: Any) -> Results:
    chosen = Plan.model_validate({"url": "http://x", "model": "m<b>", "requests": 9, "concurrency": 4, **plan})
    health = WorkerHealth(0, array("d", [0.001]), array("d", [0.2]))
    environment = Environment(
        versions={"loadtest": "1"}, command=["loadtest", "run"], started_at="2026", host={"cpus": 2}, server={}
    )
    return summarise(chosen, Harvest(records, Counter({900: 3}), [health]), Bounds(), environment, {"hits_total": 3.0})


def _read(html: str) -> _Reader:
    reader = _Reader()
    reader.feed(html)
    assert reader.open == []
    return reader


def test_the_page_needs_no_network_and_escapes_what_it_was_told() -> None:
    records = [*_records(120), Record(120, 0, 3.0, 3.0, 3.1, "http_500", detail="<script>alert(1)</script>")]
    html = page(_results(records), records)
    reader = _read(html)
    assert reader.links == []
    assert "@import" not in html
    assert "url(" not in html
    assert "<script>alert(1)" not in html
    assert "m<b>" not in html
    assert reader.tags["script"] == 1


def test_the_page_shows_every_picture_and_backend() -> None:
    records = _records(120)
    html = page(_results(records), records)
    titles = (
        "TTFT over time",
        "E2E over time",
        "Requests in flight",
        "Latency percentiles",
        "Output tokens per second",
    )
    for title in (*titles, "Requests ended per second", "gpu-0", "gpu-1", "hits_total"):
        assert title in html
    assert _read(html).tags["svg"] == 6


@pytest.mark.parametrize(
    "records",
    [
        [],
        _records(1),
        _records(3, first_token=None, completion_tokens=None, backend=None, cached_tokens=None, events=0, reads=0),
        [Record(0, 0, 0.0, 0.0, 0.0, "connect", detail="refused")],
        [Record(0, 0, 0.0, 0.0, 0.0, "dropped")],
        _records(5000),
    ],
    ids=["nothing", "one", "embeddings", "one failure", "one dropped", "many"],
)
def test_any_run_can_be_shown(records: list[Record]) -> None:
    results = _results(records)
    html = page(results, records)
    _read(html)
    assert len(html) < 600_000
    console = Console(file=io.StringIO(), width=80)
    show(results, console)


def test_the_terminal_tells_failures_latencies_and_backends_in_80_columns() -> None:
    records = [*_records(50), Record(50, 0, 3.0, 3.0, 3.1, "http_500", detail="[bold]odd[/] markup")]
    file = io.StringIO()
    show(_results(records), Console(file=file, width=80))
    shown = file.getvalue()
    for expected in ("http_500: [bold]odd[/] markup", "TTFT, intended", "gpu-1", "1 of 51 requests failed"):
        assert expected in shown
    assert max(map(len, shown.splitlines())) <= 80


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
    recent.take(Tick(5.0, [Record(0, 0, 0.0, 0.0, 4.0, "ok", first_token=3.0, completion_tokens=100)], 7))
    assert recent.figures()["TTFT p50"] == "3.00 s"
    assert recent.figures()["tok/s"] == "20"
    recent.take(Tick(20.0, [Record(1, 0, 19.0, 19.0, 19.5, "ok", first_token=19.1, completion_tokens=50)], 2))
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
    assert without_secrets(["run", "--api-key", "sk-1", "-c", "2"]) == ["run", "--api-key", "***", "-c", "2"]
    assert without_secrets(["run", "--api-key=sk-1"]) == ["run", "--api-key=***"]
