"""What `gateway serve` writes to standard error, and its access log."""

import json
import os
import pty
from pathlib import Path
from typing import Any

from tests.clients import chat
from tests.fault.gateway_process import gateway_process
from tests.fault.rig import holds, running
from tests.scripted import ScriptedBackend


async def test_settings_that_make_requests_fail_are_warned_of(backend: ScriptedBackend, tmp_path: Path) -> None:
    log = tmp_path / "log"
    sections: dict[str, Any] = {
        "upstream": {"keep_alive_seconds": 10},
        "models": {"aliases": {"gpt-4o": "scripted", "gpt-5": "nothing"}},
    }

    def hints(event: str) -> list[str]:
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        return [line["hint"] for line in lines if line["event"] == event]

    with log.open("wb") as stderr:
        async with gateway_process(tmp_path, backend, stderr=stderr, sections=sections):
            await holds(lambda: bool(hints("alias_without_model")), "the alias is warned of")
    [alias] = hints("alias_without_model")
    assert "'gpt-5' is an alias of 'nothing'" in alias
    [keep_alive] = hints("risky_setting")
    assert "upstream.keep_alive_seconds is 10" in keep_alive


async def test_a_terminal_gets_lines_for_people(backend: ScriptedBackend, tmp_path: Path) -> None:
    reader, terminal = pty.openpty()
    try:
        async with gateway_process(tmp_path, backend, stderr=terminal):
            shown = b""
            while b"serving" not in shown:
                shown += os.read(reader, 65536)
    finally:
        os.close(reader)
        os.close(terminal)
    assert b"{" not in shown


FIELDS = ["tenant", "class", "address", "user_agent", "trace_id", "response_bytes"]


async def test_the_access_log_says_where_requests_come_from_if_it_is_to(backend: ScriptedBackend) -> None:
    headers = (
        b"user-agent: curl/8", b"user-agent: twice", b"user_agent: underscore", b"x-gateway-priority: batch",
        b"traceparent: 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
    )  # fmt: skip
    async with running(backend, sections={"server": {"access_log_fields": FIELDS}}) as under_test:
        plain = await under_test.ask(chat(), *headers)
        streamed = await under_test.ask(chat(stream=True))
        under_test.gateway.core.finished.settle()
        assert (plain.status, streamed.status) == (200, 200)
    first, second = [json.loads(line) for line in under_test.log.getvalue().splitlines()]
    assert (first["address"], first["user_agent"], first["class"]) == ("127.0.0.1", "twice", "batch")
    assert first["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert first["response_bytes"] == len(plain.body)
    assert (second["user_agent"], second["trace_id"], second["class"]) == (None, None, "interactive")
    assert second["response_bytes"] >= len(streamed.body)
