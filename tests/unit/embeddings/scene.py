"""A coalescer and all below it but the network: engines answer in virtual time, and fail on request."""

import asyncio
import hashlib
from base64 import b64decode, b64encode
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any

import numpy as np
import orjson

from gateway.config import AdmissionConfig, Config, EmbeddingsConfig, HealthConfig, UpstreamConfig
from gateway.core.backends.backend import Backend
from gateway.core.backends.facts import Facts, ModelCard
from gateway.core.backends.fleet import Fleet
from gateway.core.backends.health import ProbeResult
from gateway.core.backends.settings import BackendConfig
from gateway.core.dispatch import Dispatcher, RetryBudget
from gateway.core.errors import BackendError, GatewayError
from gateway.core.observe.metrics import Metrics
from gateway.core.observe.record import Record
from gateway.core.relay.upstream import read_usage
from gateway.core.request import Demand, InferenceRequest, Kind, Sink, UpstreamResult
from gateway.core.resources import MemoryBudget
from gateway.core.routing.estimates import Calibrations, CostModel, OutputLengths
from gateway.core.routing.policy import LeastLoadedPolicy
from gateway.core.scheduling.leases import LeaseBroker
from gateway.core.scheduling.scheduler import Scheduler, SchedulerSettings
from gateway.core.scheduling.wait_queue import Queue
from gateway.features.batches.line_leases import LineLeases
from gateway.features.batches.offline import OfflineQueue
from gateway.features.embeddings.batcher import Batcher
from gateway.features.embeddings.kinds import Coalescer
from gateway.features.embeddings.metrics import EmbeddingMetrics
from gateway.features.embeddings.wire import inputs_of
from tests.unit.embeddings.words import Words
from tests.unit.front.wires import FakeWire, reply_on
from tests.unit.scheduling.virtual_time import turns

BAD = "bad"  # a text that engines refuse
CONTEXT_TOKENS = 256
Item = str | list[int]
Fault = Callable[[str, list[Item]], BackendError | bytes | None]


def vector(item: Item) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """What engines make of an input."""
    digest = hashlib.sha256(orjson.dumps(item)).digest()
    return (np.frombuffer(digest, "<i4").astype(np.float64) / 2**31).astype("<f4")


def tokens(item: Item) -> int:
    """What engines count an input as."""
    return len(item) if isinstance(item, list) else 2 + len(item.split())


def answer(name: str, items: list[Item], *, floats: bool) -> bytes:
    """What an engine answers to a request of this name."""
    vectors = [vector(item) for item in items]
    total = sum(map(tokens, items))
    data = [
        {"index": index, "object": "embedding", "embedding": v.tolist() if floats else b64encode(v.tobytes()).decode()}
        for index, v in enumerate(vectors)
    ]
    usage = {"prompt_tokens": total, "total_tokens": total, "completion_tokens": 0, "prompt_tokens_details": None}
    return orjson.dumps(
        {"id": f"embd-{name}", "object": "list", "created": 1, "model": "m", "data": data, "usage": usage}
    )


def refusal(items: list[Item]) -> bytes:
    """What an engine answers to a request with a bad input: it does not say which."""
    return orjson.dumps({"error": {"message": f"{items.count(BAD)} of {len(items)}", "code": 400}})


class Sent:
    """One request that reached an engine."""

    def __init__(self, backend: str, request: InferenceRequest, now: float) -> None:
        self.backend, self.request, self.at, self.aborted = backend, request, now, False
        self.body: dict[str, Any] = orjson.loads(request.body)
        given = self.body["input"]
        self.items: list[Item] = [given] if isinstance(given, str) or isinstance(given[0], int) else given

    def __repr__(self) -> str:
        return f"<Sent to {self.backend}: {len(self.items)} items at {self.at}>"


class Scene:
    """Engines behind a dispatcher, a gate and a coalescer that are real."""

    def __init__(
        self, backends: str = "a", cap: int = 256, admission: dict[str, Any] | None = None, **embeddings: Any
    ) -> None:
        loop = asyncio.get_running_loop()
        self.clock = loop.time
        configs = [
            BackendConfig(url=f"http://10.0.0.{number}:1", name=name, max_in_flight=cap)
            for number, name in enumerate(backends)
        ]
        self.fleet = Fleet(configs, HealthConfig(slow_start_seconds=0), clock=loop.time, random=Random(1))
        for backend in self.fleet.backends:
            self.fleet.learned(
                backend, Facts(models=(ModelCard("m", max_model_len=CONTEXT_TOKENS),), process_start_seconds=1.0)
            )
            self.fleet.probed(backend, ProbeResult.OK)
        bounds = AdmissionConfig.model_validate(admission or {})
        self.queue = Queue(bounds.max_queued_requests, bounds.max_queued_bytes)
        lengths, calibration = OutputLengths(), Calibrations(CostModel())
        self.scheduler = Scheduler(
            self.fleet.candidates,
            LeastLoadedPolicy(),
            queue=self.queue,
            lengths=lengths,
            calibrations=calibration,
            settings=SchedulerSettings(),
        )
        self.offline = OfflineQueue(scheduler=self.scheduler, queue=self.queue)
        self.lease_broker = LeaseBroker(self.scheduler, self.queue, 60.0, clock=loop.time)
        self.lease_broker.add_lower_queue(self.offline)
        self.fleet.on_change.append(self.lease_broker.fleet_changed)
        self.metrics = Metrics()
        self.counted = EmbeddingMetrics(self.metrics)
        budget = RetryBudget(UpstreamConfig())
        self.dispatcher = Dispatcher(
            self.fleet,
            lease_broker=self.lease_broker,
            send=self.send,
            budget=budget,
            metrics=self.metrics,
            response_headers=True,
        )
        self.dispatcher.lease_from(LineLeases(broker=self.lease_broker, offline=self.offline))
        self.tokenizer, numbers = Words(), iter(range(10**9))
        config = Config(backends=tuple(configs), embeddings=EmbeddingsConfig.model_validate(embeddings))
        self.memory = MemoryBudget(1 << 26)
        self.batcher = Batcher(
            self.fleet,
            dispatch=self.dispatcher.dispatch,
            config=config.embeddings,
            backlog=self.queue.backlog,
            max_wait_seconds=bounds.max_wait_seconds,
            retry_after=lambda _: 1.0,
            metrics=self.counted,
            clock=loop.time,
            memory=self.memory,
            crowded=self.queue.waiting,
            response_headers=True,
        )
        self.coalescer = Coalescer(self.batcher, lambda: f"batch-{next(numbers)}", self.tokenizer)
        self.send_documents: Callable[..., Awaitable[UpstreamResult]] | None = None  # rerank requests go there
        self.overhead_seconds, self.item_seconds = 0.010, 0.001
        self.sent: list[Sent] = []
        self.most_at_once: dict[str, int] = dict.fromkeys(backends, 0)
        self._running: dict[str, int] = dict.fromkeys(backends, 0)
        self.fault: Fault = lambda _backend, _items: None
        self.records: list[Record] = []
        self._cap = cap

    # The relay.

    def backend(self, name: str) -> Backend:
        return next(backend for backend in self.fleet.backends if backend.name == name)

    async def send(
        self,
        request: InferenceRequest,
        to: Backend,
        sink: Sink,
        first_token: Callable[[], None],
        came: Callable[[int], int],
        *,
        rank: int | None = None,
        fresh: bool,
        last: bool,
    ) -> UpstreamResult:
        backend = to.name
        if self.send_documents is not None and request.endpoint != "embeddings":
            return await self.send_documents(request, backend, sink)
        sent = Sent(backend, request, self.clock())
        self.sent.append(sent)
        count = min(self._cap, len(sent.items))
        self._running[backend] += count
        self.most_at_once[backend] = max(self.most_at_once[backend], self._running[backend])
        try:
            await asyncio.sleep(self.overhead_seconds + self.item_seconds * len(sent.items))
        except asyncio.CancelledError:
            sent.aborted = True
            raise
        finally:
            self._running[backend] -= count
        fault = self.fault(backend, sent.items)
        if isinstance(fault, BackendError):
            raise fault
        if BAD in sent.items:
            body = refusal(sent.items)
            sink.send(400, b"application/json", b"", body)
            return UpstreamResult(400, None, self.clock())
        floats = sent.body.get("encoding_format") != "base64"
        body = fault if fault is not None else answer(request.request_id, sent.items, floats=floats)
        sink.send(200, b"application/json", b"", body)
        return UpstreamResult(200, read_usage(body[-4096:]), self.clock())

    # The clients.

    def request(
        self,
        given: Any,
        name: str = "id-1",
        *,
        encoding: str | None = "base64",
        fields: dict[str, Any] | None = None,
        **ask: Any,
    ) -> InferenceRequest:
        document = {"model": "m", "input": given} | ({} if encoding is None else {"encoding_format": encoding})
        document |= fields or {}
        body = orjson.dumps(document)
        inputs = inputs_of(document, "m")
        assert inputs is not None
        asked = Demand("m", sequences=len(inputs.items), divisible=True, output_tokens=0, size_bytes=len(body), **ask)
        headers = b"x-request-id: %b\r\ntraceparent: t\r\n" % name.encode()
        return InferenceRequest(
            "embeddings", Kind.POOL, b"POST", b"/v1/embeddings", asked, name, body=body, headers=headers, work=inputs
        )

    async def ask(self, given: Any, name: str = "id-1", wire: FakeWire | None = None, **options: Any) -> FakeWire:
        """One client's request, answered as the front would."""
        wire = wire or FakeWire()
        reply = reply_on(wire)
        record = Record(name, "embeddings", self.clock())
        self.records.append(record)
        try:
            await self.coalescer.dispatch(self.request(given, name, **options), reply, record)
        except GatewayError as error:
            record.error = error.message
            refusal = error.answer if isinstance(error, BackendError) else None
            if refusal is not None:
                reply.send(refusal.status, refusal.content_type, refusal.extra, refusal.body)
            else:
                reply.fail(error)
        return wire

    async def ask_all(self, *given: Any, **options: Any) -> list[FakeWire]:
        """Several clients at once."""
        names = [f"id-{number}" for number in range(len(given))]
        return list(await asyncio.gather(*(self.ask(*each, **options) for each in zip(given, names, strict=True))))

    @property
    def sizes(self) -> list[int]:
        """Items of each request that reached an engine."""
        return [len(sent.items) for sent in self.sent]

    async def check_that_nothing_is_left(self) -> None:
        """Everything that was taken is given back."""
        await turns(3)
        assert self.batcher.busy == 0, self.batcher
        assert self.lease_broker.waiting == 0
        assert self.memory.used_bytes == 0
        assert repr(self.queue.backlog) == "<Backlog 0 requests, 0 bytes>"
        assert set(self._running.values()) <= {0}
        for engine in self.fleet.engines():
            assert repr(engine.load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"


def vectors_in(wire: FakeWire) -> list[bytes]:
    """The vectors that a client got, as 32-bit floats; checks their order."""
    data = orjson.loads(wire.body)["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [
        b64decode(entry["embedding"])
        if isinstance(entry["embedding"], str)
        else np.array(entry["embedding"], "<f4").tobytes()
        for entry in data
    ]


def expected(items: list[Item]) -> list[bytes]:
    """The vectors that these inputs have."""
    return [vector(item).tobytes() for item in items]
