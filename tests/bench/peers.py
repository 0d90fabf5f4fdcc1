"""The proxies whose cost is compared, and how each is started before the mock engines."""

from dataclasses import replace
from pathlib import Path

from loadtest.compare.peers import OURS, ours
from loadtest.compare.peers import PEERS as KNOWN
from loadtest.compare.proxy import Peer, Setting
from tests.bench.place import SOURCES, Place, Ports

_OTHERS = ("nginx", "haproxy", "sglang-router", "vllm-router", "smg")


def ours_with(config: Path) -> Peer:
    """Our gateway with this configuration, which reads the ports from the environment."""

    def arguments(setting: Setting) -> list[str]:
        return ["-m", "gateway", "serve", "-c", str(config)]

    return replace(ours(), arguments=arguments, environment=_ports_of)


def _ports_of(setting: Setting) -> dict[str, str]:
    engines = {f"BENCH_ENGINE_{number}_PORT": url.rpartition(":")[2] for number, url in enumerate(setting.backends, 1)}
    return {"BENCH_PORT": str(setting.port), "BENCH_METRICS_PORT": str(setting.metrics_port), **engines}


PEERS: dict[str, Peer] = {OURS: ours_with(SOURCES / "gateway.yaml"), **{name: KNOWN[name] for name in _OTHERS}}


def setting(place: Place, ports: Ports) -> Setting:
    """What a proxy is started for."""
    folder = place.root / "started"
    folder.mkdir(parents=True, exist_ok=True)
    return Setting(tuple(ports.backends), ports.proxy, ports.metrics, folder)
