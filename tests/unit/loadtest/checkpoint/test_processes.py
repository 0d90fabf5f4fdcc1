"""Which process listens, and how it was started."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

from loadtest.checkpoint.servers import NoProcess, pid_at, ports_of, process_at

_SERVER = """
import os, socket, sys
first, second = socket.create_server(("127.0.0.1", 0)), socket.create_server(("127.0.0.1", 0))
if os.fork():
    print(first.getsockname()[1], second.getsockname()[1], flush=True)
sys.stdin.read()
"""


@pytest.fixture
def server() -> Iterator[tuple[int, list[int]]]:
    """The process and its two ports; its child has inherited both sockets."""
    command = [sys.executable, "-c", _SERVER, "--api-key", "s3cr3t"]
    variables = {"HF_TOKEN": "s3cr3t", "VLLM_LOGGING_LEVEL": "INFO", "EDITOR": "vi"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables) as process:
        assert process.stdout is not None
        yield process.pid, [int(port) for port in process.stdout.readline().split()]


def test_the_process_is_found_by_its_port_and_its_secrets_are_not_reported(server: tuple[int, list[int]]) -> None:
    pid, ports = server
    found = process_at(f"http://127.0.0.1:{ports[0]}")
    assert found.pid == pid
    assert found.command[-2:] == ["--api-key", "***"]
    assert found.environment == {"HF_TOKEN": "***", "VLLM_LOGGING_LEVEL": "INFO"}
    assert found.started_at.startswith("20")
    assert "s3cr3t" not in found.model_dump_json()


def test_all_its_ports_are_known(server: tuple[int, list[int]]) -> None:
    pid, ports = server
    assert ports_of(pid) == sorted(ports)


@pytest.mark.parametrize(
    ("url", "why"),
    [("http://192.0.2.1:8000", "192.0.2.1 is another machine"), ("http://127.0.0.1:1", "nothing of this network")],
)
def test_a_process_that_cannot_be_known_says_why(url: str, why: str) -> None:
    with pytest.raises(NoProcess, match=why):
        pid_at(url)
