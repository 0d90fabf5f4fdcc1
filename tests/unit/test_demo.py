import json
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import demo
from gateway.config import parse


def test_a_port_in_use_is_said_before_anything_starts() -> None:
    with socket.socket() as taken:
        taken.bind((demo.HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(demo.DemoFailed, match=f"port {port} is in use"):
            demo.run(1, port, "sim", None, lambda _line: None)


def test_the_gateway_is_configured_for_this_machine_alone() -> None:
    config = parse(demo.gateway_config(["http://127.0.0.1:1", "http://127.0.0.1:2"], 8080))
    assert config.server.host == "127.0.0.1"
    assert config.server.admin is not None
    assert config.server.admin.port == 8081
    assert [backend.name for backend in config.backends] == ["engine-1", "engine-2"]


def test_the_first_request_can_be_pasted() -> None:
    text = demo.first_steps(8080, "demo-model", "/usr/bin/python3")
    [curl] = [line for line in text.splitlines() if line.startswith("curl")]
    words = shlex.split(curl)
    assert words[2] == "http://127.0.0.1:8080/v1/chat/completions"
    assert json.loads(words[-1])["model"] == "demo-model"
    _, snippet = text.split("<<'PY'\n")
    compile(snippet.split("\nPY\n")[0], "snippet", "exec")


def test_a_model_folder_needs_real_engines(tmp_path: Path) -> None:
    with pytest.raises(demo.DemoFailed, match="--engine vllm"):
        demo.make_engines(1, "sim", tmp_path, tmp_path, lambda _line: None)


def test_an_engine_that_cannot_start_is_reported_with_its_log(tmp_path: Path) -> None:
    server = demo.Server("engine-1", "http://127.0.0.1:9", ["json.tool", "/missing"], "/health", tmp_path / "log")
    server.start()
    with pytest.raises(demo.DemoFailed, match=r"engine-1 ended before it was ready(.|\n)*missing"):
        server.wait_ready()
    server.stop()


def test_a_simulated_engine_starts_answers_and_stops(tmp_path: Path) -> None:
    [engine], model = demo.make_engines(1, "sim", None, tmp_path, lambda _line: None)
    assert model == demo.MODEL_NAME
    try:
        engine.start()
        engine.wait_ready()
        assert demo.answers(f"{engine.url}/v1/models")
    finally:
        engine.stop()
    assert not engine.is_running()
    assert not demo.answers(f"{engine.url}/health")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_whole_demonstration_runs_and_one_signal_stops_all_of_it(number: signal.Signals) -> None:
    port = pair_of_free_ports()
    command = [sys.executable, "-m", "gateway", "demo", "--backends", "1", "--port", str(port)]
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
            assert len(urls) == 2, "".join(lines)
            assert all(demo.answers(f"{url}/v1/models") for url in urls)
            [curl] = [line for line in lines if line.startswith("curl")]
            answer = subprocess.run(shlex.split(curl), capture_output=True, text=True, check=True, timeout=20)
            assert answer.stdout.startswith("HTTP/1.1 200")
            assert '"choices"' in answer.stdout
        finally:
            process.send_signal(number)
            rest = output.read()
            assert process.wait(20) == 0, rest
    assert not any(demo.answers(f"{url}/health") for url in urls)


def pair_of_free_ports() -> int:
    """A free port whose successor is free too."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind((demo.HOST, 0))
            port = int(first.getsockname()[1])
            try:
                second.bind((demo.HOST, port + 1))
            except (OSError, OverflowError):
                continue
            return port
