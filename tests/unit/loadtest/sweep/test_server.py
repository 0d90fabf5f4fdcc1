"""How servers are started, and that they end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loadtest.drive.fleet import Stopped
from loadtest.servers.server import Launch, Server, ServerFailed
from loadtest.sweep.plan import SweepPlan, parse
from loadtest.sweep.server import command_text, engine, gateway
from loadtest.sweep.space import Configuration
from tests.processes import is_gone, is_there

_SLOW = Configuration((("max-num-seqs", 4), ("enable-prefix-caching", False)))
_WORDS = ["--max-num-seqs", "4", "--no-enable-prefix-caching"]


def plan(**changes: Any) -> SweepPlan:
    workloads = [{"name": "short", "run": {"concurrency": 8}}]
    return parse({"serve": {"simulated": True}, "flags": {}, "workloads": workloads} | changes)


def launch(command: list[str], ready_seconds: float = 30.0) -> Launch:
    # Nothing listens at the first of all ports.
    return Launch(command, "http://127.0.0.1:1", "/health", ready_seconds=ready_seconds)


def test_flags_and_a_port_are_appended_to_the_command() -> None:
    made = plan(serve={"command": ["vllm", "serve", "m"], "env": {"A": 1}})
    found = engine(made, _SLOW, 5000)
    assert found.command == ["vllm", "serve", "m", *_WORDS, "--host", "127.0.0.1", "--port", "5000"]
    assert found.environment["A"] == "1"
    assert command_text(made, _SLOW) == ["vllm", "serve", "m", *_WORDS]


def test_a_command_may_say_where_the_port_goes() -> None:
    made = plan(serve={"command": ["run", "-p", "{port}:8000"]})
    assert engine(made, _SLOW, 5000).command == ["run", "-p", "5000:8000", *_WORDS]


def test_a_simulated_engine_and_the_real_one_on_the_cpu_take_the_same_flags() -> None:
    simulated = plan(serve={"simulated": {"kv-tokens": 2000}})
    assert engine(simulated, _SLOW, 5000).command[-5:] == ["--kv-tokens", "2000", *_WORDS]
    assert command_text(simulated, _SLOW)[:2] == ["loadtest", "sim"]
    real = plan(serve={"vllm_cpu": {"model": "models/small"}})
    assert engine(real, _SLOW, 5000).command[-3:] == _WORDS
    assert command_text(real, _SLOW) == ["vllm", "serve", "models/small", *_WORDS]


def test_the_gateway_has_the_engine_alone_behind_it() -> None:
    made = plan(through=["gateway"], gateway_config="gateway.yaml")
    words = gateway(made, "http://127.0.0.1:5000", 5001).command
    assert words[words.index("--backend") + 1] == "http://127.0.0.1:5000"
    assert words[words.index("--config") + 1] == "gateway.yaml"


def test_a_server_that_ends_is_reported_with_its_code_and_its_last_words(tmp_path: Path) -> None:
    command = ["sh", "-c", "echo no room; sleep 300 & echo $!; exit 3"]
    with pytest.raises(ServerFailed, match="ended by itself, exit code 3") as raised:
        Server(launch(command), tmp_path / "server.log").__enter__()
    words, worker = raised.value.log
    assert words == "no room"
    assert is_gone(int(worker))


def test_a_server_that_is_not_ready_in_time_is_killed(tmp_path: Path) -> None:
    server = Server(launch(["sleep", "300"], ready_seconds=0.1), tmp_path / "server.log")
    with pytest.raises(ServerFailed, match=r"not ready after 0\.1 s"):
        server.__enter__()
    assert not is_there(server.pid)


def test_the_wait_for_a_server_ends_when_the_sweep_does(tmp_path: Path) -> None:
    def stop(_seconds: float) -> None:
        raise Stopped

    with pytest.raises(Stopped):
        Server(launch(["sleep", "300"]), tmp_path / "server.log", stop).__enter__()


def test_a_program_that_is_not_there_is_reported(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="cannot start no-such-program"):
        Server(launch(["no-such-program"]), tmp_path / "server.log").__enter__()
