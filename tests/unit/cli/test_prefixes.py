import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from io import StringIO
from random import Random
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gateway.__main__ import app
from gateway.cli.pages import page
from gateway.config import Listen
from gateway.core.observe.metrics import Breathe
from gateway.features.insights.page import PrefixPage
from gateway.features.insights.report import make_report
from gateway.features.insights.samples import PrefixReport
from gateway.features.operate.admin_http import OperatorPort
from tests.unit.insights.traffic import Prose, chat, read, report_of, send, times
from tests.unit.pages import serving


@pytest.fixture
def report() -> PrefixReport:
    """Of traffic with a time at the top of its system prompt."""
    random = Random(4)
    prose, clock, collected = Prose(random), times(random), PrefixReport(0.0, Random(1))
    system = prose.text(6000)
    requests = [read(chat(f"Now: {next(clock)}\n{system}", prose.text(200))) for _ in range(30)]
    send(collected, requests, client=lambda _: "team-a")
    return collected


def shown(document: dict[str, Any]) -> str:
    console = Console(width=120, file=StringIO())
    with console.capture() as captured:
        console.print(page("prefixes.jinja", document))
    return captured.get()


@asynccontextmanager
async def admin_port(report: PrefixReport | None) -> AsyncIterator[str]:
    def prepare(window_seconds: float | None) -> Callable[[Breathe], dict[str, Any]] | None:
        return None if report is None else partial(make_report, report.snapshot(31.0, window_seconds))

    pages = PrefixPage(prepare).routes()
    async with OperatorPort("server.admin", Listen(port=0)).listening(pages) as port:
        yield f"http://127.0.0.1:{port}"


async def run(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, app, ["prefixes", *arguments], env={"COLUMNS": "120"})


def test_a_cause_is_described_and_drawn(report: PrefixReport) -> None:
    text = shown(report_of(report, 31.0))
    assert "1. timestamp in messages[0] (system), byte 5 of it" in text
    assert "About 30 requests of team-a" in text
    assert "Move the time behind the shared text" in text
    (bar,) = [line for line in text.splitlines() if line.strip().startswith("█▒█")]
    assert bar.strip().startswith("█▒████")
    assert bar.strip().endswith("█··")
    assert "█ 3 shared  ▒ 5 differs  █ 1,5" in text
    assert "0%  found in a cache" in text


def test_names_that_look_like_markup_are_shown_as_they_are(report: PrefixReport) -> None:
    document = report_of(report, 31.0)
    document["clients"][0]["client"] = "[red]team"
    assert "[red]team" in shown(document)


def test_that_there_is_no_cause_is_shown() -> None:
    system = Prose(Random(2)).text(3000)
    collected = PrefixReport(0.0, Random(1))
    now = send(collected, [read(chat(system, f"Question {number}")) for number in range(8)])
    text = shown(report_of(collected, now))
    assert "No cause found" in text
    assert "Sampled 8 prompts of 8 requests." in text
    assert "Most reused prefixes" in text


def test_a_gateway_without_requests_says_so() -> None:
    text = shown(report_of(PrefixReport(0.0, Random(1)), 1.0))
    assert "No requests yet." in text
    assert "Most reused" not in text


async def test_the_command_asks_a_running_gateway(report: PrefixReport) -> None:
    async with admin_port(report) as url:
        result = await run(url)
        assert result.exit_code == 0
        assert "1. timestamp in messages[0] (system)" in result.stdout
        as_json = await run(url, "--json", "--minutes", "5")
        assert json.loads(as_json.stdout)["breakers"][0]["kind"] == "timestamp"


async def test_a_disabled_report_is_an_error_of_one_line() -> None:
    async with admin_port(None) as url:
        result = await run(url)
    assert result.exit_code == 1
    assert result.stderr == f"gateway: {url}: The prefix report is disabled: set prefix_report.enabled to true.\n"


async def test_a_server_that_is_no_gateway_is_an_error_of_one_line() -> None:
    with serving(lambda _: (404, b"")) as url:
        result = await run(url)
    assert result.exit_code == 1
    assert result.stderr.endswith("returned 404: is this the admin port of a gateway?\n")
    assert len(result.stderr.splitlines()) == 1


async def test_a_report_of_another_shape_is_an_error_of_one_line() -> None:
    with serving(lambda _: (200, b'{"totals": 3}')) as url:
        result = await run(url)
    assert result.exit_code == 1
    assert "unsupported report format" in result.stderr


@contextmanager
def answering(status: int, body: bytes) -> Iterator[str]:
    with serving(lambda _: (status, body)) as url:
        yield url


def ask(url: str) -> Result:
    return CliRunner().invoke(app, ["prefixes", url, "--json"])


def test_a_document_comes_back() -> None:
    with answering(200, json.dumps({"breakers": []}).encode()) as url:
        assert json.loads(ask(url).stdout) == {"breakers": []}
        assert json.loads(ask(url + "/").stdout) == {"breakers": []}


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (404, b'{"error": "It is switched off."}', "{url}: It is switched off."),
        (404, b"404: Not Found", "{url}{path} returned 404: is this the admin port of a gateway?"),
        (200, b"<html>", "{url}{path} returned no gateway document: is this the admin port of a gateway?"),
        (200, b"[1]", "{url}{path} returned no gateway document: is this the admin port of a gateway?"),
    ],
)
def test_other_answers_are_errors_of_one_line(status: int, body: bytes, message: str) -> None:
    with answering(status, body) as url:
        result = ask(url)
    assert result.exit_code == 1
    assert result.stderr == f"gateway: {message.format(url=url, path='/admin/prefixes?minutes=0')}\n"


@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1:99999", "ftp://127.0.0.1"])
def test_what_is_no_url_is_an_error_of_one_line(url: str) -> None:
    result = ask(url)
    assert result.exit_code == 1
    assert result.stderr.startswith(f"gateway: {url} is unreachable: ")
    assert len(result.stderr.splitlines()) == 1


def test_a_closed_port_is_an_error_of_one_line() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        result = ask(f"http://127.0.0.1:{bound.getsockname()[1]}")
    assert result.exit_code == 1
    assert re.search(r"is unreachable: .*refused: is this the admin port of a running gateway\?\n$", result.stderr)
