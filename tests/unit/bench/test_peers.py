"""Ours is started with the benchmark's file and its ports; the others as for any comparison."""

from pathlib import Path

import pytest

from gateway.config import file as config_file
from tests.bench.peers import PEERS, setting
from tests.bench.place import SOURCES, Place, Ports

PORTS = Ports(proxy=8111, metrics=8711, engines=(9211, 9212))


def test_ours_is_started_with_the_benchmarks_file_and_its_ports_in_the_environment(tmp_path: Path) -> None:
    ours, started = PEERS["gateway"], setting(Place(tmp_path), PORTS)
    assert ours.arguments(started) == ["-m", "gateway", "serve", "-c", str(SOURCES / "gateway.yaml")]
    assert ours.environment(started) == {
        "BENCH_PORT": "8111",
        "BENCH_METRICS_PORT": "8711",
        "BENCH_ENGINE_1_PORT": "9211",
        "BENCH_ENGINE_2_PORT": "9212",
    }
    assert not ours.routes_by_prefix  # ours is held against those that do


def test_the_gateways_file_is_valid_and_takes_the_ports_of_this_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in PEERS["gateway"].environment(setting(Place(tmp_path), PORTS)).items():
        monkeypatch.setenv(name, value)
    found = config_file.load(SOURCES / "gateway.yaml", [])
    assert (found.server.port, found.server.admin and found.server.admin.port) == (8111, 8711)
    assert [backend.url for backend in found.backends] == PORTS.backends
    assert (found.routing.policy, found.server.access_log) == ("prefix", True)


def test_a_proxy_keeps_its_files_in_the_benchmarks_folder(tmp_path: Path) -> None:
    file = Path(PEERS["haproxy"].arguments(setting(Place(tmp_path), PORTS))[-1])
    assert file.is_relative_to(tmp_path)
    assert all(f"127.0.0.1:{port}" in file.read_text() for port in (8111, 9211, 9212))
