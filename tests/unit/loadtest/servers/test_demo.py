import json
import re
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gateway.__main__ import app as gateway_command
from gateway.config.file import parse
from loadtest.servers import demo
from loadtest.servers.server import get, serves


@contextmanager
def taken(port: int = 0) -> Iterator[int]:
    """Something listens at the port."""
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((demo.HOST, port))
        listening.listen()
        yield int(listening.getsockname()[1])


def test_a_port_that_was_asked_for_and_is_in_use_is_said_before_anything_starts() -> None:
    lines: list[str] = []
    with taken() as port, pytest.raises(demo.DemoFailed, match=rf"port {port} .* make demo ARGS='--port N'"):
        demo.run(1, port, "sim", None, lines.append)
    assert lines == []


def test_a_free_port_that_was_asked_for_is_taken_with_the_next_one() -> None:
    port = free_ports_in_a_row(2)
    lines: list[str] = []
    assert demo.choose_ports(port, lines.append) == (port, port + 1)
    assert lines == []


def test_admin_goes_elsewhere_when_the_port_after_the_wanted_one_is_in_use() -> None:
    port = free_ports_in_a_row(2)
    lines: list[str] = []
    with taken(port + 1):
        chosen, admin = demo.choose_ports(port, lines.append)
    assert chosen == port
    assert admin not in (port, port + 1)
    assert lines == [f"port {port + 1} is unavailable for admin: using {admin}"]


def test_the_last_port_of_all_can_be_asked_for() -> None:
    port, admin = demo.choose_ports(65535, lambda _line: None)
    assert port == 65535
    assert 0 < admin < 65535


def test_without_a_wish_the_first_pair_is_taken_silently() -> None:
    port = free_ports_in_a_row(2)
    lines: list[str] = []
    assert demo.choose_ports(None, lines.append, first=port) == (port, port + 1)
    assert lines == []


@pytest.mark.parametrize("in_use", [[0], [1], [0, 1]])
def test_without_a_wish_the_next_free_pair_is_taken_and_said(in_use: list[int]) -> None:
    port = free_ports_in_a_row(4)
    lines: list[str] = []
    with ExitStack() as stack:
        for offset in in_use:
            stack.enter_context(taken(port + offset))
        assert demo.choose_ports(None, lines.append, first=port) == (port + 2, port + 3)
    [line] = lines
    assert f"using {port + 2} and {port + 3}" in line
    assert "make demo ARGS='--port N'" in line


def backends_answer(*states: str) -> bytes:
    return json.dumps({"backends": [{"state": state, "models": ["m"]} for state in states]}).encode()


def test_all_engines_are_up_only_when_the_gateway_says_so_of_each() -> None:
    assert demo.all_up(backends_answer("up", "up"))
    assert not demo.all_up(backends_answer("up", "unknown"))
    assert not demo.all_up(backends_answer())
    assert not demo.all_up(b'{"backends": [{"state": "up", "models": []}]}')


def test_an_error_names_the_command_that_installs_real_engines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(demo.DemoFailed, match=r"\.venv-vllm/bin/python is missing: `make demo ENGINE=vllm`"):
        demo.make_engines(1, "vllm", None, tmp_path, print)


def test_an_error_names_the_missing_load_test_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "loadtest", None)
    result = CliRunner().invoke(gateway_command, ["demo"])
    assert result.exit_code == 1
    assert re.match(r"gateway: .*loadtest.* is not installed: `pip install vllm-batching-gateway`", result.stderr)


def test_wrong_usage_and_help_name_the_command() -> None:
    wrong = subprocess.run(
        [sys.executable, "-m", "gateway", "demo", "--engine", "other"], capture_output=True, text=True
    )
    assert wrong.returncode == 2
    assert "Usage: gateway demo" in wrong.stderr
    shown = subprocess.run([sys.executable, "-m", "gateway", "demo", "--help"], capture_output=True, text=True)
    assert (shown.returncode, "--backends" in shown.stdout) == (0, True)


def test_real_engines_are_started_by_a_module_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for file in (Path(".venv-vllm/bin/python"), Path("models/small/config.json")):
        file.parent.mkdir(parents=True)
        file.touch()
    engines, model = demo.make_engines(2, "vllm", Path("models/small"), tmp_path, print)
    assert model == "small"
    assert len({engine.url for engine in engines}) == 2


def test_the_gateway_is_configured_for_this_machine_alone() -> None:
    config = parse(demo.gateway_config(["http://127.0.0.1:1", "http://127.0.0.1:2"], 8080, 9001, Path("batches")))
    assert config.batches.path == "batches"
    assert config.server.host == "127.0.0.1"
    assert config.server.admin is not None
    assert config.server.admin.port == 9001
    assert [backend.name for backend in config.backends] == ["engine-1", "engine-2"]


def test_the_first_request_can_be_pasted() -> None:
    text = demo.first_steps(8080, 9001, "demo-model", "/usr/bin/python3")
    [curl] = [line for line in text.splitlines() if line.startswith("curl")]
    words = shlex.split(curl)
    assert words[2] == "http://127.0.0.1:8080/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "demo-model"
    _, snippet = text.split("<<'PY'\n")
    assert "http://127.0.0.1:9001/metrics" in text
    compile(snippet.split("\nPY\n")[0], "snippet", "exec")


def test_a_model_folder_needs_real_engines(tmp_path: Path) -> None:
    with pytest.raises(demo.DemoFailed, match="--engine vllm"):
        demo.make_engines(1, "sim", tmp_path, tmp_path, print)


def test_a_simulated_engine_starts_answers_and_stops(tmp_path: Path) -> None:
    [engine], model = demo.make_engines(1, "sim", None, tmp_path, print)
    assert model == demo.MODEL_NAME
    try:
        engine.start()
        engine.wait_ready()
        assert serves(f"{engine.url}/v1/models")
    finally:
        engine.stop()
    assert not engine.is_running()
    assert not serves(f"{engine.url}/health")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_whole_demonstration_runs_and_one_signal_stops_all_of_it(number: signal.Signals) -> None:
    port = free_ports_in_a_row(2)
    command = [sys.executable, "-m", "gateway", "demo", "--backends", "2", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    with process.stdout as output:
        for line in output:
            lines.append(line)
            if line.startswith("Ctrl-C"):
                break
        try:
            urls = [line.split()[-1] for line in lines if line.startswith("starting")]
            assert len(urls) == 3, "".join(lines)
            assert all(serves(f"{url}/v1/models") for url in urls)
            assert demo.all_up(get(f"http://{demo.HOST}:{port + 1}/admin/backends"))
            [dashboard] = [line.split()[-1] for line in lines if line.startswith("dashboard")]
            assert serves(dashboard)
            [curl] = [line for line in lines if line.startswith("curl")]
            answer = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True, timeout=20)
            assert answer.stdout.startswith("HTTP/1.1 200")
            assert '"choices"' in answer.stdout
        finally:
            process.send_signal(number)
            rest = output.read()
            assert process.wait(20) == 0, rest
    assert not any(serves(f"{url}/health") for url in urls)


def free_ports_in_a_row(count: int) -> int:
    """The first of some free ports that follow one another."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(taken())
            try:
                for offset in range(1, count):
                    stack.enter_context(taken(first + offset))
            except (OSError, OverflowError):
                continue
            return first
