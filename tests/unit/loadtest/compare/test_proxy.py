"""A proxy is used from its first good answers on, and one that ends is reported with its last words."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtest.compare.proxy import Peer, Setting, started
from loadtest.compare.turn import Spending, others_share
from loadtest.servers.processes import free_ports
from loadtest.servers.server import ServerFailed, ask
from loadtest.workloads.prompts import Endpoint

# Refuses twice before it answers well, as a proxy does that has not looked at its backends yet.
_ANSWERS = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    refused = 0
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        Handler.refused += 1
        body = b'{"choices": []}' if Handler.refused > 2 else b"no backend yet"
        self.send_response(200 if Handler.refused > 2 else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def python(code: str) -> Peer:
    def arguments(setting: Setting) -> list[str]:
        return ["-c", code, str(setting.port)]

    find: Callable[[Path], Path | None] = lambda _: Path(sys.executable)  # noqa: E731
    return Peer("scripted", policy="none", find=find, arguments=arguments)


def setting(folder: Path) -> Setting:
    port, metrics_port = free_ports(2)
    return Setting(("http://127.0.0.1:1",), port, metrics_port=metrics_port, folder=folder)


def test_it_is_ready_once_it_answers_well_and_its_processes_are_measured(tmp_path: Path) -> None:
    at = setting(tmp_path)
    with started(python(_ANSWERS), tmp_path, at, tmp_path / "log.err", Endpoint.CHAT) as proxy:
        with Spending(proxy.pid) as spent:
            for _ in range(20):
                assert ask(f"{proxy.url}/v1/chat/completions", b"{}") == b'{"choices": []}'
        proxy.check()
    assert spent.cpu_seconds is not None
    assert 0 < spent.cpu_seconds < 5
    assert spent.memory_mib is not None
    assert spent.memory_mib > 1
    with pytest.raises(OSError, match="refused"):
        ask(f"{proxy.url}/v1/chat/completions", b"{}")


def test_one_that_ends_is_reported_with_its_last_words(tmp_path: Path) -> None:
    dying = python("import sys; print('no such policy', file=sys.stderr); sys.exit(3)")
    with (
        pytest.raises(ServerFailed, match="ended by itself, exit code 3") as failed,
        started(dying, tmp_path, setting(tmp_path), tmp_path / "log.err", Endpoint.CHAT),
    ):
        pass
    assert failed.value.log == ["no such policy"]


def test_without_a_proxy_nothing_is_spent() -> None:
    with Spending(None) as spent:
        pass
    assert (spent.cpu_seconds, spent.memory_mib, spent.others_share) == (None, None, None)


def test_what_others_take_of_the_machine_is_what_is_busy_beside_us() -> None:
    assert others_share(busy_seconds=15.0, ours_seconds=12.0, core_seconds=20.0) == pytest.approx(0.15)
    assert others_share(busy_seconds=11.9, ours_seconds=12.0, core_seconds=20.0) == 0  # clocks differ a little
    with Spending(None, all_are_ours=True) as spent:
        sum(range(200_000))
    assert spent.others_share is not None
    assert 0 <= spent.others_share < 2
