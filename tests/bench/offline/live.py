"""The same comparison on real sockets: engines, the gateway's batches API, and clients that stream.

The engines are four simulated ones, or two of real vLLM on this CPU with shorter prompts and answers.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import orjson

from gateway.features.batches.idle_capacity import OBJECTIVE_SHARE
from loadtest.report.statistics import percentile
from loadtest.servers.engines import EngineOptions, running_engines
from tests.bench.offline.compare import Aimd, Row, arrivals
from tests.bench.offline.fleet import ENGINES, Request, lengths
from tests.integration.fleet import CHAT_MODEL, simulated_engine
from tests.integration.gateway_process import Gateway, running_gateway

TIME_SCALE = 4.0  # engines slower than a GPU by this: two cores are enough for all processes
LINES = 12_000  # more than are answered
CAPACITY_SECONDS = 45.0
_DEADLINE_SECONDS = 60.0
_TOKEN_BYTES = 4  # about, of the simulated tokenizer


@dataclass(frozen=True, slots=True)
class LiveFleet:
    """Engines of a run, which `start` starts with their logs in a folder: it gives their URLs.

    `length_share`: prompts and answers have this part of the modelled ones' tokens. `slots`: of each engine.
    `capacity_share`: the part of a batch's pace that is there for clients, whose streams may take the engines' cores.
    """

    model: str
    engines: int
    slots: int
    length_share: float
    capacity_share: float
    start: Callable[[Path], AbstractContextManager[list[str]]]

    def lengths(self, number: int) -> tuple[int, int]:
        prompt, output = lengths(number)
        return round(prompt * self.length_share), round(output * self.length_share)

    @property
    def mean_output_tokens(self) -> float:
        return sum(self.lengths(number)[1] for number in range(99)) / 99


@contextmanager
def _simulated(slots: int, count: int, folder: Path) -> Iterator[list[str]]:
    flags = ("--max-num-seqs", str(slots), "--time-scale", str(TIME_SCALE))
    with ExitStack() as stack:
        yield [stack.enter_context(simulated_engine(folder, *flags)).url for _ in range(count)]


@contextmanager
def _real(slots: int, count: int, folder: Path) -> Iterator[list[str]]:
    with running_engines(EngineOptions(count=count, max_num_seqs=slots), folder) as engines:
        yield engines.urls


SIMULATED = LiveFleet("sim", ENGINES, 32, 1.0, 1.0, partial(_simulated, 32, ENGINES))
REAL = LiveFleet(CHAT_MODEL, 2, 16, 0.2, 0.5, partial(_real, 16, 2))


@dataclass
class Observed:
    """What clients saw in one run."""

    requests: list[Request] = field(default_factory=list)
    line_tokens: int = 0
    lines: int = 0
    paused: int = 0


def body_of(model: str, number: int, prompt_tokens: int, output_tokens: int) -> dict[str, Any]:
    """A request whose prompt no other one shares."""
    text = f"{number} " * (prompt_tokens * _TOKEN_BYTES // (len(str(number)) + 1))
    messages = [{"role": "user", "content": text}]
    return {"model": model, "messages": messages, "max_tokens": output_tokens, "ignore_eos": True}


@contextmanager
def gateway_of(fleet: LiveFleet, folder: Path, objective: float | None, **batches: Any) -> Iterator[Gateway]:
    with fleet.start(folder) as urls:
        config = {
            "backends": [{"url": url} for url in urls],
            "batches": {"path": str(folder / "batches"), **batches},
            "admission": {"itl_objective_seconds": objective},
            "server": {"access_log": False},
        }
        with running_gateway(folder, config) as gateway:
            yield gateway


async def ask(session: aiohttp.ClientSession, url: str, model: str, request: Request, since: float) -> None:
    """A client's request; its times are noted in it."""
    body = body_of(model, request.number, request.prompt_tokens, request.output_tokens) | {"stream": True}
    async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200, await answer.read()
        async for chunk in answer.content.iter_any():
            if request.first_token_seconds < 0 and b'"content":"' in chunk and b'"content":""' not in chunk:
                request.first_token_seconds = time.monotonic() - since
    request.finished_seconds = time.monotonic() - since


async def clients(
    session: aiohttp.ClientSession, url: str, model: str, requests: list[Request], seconds: float
) -> None:
    """Send each request at its time, and wait for all that are answered in time."""
    since, tasks = time.monotonic(), list[asyncio.Task[None]]()
    for request in requests:
        await asyncio.sleep(max(0.0, since + request.arrived_seconds - time.monotonic()))
        tasks.append(asyncio.create_task(ask(session, url, model, request, since)))
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
async def _aimd(
    session: aiohttp.ClientSession, url: str, fleet: LiveFleet, rule: Aimd, observed: Observed
) -> AsyncIterator[None]:
    """As many lines at once as the rule allows, each sent as a batch request."""
    running, numbers = set[asyncio.Task[None]](), count()

    async def one(number: int) -> None:
        prompt, output = fleet.lengths(number)
        headers = {"x-gateway-priority": "batch"}
        body = body_of(fleet.model, 10_000_000 + number, prompt, output)
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
    fleet: LiveFleet, gateway: Gateway, requests: list[Request], rule: Aimd | None, batch: bool, seconds: float
) -> Observed:
    """One run with these requests, and a batch beside them."""
    observed = Observed(requests)
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(None)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        lines = BatchOfLines(session, gateway, observed)
        if batch:
            numbered = ((10_000_000 + number, *fleet.lengths(number)) for number in range(LINES))
            await lines.start(body_of(fleet.model, *each) for each in numbered)
        if rule is not None:
            async with _aimd(session, gateway.url, fleet, rule, observed):
                await clients(session, gateway.url, fleet.model, requests, seconds)
        else:
            await clients(session, gateway.url, fleet.model, requests, seconds)
        if batch:
            await lines.look()
    return observed


def row(
    fleet: LiveFleet,
    name: str,
    requests: list[Request],
    seconds: float,
    objective: float | None,
    rule: Aimd | None = None,
    **batches: Any,
) -> Row:
    """One way, with the same interactive requests. Without `batches` and a rule, they are alone."""
    again = [Request(r.number, r.arrived_seconds, r.prompt_tokens, r.output_tokens, False) for r in requests]
    with TemporaryDirectory() as folder, gateway_of(fleet, Path(folder), objective, **batches) as gateway:
        found = asyncio.run(observed_by(fleet, gateway, again, rule, bool(batches), seconds))
    ttft = percentile(sorted(request.ttft_seconds for request in again), 99) if again else 0.0
    tpot = percentile(sorted(request.tpot_seconds for request in again), 99) if again else 0.0
    return Row(name, ttft, tpot, found.line_tokens / seconds, found.paused)


def compared(fleet: LiveFleet, seconds: float, seed: int = 1) -> tuple[list[Row], float]:
    """All ways, and the tokens per second that are idle, as `compare.compared`."""
    slots = fleet.engines * fleet.slots
    full = row(fleet, "all", [], CAPACITY_SECONDS, None, idle_only=False, lines_in_flight=2 * slots)
    capacity = fleet.capacity_share * full.line_tokens_per_second / fleet.mean_output_tokens
    requests = [
        Request(each.number, each.arrived_seconds, prompt_tokens, output_tokens, False)
        for each in arrivals(capacity, seconds, seed)
        for prompt_tokens, output_tokens in [fleet.lengths(each.number)]
    ]
    alone = row(fleet, "none", requests, seconds, None)
    objective = alone.tpot_p99
    whole = row(fleet, "batch only", [], CAPACITY_SECONDS, objective / OBJECTIVE_SHARE, idle_only=True)
    idle = whole.line_tokens_per_second - sum(request.output_tokens for request in requests) / seconds
    fixed = slots // 2
    rows = [alone, row(fleet, "offline class", requests, seconds, objective, idle_only=True)]
    rows.append(row(fleet, f"fixed, {fixed}", requests, seconds, None, idle_only=False, lines_in_flight=fixed))
    rows.append(row(fleet, "AIMD on TTFT", requests, seconds, None, Aimd(2 * alone.ttft_p99)))
    return rows, idle
