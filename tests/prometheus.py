"""The alerts, the dashboard, and a real Prometheus with its promtool, as `make test` unpacks them.

Tests are skipped where these are not installed.
"""

import asyncio
import json
import shutil
import subprocess
import sys
import urllib.parse
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from loadtest.servers.processes import free_ports, launch, stop

ROOT = Path(__file__).resolve().parents[1]
ALERTS = ROOT / "config/prometheus/alerts.yaml"
DASHBOARD = ROOT / "config/grafana/gateway.json"
_EVERYTHING = {"$__rate_interval": "1m", "$instance": ".*", "$model": ".*", "$backend": ".*"}
_UNPACKED = Path(sys.executable).parents[1] / "prometheus/usr/bin"
_READY_SECONDS = 20.0
_POLL_SECONDS = 0.05


def tool(name: str) -> str:
    """Where the program is; skips the test if it is not installed."""
    found = shutil.which(name, path=f"{_UNPACKED}:/usr/local/bin:/usr/bin")
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def alerts() -> dict[str, str]:
    """The expression of each alert, by its name."""
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return {rule["alert"]: rule["expr"] for group in groups for rule in group["rules"]}


def rows_and_graphs() -> Iterator[dict[str, Any]]:
    """All panels of the dashboard: its rows, and the graphs below them."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        yield from (panel, *panel.get("panels", ()))  # a row that is collapsed holds its graphs


def graphs() -> list[dict[str, Any]]:
    return [panel for panel in rows_and_graphs() if panel["type"] != "row"]


def expressions(graph: dict[str, Any]) -> list[str]:
    """What a graph queries while every variable of the dashboard selects everything."""
    found = []
    for target in graph["targets"]:
        expression: str = target["expr"]
        for variable, value in _EVERYTHING.items():
            expression = expression.replace(variable, value)
        found.append(expression)
    return found


@dataclass(frozen=True)
class Prometheus:
    """A running one."""

    url: str
    session: aiohttp.ClientSession

    async def get(self, path: str, **parameters: str) -> Any:
        """The data of an answer of its API; an expression that is wrong is an error."""
        async with self.session.get(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}") as answer:
            document = await answer.json()
        assert document["status"] == "success", (parameters, document)
        return document["data"]

    async def query(self, expression: str) -> list[dict[str, Any]]:
        """The series of an expression, now."""
        found: list[dict[str, Any]] = (await self.get("query", query=expression))["result"]
        return found

    async def scrapes(self) -> int:
        """How often the gateway was scraped so far, in time."""
        found = await self.query('sum_over_time(up{job="gateway"}[10m])')
        return int(found[0]["value"][1]) if found else 0

    async def is_ready(self) -> bool:
        try:
            async with self.session.get(f"{self.url}/-/ready") as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


@asynccontextmanager
async def prometheus(folder: Path, *ports: int) -> AsyncIterator[Prometheus]:
    """Scrapes these ports of this machine as the job `gateway`, and knows the alerts."""
    [port] = free_ports(1)
    program = tool("prometheus")
    file = folder / "prometheus.yaml"
    job = {"job_name": "gateway", "static_configs": [{"targets": [f"127.0.0.1:{each}" for each in ports]}]}
    settings = {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}
    file.write_text(json.dumps({"global": settings, "rule_files": [str(ALERTS)], "scrape_configs": [job]}))
    command = [program, f"--config.file={file}", f"--storage.tsdb.path={folder}/tsdb"]
    with (folder / "prometheus.log").open("wb") as log:
        process = launch([*command, f"--web.listen-address=127.0.0.1:{port}"], None, subprocess.DEVNULL, log)
        try:
            async with aiohttp.ClientSession() as session:
                running = Prometheus(f"http://127.0.0.1:{port}", session)
                async with asyncio.timeout(_READY_SECONDS):
                    while not await running.is_ready():
                        assert process.poll() is None, (folder / "prometheus.log").read_text()
                        await asyncio.sleep(_POLL_SECONDS)
                yield running
        finally:
            await asyncio.to_thread(stop, process)
