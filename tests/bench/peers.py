"""The proxies whose cost is compared, and how each is started before the mock engines."""

from dataclasses import replace
from pathlib import Path

from loadtest.compare.peers import OURS, ours
from loadtest.compare.peers import PEERS as KNOWN
from loadtest.compare.proxy import Peer, Setting, in_venv
from tests.bench.place import SOURCES, Place, Ports

_OTHERS = ("nginx", "haproxy", "sglang-router", "vllm-router", "smg")


def ours_with(config: Path, installed: bool = False, **more: str) -> Peer:
    """Our gateway with this configuration, which reads the ports, and MORE, from the environment.

    This checkout under this Python, or the compiled build that is installed as the other proxies are.
    """
    peer = ours()
    if installed:
        more |= {"GATEWAY_PURE": "0"}  # it refuses to run as Python, whatever is set where the benchmark is called
    find, start = (in_venv(OURS, "gateway"), ["serve"]) if installed else (peer.find, ["-m", "gateway", "serve"])

    def arguments(setting: Setting) -> list[str]:
        return [*start, "-c", str(config)]

    def environment(setting: Setting) -> dict[str, str]:
        return _ports_of(setting) | more

    return replace(peer, find=find, arguments=arguments, environment=environment)


def _ports_of(setting: Setting) -> dict[str, str]:
    engines = {f"BENCH_ENGINE_{number}_PORT": url.rpartition(":")[2] for number, url in enumerate(setting.backends, 1)}
    return {"BENCH_PORT": str(setting.port), "BENCH_METRICS_PORT": str(setting.metrics_port), **engines}


CONFIG = SOURCES / "gateway.yaml"
PEERS: dict[str, Peer] = {OURS: ours_with(CONFIG), **{name: KNOWN[name] for name in _OTHERS}}


def setting(place: Place, ports: Ports) -> Setting:
    """What a proxy is started for."""
    folder = place.root / "started"
    folder.mkdir(parents=True, exist_ok=True)
    return Setting(tuple(ports.backends), ports.proxy, metrics_port=ports.metrics, folder=folder)
