import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadtest.servers.processes import free_ports
from tests.unit.loadtest.vllm_cpu.test_process import a_model, fake_venv, wait_gone, worker_of


@contextmanager
def serving(folder: Path, before_serving: str = "") -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command on a stand-in engine, and the port that it was given."""
    [port] = free_ports(1)
    command = [sys.executable, "-m", "loadtest.vllm_cpu.serve", "--model", str(a_model(folder)), "--port", str(port)]
    command += ["--venv", str(fake_venv(folder, before_serving)), "--log", str(folder / "engine.log")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process, port
        finally:
            process.kill()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_engine_serves_at_the_port_until_a_signal_stops_it(tmp_path: Path, number: signal.Signals) -> None:
    with serving(tmp_path) as (process, port):
        assert process.stdout is not None
        assert process.stdout.readline().rstrip().endswith(f"at http://127.0.0.1:{port}")
        with socket.create_connection(("127.0.0.1", port)):
            pass
        process.send_signal(number)
        assert process.wait(20) == 0
        wait_gone(worker_of(tmp_path))


def test_an_engine_that_cannot_start_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    with serving(tmp_path, before_serving="print('out of memory', flush=True); sys.exit(3)") as (process, _):
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "exit code 3" in errors
    assert errors.splitlines()[-1] == "out of memory"


def test_an_engine_that_ends_later_ends_the_command(tmp_path: Path) -> None:
    with serving(tmp_path, before_serving="import os, threading; threading.Timer(1.5, os._exit, (4,)).start()") as (
        process,
        _,
    ):
        _, errors = process.communicate(timeout=20)
    assert process.returncode == 1
    assert "has ended" in errors
