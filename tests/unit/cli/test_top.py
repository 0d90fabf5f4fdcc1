"""`gateway top`: pages made of the dashboard's stream, and the command against an admin port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import StringIO
from typing import Any

import orjson
import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from gateway.__main__ import app
from gateway.admin_http import OperatorPort
from gateway.cli.top import Top, plain
from gateway.config import AdminConfig
from gateway.page.live_view import LiveView
from tests.unit.page.builders import House, record

TENANT = "a\x1b]0;taken\x07[red]"


def messages(house: House, requests: int = 30) -> list[tuple[str, Any]]:
    """What the stream sends of it: everything, and a second later what is new."""
    view = LiveView(house.gateway.dashboard_sources)
    view.begin()
    sent = [("full", view.full())]
    for number in range(requests):
        house.gateway.finished.add(record(f"r{number}", backend="gpu-1", model="m\x1b[31m"))
    house.gateway.finished.add(record("failed", outcome="queue_full"))
    house.now += 1
    sent.append(("tick", view.tick()))
    return [(kind, orjson.loads(orjson.dumps(document))) for kind, document in sent]


def shown(top: Top, lines: int = 40, width: int = 160) -> str:
    console = Console(width=width, file=StringIO())
    console.print(top.screen(lines))
    return console.file.getvalue()  # type: ignore[attr-defined,no-any-return]


def busy() -> House:
    house = House(3)
    house.place(12)
    house.place(4, tenant=TENANT)
    return house


def test_a_page_has_engines_the_queue_and_the_last_requests() -> None:
    top = Top()
    assert "waiting for the gateway" in shown(top)
    for message in messages(busy()):
        top.take(*message)
    text = shown(top)
    assert "3/3 engines up · 12 in flight · 4 waiting · 31.0 requests/s, 1.0 failed" in text
    assert "4/4/4" in text
    assert "gpu-0: 4 of 4 slots taken" in text or "4 of 4 slots taken" in text
    assert "queue_full" in text
    assert "80" in text


def test_what_clients_choose_cannot_command_the_terminal() -> None:
    top = Top()
    for message in messages(busy()):
        top.take(*message)
    text = shown(top)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[red]" in text
    assert plain("a\nb\u202e" * 100, 5) == "a\N{REPLACEMENT CHARACTER}b\N{REPLACEMENT CHARACTER}…"


@pytest.mark.parametrize("lines", [10, 24, 60])
def test_a_large_fleet_leaves_room_for_requests(lines: int) -> None:
    top = Top()
    for message in messages(House(100)):
        top.take(*message)
    text = shown(top, lines)
    assert len(text.splitlines()) <= max(lines, 18)
    assert "more" in text
    assert "s ago" in text


def test_rows_that_came_before_are_not_shown_twice() -> None:
    top, house = Top(), House(1)
    sent = messages(house, 3)
    for message in (*sent, sent[-1]):
        top.take(*message)
    assert shown(top).count("s ago") == 4
    top.take("full", sent[-1][1])
    assert shown(top).count("s ago") == 4


@asynccontextmanager
async def admin_port(token: str = "") -> AsyncIterator[str]:
    house = busy()
    house.gateway.finished.add(record("r1"))
    port = OperatorPort("server.admin", AdminConfig(port=0, token=token))
    async with port.listening(house.gateway.admin_routes()) as number:
        try:
            yield f"http://127.0.0.1:{number}"
        finally:
            house.gateway.dashboard.stop()


async def run(*arguments: str, token: str = "") -> Result:
    env = {"COLUMNS": "160", "LINES": "40", "GATEWAY_ADMIN_TOKEN": token}
    return await asyncio.to_thread(CliRunner().invoke, app, ["top", *arguments], env=env)


async def test_the_command_shows_one_page_of_a_gateway() -> None:
    async with admin_port(token="t0ken") as url:
        result = await run(url, "--once", token="t0ken")
        assert result.exit_code == 0, result.output
        assert "3/3 engines up" in result.output
        assert "completed" in result.output
        refused = await run(url, "--once", token="wrong")
        assert refused.exit_code == 1
        assert "needs its token" in refused.output


async def test_a_gateway_that_is_not_there_is_said() -> None:
    result = await run("http://127.0.0.1:1", "--once")
    assert (result.exit_code, "is unreachable" in result.output) == (1, True)


def test_names_of_engines_are_whole_in_a_narrow_terminal() -> None:
    top = Top()
    for kind, document in messages(House(12)):
        top.take(kind, document)
    page = shown(top, width=56)
    assert all(f"gpu-{number} " in page for number in range(12))
