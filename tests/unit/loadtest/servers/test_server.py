"""A server is awaited until it answers 200, can crash, hang and come back, and ends with all that it has started."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from loadtest.engine import EngineConfig, SimulatedEngine
from loadtest.servers.processes import free_ports
from loadtest.servers.server import Launch, Server, ServerFailed, serves, simulated_engine, wait_until
from tests.processes import is_gone

_DEADLINE_SECONDS = 120.0


def started(script: str, log: Path) -> Server:
    """Once it has said a word."""
    group = Server(Launch(["sh", "-c", script], "http://127.0.0.1:1"), log)
    group.start()
    deadline = time.monotonic() + _DEADLINE_SECONDS
    while not log.read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return group


def test_what_is_printed_apart_keeps_its_end_only(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "one.log"
    much = "head -c 200000 /dev/zero | tr '\\0' x; echo end; echo bad >&2; echo ready >> $0; sleep 60"
    server = Server(Launch(["sh", "-c", much, str(tmp_path / "done")], "http://127.0.0.1:1", apart=True), log)
    server.start()
    server.wait_until((tmp_path / "done").exists)
    server.stop()
    assert log.read_text() == "bad\n"
    kept = log.with_suffix(".out").read_text()
    assert len(kept) == 65536
    assert kept.endswith("xend\n")


def test_a_leader_that_heeds_the_request_is_not_killed(tmp_path: Path) -> None:
    group = started("trap 'exit 7' TERM; echo ready; while :; do sleep 0.05; done", tmp_path / "log")
    assert group.exit_code() is None
    assert group.stop(_DEADLINE_SECONDS)
    assert group.exit_code() == 7


def test_a_leader_that_does_not_is_killed_after_the_grace(tmp_path: Path) -> None:
    group = started("trap '' TERM; echo ready; while :; do sleep 0.05; done", tmp_path / "log")
    assert not group.stop(0.1)
    assert group.exit_code() == -9


def test_workers_do_not_outlive_their_leader(tmp_path: Path) -> None:
    log = tmp_path / "log"
    group = started("sleep 300 & echo $!; exit 0", log)
    worker = int(log.read_text())
    assert group.stop(_DEADLINE_SECONDS)
    assert is_gone(worker)


def test_a_program_that_is_not_there_cannot_start(tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="cannot start no-such-program"):
        Server(Launch(["no-such-program"], "http://127.0.0.1:1"), tmp_path / "log").start()


def test_a_group_that_is_killed_is_gone_with_its_workers_and_stopping_it_is_harmless(tmp_path: Path) -> None:
    log = tmp_path / "log"
    group = started("sleep 300 & echo $!; wait", log)
    worker = int(log.read_text())
    group.kill()
    assert group.exit_code() == -9
    assert group.stop(_DEADLINE_SECONDS)
    assert is_gone(worker)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Server]:
    process = simulated_engine(["--time-scale", "0"], tmp_path / "engine.log")
    try:
        yield process
    finally:
        process.stop()


def test_one_that_is_killed_comes_back_as_another_process_at_the_same_address(engine: Server) -> None:
    engine.start()
    engine.wait_ready()
    first = engine.pid
    engine.kill()
    assert not serves(f"{engine.url}/health")
    engine.kill()  # harmless
    engine.start()
    engine.wait_ready()
    assert serves(f"{engine.url}/health")
    assert engine.pid != first


def test_one_that_hangs_answers_nothing_until_it_may_go_on(engine: Server) -> None:
    engine.start()
    engine.wait_ready()
    engine.suspend()
    assert not serves(f"{engine.url}/health", timeout_seconds=0.3)
    engine.resume()
    assert serves(f"{engine.url}/health")


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = simulated_engine(["--no-such-flag"], tmp_path / "engine.log")
    with pytest.raises(ServerFailed, match="has not been started"):
        broken.wait_ready()
    broken.start()
    with pytest.raises(ServerFailed, match=r"exit code 2[\s\S]*no-such-flag"):
        broken.wait_ready()
    broken.stop()


async def test_a_server_serves_when_it_answers_200() -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0)) as engine:
        assert await asyncio.to_thread(serves, f"{engine.url}/health")
        assert not await asyncio.to_thread(serves, f"{engine.url}/nowhere")


def test_where_nothing_listens_nothing_serves() -> None:
    assert not serves(f"http://127.0.0.1:{free_ports(1)[0]}/health")


def test_one_that_ends_or_takes_too_long_is_not_waited_for() -> None:
    with pytest.raises(ServerFailed, match="exit code 3"):
        wait_until(lambda: False, lambda: 3, 20.0)
    with pytest.raises(ServerFailed, match=r"after 0 s"):
        wait_until(lambda: False, lambda: None, 0.0)


async def test_whoever_answers_at_the_port_of_one_that_has_ended_is_another() -> None:
    async with SimulatedEngine(EngineConfig(time_scale=0)) as engine:
        healthy = partial(serves, f"{engine.url}/health")
        with pytest.raises(ServerFailed, match="exit code 1"):
            await asyncio.to_thread(wait_until, healthy, lambda: 1, 20.0)
        assert await asyncio.to_thread(wait_until, healthy, lambda: None, 20.0) < 20.0
