"""`gateway backends` and `gateway reload` against a gateway's own admin port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from structlog.testing import capture_logs
from typer.testing import CliRunner, Result

from gateway.__main__ import app
from gateway.app import Gateway
from gateway.config.file import parse


@asynccontextmanager
async def gateway(**changes: Any) -> AsyncIterator[str]:
    """The URL of the admin port of a gateway whose backends a and b answer nothing; `changes`: for a reload."""
    backends = [{"url": f"http://127.0.0.1:{port}", "name": name} for port, name in ((1, "a"), (2, "b"))]
    document = {"backends": backends, "server": {"host": "127.0.0.1", "port": 0, "admin": {"port": 0}}}
    with capture_logs():
        gateway = Gateway(parse(document), None, load=lambda: parse(document | changes))
        async with gateway.running() as port:
            yield f"http://127.0.0.1:{port}"


async def run(url: str, *arguments: str, command: str = "backends") -> Result:
    words = [command, "--admin", url, *arguments]
    return await asyncio.to_thread(CliRunner().invoke, app, words, env={"COLUMNS": "160"})


async def test_backends_are_shown_with_their_state_and_why() -> None:
    async with gateway() as url:
        for arguments in ((), ("list",)):
            text = (await run(url, *arguments)).output
            assert "because" in text
            assert "file" in text
        assert '"removed_by_hand": []' in (await run(url, "list", "--json")).output


async def test_they_are_added_drained_and_removed() -> None:
    async with gateway() as url:
        added = await run(url, "add", "http://127.0.0.1:3", "--name", "c", "--max-in-flight", "4")
        assert (added.exit_code, added.output) == (0, "added c (http://127.0.0.1:3)\n")
        assert (await run(url, "drain", "c", "--wait")).output == "c: drained\n"
        assert "drains, 0 sequences in flight (by hand)" in (await run(url)).output
        assert (await run(url, "undrain", "c")).output.startswith("c is ")
        assert (await run(url, "remove", "a", "--wait")).output == "a: drained\nremoved a\n"
        assert "Removed by hand, though a source lists them: a" in (await run(url)).output
        assert (await run(url, "remove", "c")).output == "removed c\n"


async def test_what_is_refused_is_said() -> None:
    async with gateway() as url:
        for arguments, text in (
            (("drain", "x"), "No backend is named 'x'. Backends: a, b."),
            (("add", "http://127.0.0.1:1"), "backend 'a' is at http://127.0.0.1:1"),
            (("add", "ftp://nonsense"), "must look like http://host:port"),
        ):
            result = await run(url, *arguments)
            assert result.exit_code == 1
            assert text in result.output


async def test_a_reload_shows_what_has_changed() -> None:
    backends = [{"url": "http://127.0.0.1:1", "name": "a", "max_in_flight": 7}]
    changes = {"backends": backends, "server": {"host": "127.0.0.1", "port": 4, "admin": {"port": 0}}}
    async with gateway(**changes) as url:
        assert (await run(url, command="reload")).output.splitlines() == [
            "changed: backends.b: removed",
            "changed: backends.a.max_in_flight: auto -> 7",
            "needs a restart: server.port: 0 -> 4",
        ]
        assert '"changed": []' in (await run(url, "--json", command="reload")).output
    async with gateway() as url:
        assert (await run(url, command="reload")).output == "nothing has changed\n"
    async with gateway(backends=[]) as url:
        result = await run(url, command="reload")
        assert (result.exit_code, "Nothing was changed. configuration: no backends" in result.output) == (1, True)
