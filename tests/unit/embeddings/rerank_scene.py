"""A rerank splitter and all below it but the network: engines answer in virtual time, and fail on request."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.core.errors import BackendError, GatewayError
from gateway.core.observe.record import Record
from gateway.core.relay.upstream import read_usage
from gateway.core.request import Demand, InferenceRequest, Kind, Sink, UpstreamResult
from gateway.features.embeddings.kinds import RerankSplitter
from gateway.features.embeddings.wire import pairs_of
from tests.unit.embeddings import rerank_engine as engine
from tests.unit.embeddings import scene as embeddings
from tests.unit.front.wires import FakeWire, reply_on
from tests.unit.scheduling.virtual_time import turns

Fault = Callable[[str, "Sent"], BackendError | bytes | None]


@dataclass
class Sent:
    """One request that reached an engine."""

    backend: str
    request: InferenceRequest
    at: float
    body: dict[str, Any]
    aborted: bool = False

    @property
    def documents(self) -> list[str]:
        return engine.texts_of(self.body)[1]

    @property
    def is_probe(self) -> bool:
        return "-probe-" in self.request.request_id

    @property
    def is_piece(self) -> bool:
        return self.request.work is None and not self.is_probe and not self.request.request_id.endswith("-query")


class Scene:
    """Engines behind a dispatcher, a gate and a spreader that are real."""

    def __init__(
        self, backends: str = "a", cap: int = 256, kind: str = "cross", admission: dict[str, Any] | None = None,
        **config: Any,
    ) -> None:  # fmt: skip
        below = self.below = embeddings.Scene(backends, cap, admission, **config)
        below.send_documents = self.send
        self.clock, self.kind, self.cap = below.clock, kind, cap
        self.rerank_splitter = RerankSplitter(below.batcher)
        self.sent: list[Sent] = []
        self.in_flight = self.most_in_flight = 0  # documents
        self.fault: Fault = lambda _backend, _sent: None
        self.overhead_seconds, self.document_seconds = 0.010, 0.001
        self.records: list[Record] = []
        self.backend = below.backend

    # The relay.

    async def send(self, request: InferenceRequest, backend: str, sink: Sink) -> UpstreamResult:
        sent = Sent(backend, request, self.clock(), orjson.loads(request.body))
        self.sent.append(sent)
        count = len(sent.documents)
        self.in_flight += count
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.overhead_seconds + self.document_seconds * count)
        except asyncio.CancelledError:
            sent.aborted = True
            raise
        finally:
            self.in_flight -= count
        fault = self.fault(backend, sent)
        if isinstance(fault, BackendError):
            raise fault
        status, body = (200, fault) if fault is not None else engine.answer(sent.body, request.request_id, self.kind)
        sink.send(status, b"application/json", b"", body)
        return UpstreamResult(status, read_usage(body[-4096:]) if status == 200 else None, self.clock())

    # The clients.

    def request(self, endpoint: str, body: dict[str, Any], name: str = "id-1", **ask: Any) -> InferenceRequest:
        document = {"model": "m", **body}
        written = orjson.dumps(document)
        _, documents = engine.texts_of(document)
        asked = Demand("m", sequences=len(documents), divisible=True, output_tokens=0, size_bytes=len(written), **ask)
        return InferenceRequest(
            endpoint, Kind.POOL, b"POST", b"/" + endpoint.encode(), asked, name, body=written,
            headers=b"x-request-id: %b\r\ntraceparent: t\r\n" % name.encode(),
            work=pairs_of(endpoint, document, "m"),
        )  # fmt: skip

    async def ask(self, endpoint: str, body: dict[str, Any], name: str = "id-1", **ask: Any) -> FakeWire:
        """One client's request, answered as the front would."""
        wire = FakeWire()
        reply = reply_on(wire)
        record = Record(name, endpoint, self.clock())
        self.records.append(record)
        try:
            await self.rerank_splitter.dispatch(self.request(endpoint, body, name, **ask), reply, record)
        except GatewayError as error:
            reply.fail(error)
        return wire

    async def rerank(self, documents: list[str], name: str = "id-1", **fields: Any) -> FakeWire:
        """The same for a rerank request."""
        return await self.ask("rerank", {"query": "what is it", "documents": documents, **fields}, name)

    def direct(self, body: dict[str, Any], name: str = "id-1") -> Any:
        """What one engine would have answered to it."""
        return orjson.loads(engine.answer(body, name, self.kind)[1])

    @property
    def pieces(self) -> list[Sent]:
        """Pieces that reached an engine."""
        return [sent for sent in self.sent if sent.is_piece]

    async def check_that_nothing_is_left(self) -> None:
        """Everything that was taken is given back."""
        await turns(3)
        assert self.below.batcher.busy == 0, self.below.batcher
        assert self.in_flight == 0
        assert self.below.memory.used_bytes == 0
        assert repr(self.below.queue.backlog) == "<Backlog 0 requests, 0 bytes>"
        assert self.below.lease_broker.waiting == 0
        for one in self.below.fleet.engines():
            assert repr(one.load) == "<EngineLoad 0 in flight, 0 decoding, 0 tokens>"


def texts(count: int, words: int = 1) -> list[str]:
    """Documents of different sizes."""
    return [f"document {number}" + " word" * (number % 3 + words) for number in range(count)]
