"""The gateway's command with a configuration file, in a process of its own; admission's sums are recounted there."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from loadtest.servers.processes import free_ports
from loadtest.servers.server import gateway_server, get, serves
from tests.bench.gateway_process import read_metrics
from tests.integration.fleet import Fleet
from tests.recounted_gateway import LIVE_BYTES, LOGGED, MODULE, VIOLATIONS

SDK_TIMEOUT_SECONDS = 45.0
STOP_SECONDS = 15.0
REST_SECONDS = 10.0


@dataclass(frozen=True)
class Gateway:
    """Where a running gateway is."""

    url: str
    admin_url: str

    def client(self, api_key: str = "none", **options: Any) -> AsyncOpenAI:
        """The OpenAI SDK; it does not try again by itself, so that tests see the first answer."""
        settings = {"max_retries": 0, "timeout": SDK_TIMEOUT_SECONDS, **options}
        return AsyncOpenAI(base_url=f"{self.url}/v1", api_key=api_key, **settings)


def config_for(fleet: Fleet, sections: Mapping[str, Any], per_backend: Mapping[str, Any]) -> dict[str, Any]:
    """A configuration with the whole fleet as backends; `per_backend` applies to the chat engines."""
    backends = [{"url": url, **per_backend} for url in fleet.chat_urls] + [{"url": fleet.embedding_url}]
    return {"backends": backends, **sections}


def violations(gateway: Gateway) -> list[str]:
    """Sums of admission that differed from their recount."""
    lines = get(f"{gateway.admin_url}/metrics", timeout_seconds=5.0).decode().splitlines()
    assert f"# TYPE {VIOLATIONS} counter" in lines
    return [line for line in lines if line.startswith(f"{VIOLATIONS}{{")]


def live_bytes(gateway: Gateway) -> float:
    """Bytes in large objects that are in memory, without a collection."""
    return read_metrics(get(f"{gateway.admin_url}/metrics", timeout_seconds=5.0).decode())[LIVE_BYTES]


def forgets_all(gateway: Gateway) -> None:
    """Wait until no large bytes are in memory. When the gateway ends, its log says what refers to them."""
    ends = time.monotonic() + REST_SECONDS
    while left := live_bytes(gateway):
        assert time.monotonic() < ends, f"{left:.0f} bytes are still in memory"
        time.sleep(0.05)


@contextmanager
def running_gateway(
    folder: Path, config: Mapping[str, Any], flags: Sequence[str] = (), ready_path: str = "/readyz"
) -> Iterator[Gateway]:
    """Start it, wait until it is ready, stop it and see it end well."""
    ports = free_ports(2)
    log = folder / f"gateway-{ports[0]}.log"
    with gateway_server(
        config, log, module=MODULE, flags=flags, ports=ports, ready_path=ready_path, stop_seconds=STOP_SECONDS
    ) as server:
        gateway = Gateway(server.url, f"http://127.0.0.1:{ports[1]}")
        yield gateway
        if server.is_running() and serves(f"{gateway.admin_url}/metrics", 2.0):
            assert violations(gateway) == []
            forgets_all(gateway)
    assert LOGGED.encode() not in log.read_bytes(), f"see {log}"
    assert server.exit_code() == 0, f"the gateway ended with {server.exit_code()}; its output is in {log}"
