"""The gateway under test, in this process on real sockets; and what must hold after every test."""

import asyncio
import io
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol

import orjson
from prometheus_client import CollectorRegistry, generate_latest
from structlog.testing import capture_logs

from gateway.config.file import parse
from gateway.core.backends.backend import Backend
from gateway.core.front.connection import ClientConnection
from gateway.core.front.handler import Handler
from gateway.core.front.http_request import HttpRequest
from tests import live_bytes
from tests.clients import Answer, Client, chat, request
from tests.recounted_gateway import RecountedGateway
from tests.scripted import ScriptedBackend

DEADLINE_SECONDS = 30.0  # less than the time limit of a test, which an event loop may swallow
BACKEND_KEY = "sk-backend-Canary-51c2"
CLIENT_KEY = "sk-client-Canary-9f31"
PROMPT_CANARY = "prompt-canary-7d0e"

QUICK: dict[str, dict[str, Any]] = {
    "server": {"host": "127.0.0.1", "port": 0, "admin": None, "drain_delay_seconds": 0},
    "routing": {"policy": "round_robin"},
    "health": {
        "probe_interval_seconds": 0.2, "probe_timeout_seconds": 0.5, "eject_base_seconds": 0.5, "slow_start_seconds": 0,
    },
}  # fmt: skip


class Engine(Protocol):
    """Whatever the gateway sends requests to."""

    @property
    def url(self) -> str:
        """The base URL."""


class CountedHandler:
    """The gateway's handler. `accepted`: requests that the front took on."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.accepted = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.handler, name)

    async def serve(self, incoming: HttpRequest, connection: ClientConnection) -> None:
        """Serve it as the gateway does; probes of the gateway are not counted."""
        if incoming.route is None or not incoming.route.public:
            self.accepted += 1
        await self.handler.serve(incoming, connection)


class UnderTest:
    """A running gateway, and what it was asked and logged."""

    def __init__(self, gateway: RecountedGateway, log: io.BytesIO) -> None:
        self.gateway = gateway
        self.log = log
        self.admin_port: int | None = None
        self.events: Sequence[Any] = []
        self.complaints: list[str] = []
        self.expects_internal_errors = False
        self._departed: dict[str, int] = {}  # outcomes of requests on backends that have left, with their metrics
        gateway.core.fleet.on_leave.insert(0, self._keep_outcomes)
        self.counted = CountedHandler(gateway.handler)
        gateway.server.handler = self.counted

    @property
    def port(self) -> int:
        """The main port."""
        return self.gateway.server.port

    async def client(self, **options: Any) -> Client:
        """A connection of its own."""
        return await Client.connect(self.port, **options)

    async def ask(self, body: bytes | None = None, *headers: bytes, **options: Any) -> Answer:
        """One request on a connection of its own."""
        async with await self.client() as client:
            await client.send(request(chat() if body is None else body, *headers, **options))
            return await client.answer()

    @property
    def outcomes(self) -> dict[str, int]:
        """How requests ended."""
        found = dict(self._departed)
        self.gateway.core.finished.settle()
        for labels, count in self.gateway.core.metrics.requests.values.items():
            found[labels[3]] = found.get(labels[3], 0) + int(count)
        return found

    def _keep_outcomes(self, backend: Backend) -> None:
        if backend.name not in self.gateway.core.fleet.by_name:
            for labels, count in self.gateway.core.metrics.requests.values.items():
                if labels[2] == backend.name:
                    self._departed[labels[3]] = self._departed.get(labels[3], 0) + int(count)

    @property
    def attempts(self) -> dict[tuple[str, ...], float]:
        """Requests sent to backends, by backend and result."""
        return dict(self.gateway.core.metrics.attempts.values)

    def state(self, engine: Engine) -> str:
        """What the gateway thinks of a backend."""
        return self.backend(engine).health.state

    def backend(self, engine: Engine) -> Any:
        """What the gateway knows of a backend."""
        return next(backend for backend in self.gateway.core.fleet.backends if backend.config.url == engine.url)

    @property
    def in_flight(self) -> int:
        """Sequences on all backends."""
        return sum(backend.in_flight for backend in self.gateway.core.fleet.backends)

    @property
    def busy(self) -> list[str]:
        """What is taken, one line for each thing that is not at rest."""
        gateway, core = self.gateway, self.gateway.core
        backlog = core.queue.backlog
        found = {
            "queued": len(core.queue), "backlog": backlog.requests + backlog.size_bytes,
            "waiting": core.lease_broker.waiting, "relayed": len(core.relay),
            "sessions": len(gateway.features["realtime"].tunnels),
            "answering": gateway.server.answering, "clients": len(gateway.server._connections),
            "connections in use": sum(pool.open for pool in gateway.core.relay._pools.values()),
            "held bytes": gateway.core.memory.used_bytes,
            "batched": gateway.features["embeddings"].batcher.busy,
            "ledger": len(gateway.core.ledger),
            "unanswered": self.counted.accepted - sum(self.outcomes.values()),
        }  # fmt: skip
        for engine in [engine for backend in gateway.core.fleet.backends for engine in backend.all_engines]:
            load = engine.load
            for what in ("in_flight", "decoding", "context_tokens", "pending"):
                found[f"{engine.name}.{what}"] = len(load.pending) if what == "pending" else getattr(load, what)
            found[f"{engine.name}.kv_tokens"] = engine.kv.taken_tokens
            found[f"{engine.name}.reservations"] = len(engine.kv)
        return [f"{what}: {count}" for what, count in found.items() if count]

    async def comes_to_rest(self) -> None:
        """Wait until nothing is taken, queued, relayed or connected, and every request has one outcome."""
        await holds(lambda: not self.busy, lambda: f"not at rest: {self.busy}")

    async def forgets_all(self, what: object = "") -> None:
        """Wait until no large bytes are in memory. The collector is off (`conftest.py`)."""
        await holds(lambda: not live_bytes.large_bytes(), lambda: f"{what} is forgotten: {live_bytes.leak(0.0)}")


async def holds(condition: Callable[[], bool], what: str | Callable[[], str]) -> float:
    """Wait until it holds; gives after how many seconds it did."""
    started = time.monotonic()
    while not condition():
        elapsed = time.monotonic() - started
        assert elapsed < DEADLINE_SECONDS, f"never: {what if isinstance(what, str) else what()}"
        await asyncio.sleep(0.002)
    return time.monotonic() - started


def merged(*layers: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Configuration sections, later ones over earlier ones."""
    sections: dict[str, dict[str, Any]] = {}
    for layer in layers:
        for name, section in layer.items():
            sections[name] = {**sections.get(name, {}), **section}
    return sections


@asynccontextmanager
async def running(
    *engines: Engine,
    sections: dict[str, dict[str, Any]] | None = None,
    per_backend: dict[str, Any] | None = None,
    wait: bool = True,
) -> AsyncIterator[UnderTest]:
    """A gateway before these engines. When the block ends, all is at rest and the books add up."""
    entries = [{"url": engine.url, "api_key": BACKEND_KEY, **(per_backend or {})} for engine in engines]
    config = parse({**merged(QUICK, sections or {}), "backends": entries})
    log = io.BytesIO()
    gateway = RecountedGateway(config, log)
    under_test = UnderTest(gateway, log)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: under_test.complaints.append(repr(context)))
    with capture_logs() as events:
        under_test.events = events
        async with gateway.running() as under_test.admin_port:
            if wait:
                backends = gateway.core.fleet.backends
                await holds(lambda: all(backend.health.state == "up" for backend in backends), lambda: f"{backends} up")
            yield under_test
            await under_test.comes_to_rest()
            assert gateway.violations.values == {}
            assert gateway.recount() == []
    assert gateway.violations.values == {}
    loop.set_exception_handler(None)
    the_books_add_up(under_test, engines)


def the_books_add_up(under_test: UnderTest, engines: Sequence[Engine]) -> None:
    """Each request has one outcome, was executed at most twice, and left no secret anywhere."""
    assert not under_test.complaints, under_test.complaints[:3]
    metrics = under_test.gateway.core.metrics
    outcomes = under_test.outcomes
    assert sum(outcomes.values()) == under_test.counted.accepted, (outcomes, under_test.counted.accepted)
    lines = [orjson.loads(line) for line in under_test.log.getvalue().splitlines()]
    assert len(lines) == under_test.counted.accepted
    executions = [
        seen.request_id for engine in engines if isinstance(engine, ScriptedBackend) for seen in engine.ledger
    ]
    attempts = {line["request_id"]: _most_executions(line) for line in lines}
    if len(attempts) == len(lines):
        executed = {name: executions.count(name) for name in executions}
        assert {name: count for name, count in executed.items() if count > min(2, attempts.get(name, 2))} == {}, lines
    for engine in engines:
        assert not isinstance(engine, ScriptedBackend) or engine.malformed == []
    if not under_test.expects_internal_errors:
        assert "internal_error" not in outcomes
        assert [event for event in under_test.events if event["log_level"] in ("error", "critical")] == []
    registry = CollectorRegistry()
    registry.register(metrics)
    page = generate_latest(registry).decode()
    assert "gateway_backend_in_flight{" in page
    for what, text in {
        "metrics": page,
        "access log": under_test.log.getvalue().decode(),
        "log": repr(under_test.events),
    }.items():
        for secret in (BACKEND_KEY, CLIENT_KEY, PROMPT_CANARY):
            assert secret not in text, f"{secret} in the {what}"


class LoopLag:
    """`async with LoopLag() as lag:` measures the most CPU time that one turn of the event loop took."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "LoopLag":
        self._task = asyncio.get_running_loop().create_task(self._watch())
        await asyncio.sleep(0.005)
        self.longest_seconds = 0.0
        return self

    async def _watch(self) -> None:
        while True:
            before = time.thread_time()  # of this thread alone, however busy the machine is
            await asyncio.sleep(0)
            self.longest_seconds = max(self.longest_seconds, time.thread_time() - before)

    async def __aexit__(self, *_: object) -> None:
        assert self._task is not None
        self._task.cancel()


def _most_executions(line: dict[str, Any]) -> int:
    """How often engines may have been sent a request, by its line of the access log.

    What a batch was refused for may have been sent alone before it is sent as it came.
    """
    was_isolated = line["endpoint"] in ("embeddings", "score", "rerank") and line["outcome"] == "refused_by_backend"
    return max(1, int(line["attempts"])) + was_isolated
