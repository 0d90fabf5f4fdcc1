"""An OTLP receiver, over HTTP or gRPC, that keeps the spans it gets."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from aiohttp import web
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as messages
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
)

SERVER, CLIENT, INTERNAL = 2, 3, 1  # kinds of spans
ERROR = 2  # a status


@dataclass
class Span:
    """One span, in plain values."""

    name: str
    kind: int
    trace_id: str
    span_id: str
    parent_id: str
    start: float
    end: float
    attributes: dict[str, Any]
    events: list[str]
    status: int
    service: str


@dataclass
class Receiver:
    """What arrived so far. `refuses`: it answers 400."""

    url: str = ""
    spans: list[Span] = field(default_factory=list)
    requests: int = 0
    refuses: bool = False

    def named(self, name: str) -> list[Span]:
        """The spans with this name, in order of their start."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start)

    def take(self, request: Any) -> None:
        """Keep the spans of one export."""
        self.requests += 1
        for resource in request.resource_spans:
            service = values(resource.resource.attributes)["service.name"]
            self.spans += [plain(span, service) for scope in resource.scope_spans for span in scope.spans]

    async def post(self, request: web.Request) -> web.Response:
        """OTLP over HTTP."""
        if self.refuses:
            self.requests += 1
            return web.Response(status=400)
        assert request.content_type == "application/x-protobuf"
        self.take(messages.ExportTraceServiceRequest.FromString(await request.read()))
        answer = messages.ExportTraceServiceResponse().SerializeToString()
        return web.Response(body=answer, content_type="application/x-protobuf")


def value(any_value: Any) -> Any:
    """A value of an attribute; a list for arrays."""
    kind = any_value.WhichOneof("value")
    if kind == "array_value":
        return [value(each) for each in any_value.array_value.values]
    return getattr(any_value, kind)


def values(attributes: Any) -> dict[str, Any]:
    """Attributes as a dictionary."""
    return {each.key: value(each.value) for each in attributes}


def plain(span: Any, service: str) -> Span:
    """A span of a message."""
    return Span(
        span.name,
        span.kind,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano / 1e9,
        span.end_time_unix_nano / 1e9,
        values(span.attributes),
        [each.name for each in span.events],
        span.status.code,
        service,
    )


@asynccontextmanager
async def http_receiver() -> AsyncIterator[Receiver]:
    """Listens at /v1/traces of a port of its own."""
    receiver = Receiver()
    app = web.Application()
    app.router.add_post("/v1/traces", receiver.post)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        yield receiver
    finally:
        await runner.cleanup()


@asynccontextmanager
async def grpc_receiver() -> AsyncIterator[Receiver]:
    """The same over gRPC, whose threads are its own."""
    receiver = Receiver()

    class Service(TraceServiceServicer):  # type: ignore[misc]
        def Export(self, request: Any, context: Any) -> Any:
            receiver.take(request)
            return messages.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    add_TraceServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    receiver.url = f"http://127.0.0.1:{port}"
    try:
        yield receiver
    finally:
        await asyncio.to_thread(server.stop(0).wait)
