"""A simulated engine can crash, hang and come back at its address."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from gateway.cli.demo import free_ports
from loadtest.servers.engines import SimulatedProcess
from loadtest.servers.processes import NotServing, serves


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[SimulatedProcess]:
    process = SimulatedProcess(["--time-scale", "0"], free_ports(1)[0], tmp_path / "engine.log")
    try:
        yield process
    finally:
        process.stop()


def test_one_that_is_killed_comes_back_as_another_process_at_the_same_address(engine: SimulatedProcess) -> None:
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


def test_one_that_hangs_answers_nothing_until_it_may_go_on(engine: SimulatedProcess) -> None:
    engine.start()
    engine.wait_ready()
    engine.suspend()
    assert not serves(f"{engine.url}/health", timeout_seconds=0.3)
    engine.resume()
    assert serves(f"{engine.url}/health")


def test_one_that_cannot_start_says_why(tmp_path: Path) -> None:
    broken = SimulatedProcess(["--no-such-flag"], free_ports(1)[0], tmp_path / "engine.log")
    with pytest.raises(NotServing, match="was not started"):
        broken.wait_ready()
    broken.start()
    with pytest.raises(NotServing, match=r"exit code 2[\s\S]*no-such-flag"):
        broken.wait_ready()
    broken.stop()
