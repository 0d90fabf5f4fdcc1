"""The same comparison on real sockets: simulated engines, the gateway's batches API, and clients that stream."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import orjson

from gateway.scheduling.offline import OBJECTIVE_SHARE
from loadtest.report.statistics import percentile
from tests.bench.offline.compare import Aimd, Row, arrivals
from tests.bench.offline.fleet import ENGINES, Request, lengths
from tests.integration.fleet import simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway

SLOTS = 32  # of each engine
TIME_SCALE = 4.0  # engines slower than a GPU by this: two cores are enough for all processes
LINES = 12_000  # more than are answered
CAPACITY_SECONDS = 45.0
_MODEL = "sim"
_FIXED = 64
_DEADLINE_SECONDS = 60.0
_TOKEN_BYTES = 4  # about, of the simulated tokenizer


@dataclass
class Observed:
    """What clients saw in one run."""

    requests: list[Request] = field(default_factory=list)
    line_tokens: int = 0
    lines: int = 0
    paused: int = 0


def body_of(number: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A request whose prompt no other one shares."""
    text = f"{number} " * (prompt_tokens * _TOKEN_BYTES // (len(str(number)) + 1))
    messages = [{"role": "user", "content": text}]
    return {"model": _MODEL, "messages": messages, "max_tokens": output_tokens, "ignore_eos": True}


@contextmanager
def gateway_of(folder: Path, objective: float | None, **batches: Any) -> Iterator[Gateway]:
    flags = ("--max-num-seqs", str(SLOTS), "--time-scale", str(TIME_SCALE))
    with ExitStack() as stack:
        urls = [stack.enter_context(simulated_engine(folder, *flags)).url for _ in range(ENGINES)]
        config = {
            "backends": [{"url": url} for url in urls],
            "batches": {"path": str(folder / "batches"), **batches},
            "admission": {"itl_objective_seconds": objective},
            "server": {"access_log": False},
        }
        yield stack.enter_context(running_gateway(folder, config))


async def ask(session: aiohttp.ClientSession, url: str, request: Request, since: float) -> None:
    """A client's request; its times are noted in it."""
    body = body_of(request.number, request.prompt_tokens, request.output_tokens) | {"stream": True}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.read()
        async for chunk in answer.content.iter_any():
            if request.first_token_seconds < 0 and b'"content":"' in chunk and b'"content":""' not in chunk:
                request.first_token_seconds = time.monotonic() - since
    request.finished_seconds = time.monotonic() - since


async def clients(session: aiohttp.ClientSession, url: str, requests: list[Request], seconds: float) -> None:
    """Send each request at its time, and wait for all that are answered in time."""
    since, tasks = time.monotonic(), list[asyncio.Task[None]]()
    for request in requests:
        await asyncio.sleep(max(0.0, since + request.arrived_seconds - time.monotonic()))
        tasks.append(asyncio.create_task(ask(session, url, request, since)))
    await asyncio.sleep(max(0.0, since + seconds - time.monotonic()))
    if tasks:
        await asyncio.wait(tasks, timeout=_DEADLINE_SECONDS)
        for task in tasks:
            await task


class BatchOfLines:
    """An endless batch by the gateway's API. `settings` of the gateway decide how it runs."""

    def __init__(self, session: aiohttp.ClientSession, gateway: Gateway, observed: Observed) -> None:
        self._session = session
        self._gateway = gateway
        self._observed = observed
        self._id = ""

    async def start(self, bodies: Iterable[dict[str, Any]]) -> None:
        form = aiohttp.FormData({"purpose": "batch"})
        lines = []
        for number, body in enumerate(bodies):
            line = {"custom_id": str(number), "method": "POST", "url": "/v1/chat/completions", "body": body}
            lines.append(orjson.dumps(line))
        form.add_field("file", b"\n".join(lines), filename="a.jsonl")
        async with self._session.post(f"{self._gateway.url}/v1/files", data=form) as answer:
            file = (await answer.json())["id"]
        wanted = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        async with self._session.post(f"{self._gateway.url}/v1/batches", json=wanted) as answer:
            self._id = (await answer.json())["id"]

    async def look(self) -> None:
        """Note what is done."""
        async with self._session.get(f"{self._gateway.url}/v1/batches/{self._id}") as answer:
            batch = await answer.json()
        self._observed.line_tokens = batch["usage"]["output_tokens"]
        self._observed.lines = batch["request_counts"]["completed"]
        async with self._session.get(f"{self._gateway.admin_url}/metrics") as answer:
            for line in (await answer.text()).splitlines():
                if line.startswith('gateway_batch_lines_total{state="paused"}'):
                    self._observed.paused = int(float(line.split()[-1]))


@asynccontextmanager
async def _aimd(session: aiohttp.ClientSession, url: str, rule: Aimd, observed: Observed) -> AsyncIterator[None]:
    """As many lines at once as the rule allows, each sent as a batch request."""
    running, numbers = set[asyncio.Task[None]](), count()

    async def one(number: int) -> None:
        prompt, output = lengths(number)
        headers = {"x-gateway-priority": "batch"}
        body = body_of(10_000_000 + number, prompt, output)
        async with session.post(f"{url}/v1/chat/completions", json=body, headers=headers) as answer:
            if answer.status == 200:
                await answer.read()
                observed.line_tokens += output
                rule.answered(Request(number, 0.0, prompt, output, True))

    async def feed() -> None:
        seen = 0
        while True:
            done = [request for request in observed.requests if request.finished_seconds >= 0]
            for request in done[seen:]:
                rule.answered(request)
            seen = len(done)
            while len(running) < rule.lines:
                task = asyncio.create_task(one(next(numbers)))
                running.add(task)
                task.add_done_callback(running.discard)
            await asyncio.sleep(0.02)

    feeding = asyncio.create_task(feed())
    try:
        yield
    finally:
        for task in (feeding, *running):
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(feeding, *running, return_exceptions=True)


async def observed_by(
    gateway: Gateway, requests: list[Request], rule: Aimd | None, batch: bool, seconds: float
) -> Observed:
    """One run with these requests, and a batch beside them."""
    observed = Observed(requests)
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        lines = BatchOfLines(session, gateway, observed)
        if batch:
            await lines.start(body_of(10_000_000 + number, *lengths(number)) for number in range(LINES))
        if rule is not None:
            async with _aimd(session, gateway.url, rule, observed):
                await clients(session, gateway.url, requests, seconds)
        else:
            await clients(session, gateway.url, requests, seconds)
        if batch:
            await lines.look()
    return observed


def row(
    name: str,
    requests: list[Request],
    seconds: float,
    objective: float | None,
    rule: Aimd | None = None,
    **batches: Any,
) -> Row:
    """One way, with the same interactive requests. Without `batches` and a rule, they are alone."""
    again = [Request(r.number, r.arrived_seconds, r.prompt_tokens, r.output_tokens, False) for r in requests]
    with TemporaryDirectory() as folder, gateway_of(Path(folder), objective, **batches) as gateway:
        found = asyncio.run(observed_by(gateway, again, rule, bool(batches), seconds))
    ttft = percentile(sorted(request.ttft_seconds for request in again), 99) if again else 0.0
    tpot = percentile(sorted(request.tpot_seconds for request in again), 99) if again else 0.0
    return Row(name, ttft, tpot, found.line_tokens / seconds, found.paused)


def compared(seconds: float, seed: int = 1) -> tuple[list[Row], float]:
    """All ways, and the tokens per second that are idle, as `compare.compared`."""
    mean_tokens = sum(lengths(number)[1] for number in range(99)) / 99
    full = row("all", [], CAPACITY_SECONDS, None, idle_only=False, lines_in_flight=2 * ENGINES * SLOTS)
    requests = arrivals(full.line_tokens_per_second / mean_tokens, seconds, seed)
    alone = row("none", requests, seconds, None)
    objective = alone.tpot_p99
    whole = row("batch only", [], CAPACITY_SECONDS, objective / OBJECTIVE_SHARE, idle_only=True)
    idle = whole.line_tokens_per_second - sum(request.output_tokens for request in requests) / seconds
    rows = [alone, row("offline class", requests, seconds, objective, idle_only=True)]
    rows.append(row(f"fixed, {_FIXED}", requests, seconds, None, idle_only=False, lines_in_flight=_FIXED))
    rows.append(row("AIMD on TTFT", requests, seconds, None, Aimd(2 * alone.ttft_p99)))
    return rows, idle
