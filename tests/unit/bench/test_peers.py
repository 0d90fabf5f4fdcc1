"""Every peer is started on the same address, with the same backends, routing by prefix where it can."""

import shutil
import subprocess
from pathlib import Path

import pytest

from gateway import config_file
from tests.bench import peers
from tests.bench.peers import PEERS, Peer
from tests.bench.place import SOURCES, Place, Ports

PORTS = Ports(proxy=8100, metrics=8700, engines=(9200, 9201))
ROUTERS = ["sglang-router", "vllm-router", "smg"]


def with_programs(place: Place) -> None:
    """Pretend that the routers are installed."""
    for name, program in {"sglang-router": "python", "vllm-router": "vllm-router", "smg": "smg"}.items():
        path = place.peer(name) / "bin" / program
        path.parent.mkdir(parents=True)
        path.touch()


@pytest.mark.parametrize("name", ROUTERS)
def test_a_router_is_told_address_backends_and_the_cache_aware_policy(name: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    with_programs(place)
    command = " ".join(PEERS[name].command(place, PORTS))
    assert command.startswith(str(place.peer(name) / "bin"))
    assert "--host 127.0.0.1 --port 8100" in command
    assert "--worker-urls http://127.0.0.1:9200 http://127.0.0.1:9201" in command
    assert "--policy cache_aware" in command
    assert "--prometheus-host 127.0.0.1 --prometheus-port 8700" in command
    assert "--max-concurrent-requests 4096" in command
    assert PEERS[name].is_router


@pytest.mark.parametrize("name", ["nginx", "haproxy"])
def test_a_plain_proxy_reads_a_configuration_with_the_ports_of_this_run(name: str, tmp_path: Path) -> None:
    place = Place(tmp_path)
    arguments = PEERS[name].arguments(place, PORTS)
    text = Path(arguments[-1]).read_text()
    assert all(f"127.0.0.1:{port}" in text for port in (8100, 9200, 9201))
    assert "$" not in text
    assert not PEERS[name].is_router


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_nginx_accepts_its_configuration(tmp_path: Path) -> None:
    command = PEERS["nginx"].command(Place(tmp_path), PORTS)
    told = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert told.returncode == 0, told.stderr


def test_ours_is_started_with_the_benchmarks_file_and_its_ports_in_the_environment() -> None:
    ours = PEERS["gateway"]
    assert ours.arguments(Place(Path("anywhere")), PORTS) == ["serve", "-c", str(SOURCES / "gateway.yaml")]
    assert ours.environment(PORTS) == {
        "BENCH_PORT": "8100",
        "BENCH_METRICS_PORT": "8700",
        "BENCH_ENGINE_1_PORT": "9200",
        "BENCH_ENGINE_2_PORT": "9201",
    }
    assert not ours.is_router


def test_the_gateways_file_is_valid_and_takes_the_ports_of_this_run(monkeypatch: pytest.MonkeyPatch) -> None:
    ports = Ports(proxy=8111, metrics=8711, engines=(9211, 9212))
    for name, value in PEERS["gateway"].environment(ports).items():
        monkeypatch.setenv(name, value)
    found = config_file.load(SOURCES / "gateway.yaml", [])
    assert (found.server.port, found.server.admin and found.server.admin.port) == (8111, 8711)
    assert [backend.url for backend in found.backends] == ports.backends
    assert (found.routing.policy, found.server.access_log) == ("prefix", True)


def test_names_choose_proxies_in_their_order_and_none_chooses_all() -> None:
    assert [peer.name for peer in peers.named(["smg", "nginx"])] == ["smg", "nginx"]
    assert peers.named([]) == list(PEERS.values())
    with pytest.raises(ValueError, match="no proxy envoy"):
        peers.named(["envoy"])


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="smg is not installed"):
        PEERS["smg"].command(Place(tmp_path), PORTS)


def test_versions_of_peers_are_pinned() -> None:
    routers: list[Peer] = [peer for peer in PEERS.values() if peer.is_router]
    assert [peer.package.partition("==")[0] for peer in routers] == ROUTERS
    assert all(peer.package.partition("==")[2] for peer in routers)
