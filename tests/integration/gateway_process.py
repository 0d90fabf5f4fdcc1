"""The gateway's command with a configuration file, in a process of its own; admission's sums are recounted there."""

import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from openai import AsyncOpenAI

from gateway.cli.demo import free_ports
from loadtest.servers.processes import serves
from tests.integration.fleet import Fleet
from tests.integration.processes import stopped_at_exit, wait_until_serving
from tests.recounted_gateway import LOGGED, MODULE, VIOLATIONS

SDK_TIMEOUT_SECONDS = 45.0


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
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(f"{gateway.admin_url}/metrics", timeout=5.0) as answer:
        lines = answer.read().decode().splitlines()
    assert f"# TYPE {VIOLATIONS} counter" in lines
    return [line for line in lines if line.startswith(f"{VIOLATIONS}{{")]


@contextmanager
def running_gateway(
    folder: Path, config: Mapping[str, Any], flags: Sequence[str] = (), ready_path: str = "/readyz"
) -> Iterator[Gateway]:
    """Start it, wait until it is ready, stop it and see it end well."""
    port, admin_port = free_ports(2)
    server = {"host": "127.0.0.1", "port": port, "admin": {"host": "127.0.0.1", "port": admin_port}}
    file = folder / f"gateway-{port}.yaml"
    # drain_delay is for balancers that must notice first; here nobody does
    settings = {**server, "drain_delay_seconds": 0, **config.get("server", {})}
    file.write_text(yaml.safe_dump({**config, "server": settings}))
    log = folder / f"gateway-{port}.log"
    with log.open("wb") as sink:
        process = subprocess.Popen(
            [sys.executable, "-m", MODULE, "serve", "-c", str(file), *flags],
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=subprocess.STDOUT,
        )
    url = f"http://127.0.0.1:{port}"
    with stopped_at_exit(process):
        wait_until_serving(process, url + ready_path, log)
        gateway = Gateway(url, f"http://127.0.0.1:{admin_port}")
        yield gateway
        if process.poll() is None and serves(f"{gateway.admin_url}/metrics", 2.0):
            assert violations(gateway) == []
    assert LOGGED.encode() not in log.read_bytes(), f"see {log}"
    assert process.returncode == 0, f"the gateway ended with {process.returncode}; its output is in {log}"
