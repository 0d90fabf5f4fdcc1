"""What a line of a batch costs the gateway in CPU time, beside the same request of a client: on real sockets."""

import asyncio
import os
import statistics
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp

from loadtest.console import markdown_table
from loadtest.servers.processes import free_ports
from loadtest.servers.server import Server, gateway_server
from tests.bench.offline.live import BatchOfLines, Observed, body_of
from tests.integration.fleet import simulated_engine
from tests.integration.gateway_process import Gateway

_MODEL = "sim"
REQUESTS = 200
_TOGETHER = 32
_PROMPT_TOKENS, _OUTPUT_TOKENS = 250, 128
_RUNS = 3
_POLL_SECONDS = 0.5


def cpu_seconds(pid: int) -> float:
    """What this process has used: its own code and the kernel's."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# A line with a stop string is not continued after a pause, so that it is sent whole.
_WHOLE = {"stop": ["a text that no answer has"]}


def bodies(first: int, more: dict[str, Any]) -> list[dict[str, Any]]:
    return [body_of(_MODEL, first + number, _PROMPT_TOKENS, _OUTPUT_TOKENS) | more for number in range(REQUESTS)]


async def asked(session: aiohttp.ClientSession, url: str, more: dict[str, Any], first: int) -> None:
    """Requests of clients, so many at a time as lines are in flight."""
    left = iter(bodies(first, more))

    async def work() -> None:
        for body in left:
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                assert answer.status == 200, await answer.read()
                await answer.read()

    await asyncio.gather(*[work() for _ in range(_TOGETHER)])


async def batched(lines: BatchOfLines, observed: Observed, more: dict[str, Any], first: int) -> None:
    """The same requests as lines."""
    await lines.start(bodies(first, more))
    observed.lines = 0
    while observed.lines < REQUESTS:
        await asyncio.sleep(_POLL_SECONDS)
        await lines.look()


async def _measured(server: Server, admin_url: str) -> dict[str, list[float]]:
    """CPU seconds of a request, in each run."""
    found: dict[str, list[float]] = {}
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        observed = Observed([])
        lines = BatchOfLines(session, Gateway(server.url, admin_url), observed)
        ways: dict[str, Callable[[int], Awaitable[None]]] = {
            "a line that is streamed": lambda first: batched(lines, observed, {}, first),
            "a client, streamed": lambda first: asked(session, server.url, {"stream": True}, first),
            "a line that is sent whole": lambda first: batched(lines, observed, _WHOLE, first),
            "a client, not streamed": lambda first: asked(session, server.url, _WHOLE, first),
        }
        for run in range(_RUNS + 1):
            for at, (name, way) in enumerate(ways.items()):
                before = cpu_seconds(server.pid)
                await way(10_000_000 + (len(ways) * run + at) * REQUESTS)
                if run:  # the first one is a warm-up
                    found.setdefault(name, []).append((cpu_seconds(server.pid) - before) / REQUESTS)
    return found


@contextmanager
def _running(folder: Path) -> Iterator[tuple[Server, str]]:
    """The gateway before two engines, and its port for operators."""
    flags, ports = ("--max-num-seqs", str(_TOGETHER)), free_ports(2)
    with ExitStack() as stack:
        urls = [stack.enter_context(simulated_engine(folder, *flags)).url for _ in range(2)]
        batches = {"path": str(folder / "batches"), "lines_in_flight": 2 * _TOGETHER}
        sections = {"backends": [{"url": url} for url in urls], "batches": batches}
        server = stack.enter_context(gateway_server(sections, folder / "gateway.log", ports=ports))
        yield server, f"http://127.0.0.1:{ports[1]}"


def table() -> str:
    """CPU time of each way, in Markdown."""
    with TemporaryDirectory() as folder, _running(Path(folder)) as (server, admin_url):
        found = asyncio.run(_measured(server, admin_url))
    medians = {name: statistics.median(values) for name, values in found.items()}
    ways = list(medians.items())
    rows = [
        (line, f"{1000 * of_line:.2f} ms", client, f"{1000 * of_client:.2f} ms", f"{of_line / of_client:.2f}")
        for (line, of_line), (client, of_client) in zip(ways[::2], ways[1::2], strict=True)
    ]
    return markdown_table(("line", "CPU time", "of a client", "CPU time", "ratio"), rows, texts=1)
