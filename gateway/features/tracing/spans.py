"""The spans of finished requests as OTLP messages, by OpenTelemetry's semantic conventions. It needs the extra `otel`.

A request is a server span. Below it, each attempt has a span of its placement (with a child for its time in the queue)
and a client span, whose id the backend got: engines that trace requests put their spans below it.

The common parts of spans, such as names, models and backends, are encoded once, by the library's messages; the rest by
`tracing/encoding.py`. Span objects of an SDK would cost over ten times as much.
"""

from binascii import unhexlify
from collections.abc import Callable
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, SpanFlags, Status
from opentelemetry.sdk.resources import Resource

from gateway.features.tracing.encoding import (
    RESOURCE_SPANS,
    SCOPE_SPANS,
    SPANS,
    Attribute,
    first_token,
    framed,
    identity,
)
from gateway.features.tracing.trace import Attempt, Finished

_NANOSECONDS = 1_000_000_000
_SPAN_ID_BYTES = 8
_CONSTANTS = 2048  # kept: one for each combination of model, backend and outcome
_OPERATIONS = {
    "chat": "chat",
    "chat_batch": "chat",
    "responses": "chat",
    "messages": "chat",
    "completions": "text_completion",
    "embeddings": "embeddings",
    "embed": "embeddings",
}  # of the conventions for generative AI; others have the endpoint's name
_GOOD = ("completed", "refused_by_backend")  # outcomes that are not the gateway's or a backend's failure
_CLIENTS_FAULT = ("rejected", "rate_limited", "refused_by_backend")


_REQUEST_ID = Attribute("gateway.request_id")
_PREDICTED_HIT = Attribute("gateway.predicted_hit_tokens")
_ENGINES = Attribute("gateway.engines")
_INPUT_TOKENS = Attribute("gen_ai.usage.input_tokens")
_OUTPUT_TOKENS = Attribute("gen_ai.usage.output_tokens")
_CACHED_TOKENS = Attribute("gen_ai.usage.cache_read.input_tokens")
_FIRST_CHUNK = Attribute("gen_ai.response.time_to_first_chunk")


class Spans:
    """Encodes the spans of requests. `random_bytes` gives that many."""

    def __init__(self, service_name: str, version: str, random_bytes: Callable[[int], bytes]) -> None:
        self.random_bytes = random_bytes
        self.constant = lru_cache(_CONSTANTS, typed=True)(_constant)  # typed: 1 and True are other attributes
        self.address = lru_cache(_CONSTANTS)(_address)
        resource, scope = ResourceSpans(), ScopeSpans()
        found = Resource.create({"service.name": service_name, "service.version": version})
        resource.resource.attributes.extend(_attribute(key, value) for key, value in found.attributes.items())
        scope.scope.name, scope.scope.version = "vllm-batching-gateway", version
        self._resource, self._scope = bytes(resource.SerializeToString()), bytes(scope.SerializeToString())

    def export(self, traces: list[Finished], rest: Callable[[], object], rest_traces: int) -> bytes:
        """An `ExportTraceServiceRequest` of these requests; `rest` is called at regular intervals."""
        spans: list[bytes] = []
        for number, finished in enumerate(traces, 1):
            _Request(self, finished, spans).add_spans()
            if number % rest_traces == 0:
                rest()
        scope_spans = framed(SCOPE_SPANS, self._scope + b"".join(spans))
        return framed(RESOURCE_SPANS, self._resource + scope_spans)


class _Request:
    """One request, on its way to encoded spans."""

    def __init__(self, maker: Spans, finished: Finished, spans: list[bytes]) -> None:
        self._record, self._trace, self._urls, self._offset_seconds = finished
        self._spans = spans
        self._constant, self._address, self._random_bytes = maker.constant, maker.address, maker.random_bytes
        self._trace_id, self._server_id = unhexlify(self._trace.trace_id), unhexlify(self._trace.span_id)
        self._operation = _OPERATIONS.get(self._record.endpoint, self._record.endpoint)

    def add_spans(self) -> None:
        """All of them, its own first."""
        record, attempts = self._record, self._trace.attempts
        self._add_server()
        if not attempts and record.backend:  # it was sent in batches or in pieces
            whole = self._trace.stand_in()
            whole.backend, whole.placed_seconds = record.backend, record.arrived_seconds
            whole.first_byte_seconds, whole.ended_seconds = record.first_byte_seconds, record.ended_seconds
            self._add_client(whole, 0)
        for number, attempt in enumerate(attempts):
            self._add_placement(attempt)
            if attempt.placed_seconds is not None:
                self._add_client(attempt, number)

    def _add_server(self) -> None:
        """The request as its client sees it."""
        record, trace = self._record, self._trace
        is_failure = record.outcome not in _GOOD and record.outcome not in _CLIENTS_FAULT
        constant = self._constant(
            f"{trace.method} {trace.path}" if record.endpoint != "unknown" else trace.method,
            Span.SPAN_KIND_SERVER,
            bool(trace.parent_id),
            "http.request.method", trace.method,
            "http.response.status_code", record.status,
            "url.path", trace.path,
            "error.type", record.outcome if is_failure else "",
            "gen_ai.operation.name", self._operation,
            "gen_ai.request.model", record.model,
            "gateway.outcome", record.outcome,
            "gateway.client", record.client,
            "gateway.attempts", record.attempts if record.attempts > 1 else 0,
        )  # fmt: skip
        more = [_REQUEST_ID.text(record.request_id)]
        if is_failure:
            more.append(_error(record.error or record.outcome))
        parent_id = unhexlify(trace.parent_id)
        start, end = record.arrived_seconds, record.ended_seconds
        self._add(constant, self._server_id, parent_id, start_seconds=start, end_seconds=end, more=more)

    def _add_placement(self, attempt: Attempt) -> None:
        """The search for an engine with the prices of the best ones, and below it the time in the queue."""
        record, until = self._record, attempt.placed_seconds
        constant = self._constant(
            "placement", Span.SPAN_KIND_INTERNAL, False, "gateway.backend", attempt.backend
        )  # fmt: skip
        more = []
        if until is not None:
            more.append(_PREDICTED_HIT.number(attempt.hit_tokens))
            waited = attempt.waited_seconds
        else:
            until = record.ended_seconds
            more.append(_error(record.outcome))
            waited = until - attempt.asked_seconds
        if attempt.prices:
            more.append(
                _ENGINES.texts(
                    f"{price.engine};cost={price.cost:.4g};hit={price.hit_tokens};open={int(price.is_open)}"
                    for price in attempt.prices
                )
            )
        span_id = self._random_bytes(_SPAN_ID_BYTES)
        start = attempt.asked_seconds
        self._add(constant, span_id, self._server_id, start_seconds=start, end_seconds=until, more=more)
        if waited > 0:
            wait_class = "batch" if record.batch else "interactive"
            constant = self._constant(
                "queue", Span.SPAN_KIND_INTERNAL, False, "gateway.class", wait_class, "gateway.model", record.model
            )
            own_id, start = self._random_bytes(_SPAN_ID_BYTES), until - waited
            self._add(constant, own_id, span_id, start_seconds=start, end_seconds=until, more=[])

    def _add_client(self, attempt: Attempt, number: int) -> None:
        """The request to a backend, from its first byte to the answer's last one."""
        record = self._record
        is_last = number == max(0, len(self._trace.attempts) - 1)
        error = attempt.error or (record.outcome if is_last and record.outcome not in _GOOD else "")
        host, port = self._address(self._urls.get(attempt.backend, ""))
        constant = self._constant(
            f"{self._operation} {record.model}".rstrip(),
            Span.SPAN_KIND_CLIENT,
            False,
            "gen_ai.operation.name", self._operation,
            "gen_ai.provider.name", "vllm",
            "gen_ai.request.model", record.model,
            "gen_ai.request.stream", record.streams,
            "server.address", host,
            "server.port", port,
            "http.request.resend_count", number,
            "error.type", error,
            "gateway.backend", attempt.backend,
        )  # fmt: skip
        more, first, placed, ended = [], attempt.first_byte_seconds, attempt.placed_seconds, attempt.ended_seconds
        placed = record.arrived_seconds if placed is None else placed
        if error:
            more.append(_error(record.error if is_last and record.error else error))
        elif is_last:
            more += [_INPUT_TOKENS.number(record.prompt_tokens)] if record.prompt_tokens else []
            more += [_OUTPUT_TOKENS.number(record.completion_tokens)] if record.completion_tokens else []
            more += [] if record.actual_hit_tokens is None else [_CACHED_TOKENS.number(record.actual_hit_tokens)]
        if first is not None:
            more += [_FIRST_CHUNK.real(first - placed)] if record.streams else []
            more.append(first_token(self._nanoseconds(first)))
        until = record.ended_seconds if ended is None else ended
        span_id = unhexlify(attempt.span_id)
        self._add(constant, span_id, self._server_id, start_seconds=placed, end_seconds=until, more=more)

    def _add(
        self,
        constant: bytes,
        span_id: bytes,
        parent_id: bytes,
        *,
        start_seconds: float,
        end_seconds: float,
        more: list[bytes],
    ) -> None:
        start = self._nanoseconds(start_seconds)
        end = max(start, self._nanoseconds(end_seconds))
        own = identity(self._trace_id, span_id, parent_id, start, end)
        self._spans.append(framed(SPANS, b"".join((constant, own, *more))))

    def _nanoseconds(self, seconds: float) -> int:
        """Unix time of a moment of the loop's clock."""
        return int((self._offset_seconds + seconds) * _NANOSECONDS)


def _constant(name: str, kind: Any, has_remote_parent: bool, *attributes: Any) -> bytes:
    """What spans have in common; `attributes`: keys, each with its value, of which empty ones are left out."""
    flags: Any = SpanFlags.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK
    if has_remote_parent:
        flags |= SpanFlags.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK
    pairs = zip(attributes[::2], attributes[1::2], strict=True)
    encoded = [_attribute(key, value) for key, value in pairs if value]
    return bytes(Span(name=name, kind=kind, flags=flags, attributes=encoded).SerializeToString())


def _address(url: str) -> tuple[str | None, int | None]:
    parts = urlsplit(url)
    return parts.hostname, parts.port


def _attribute(key: str, value: Any) -> KeyValue:
    return KeyValue(key=key, value=_any(value))


def _any(value: Any) -> AnyValue:
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    if isinstance(value, float):
        return AnyValue(double_value=value)
    return AnyValue(array_value=ArrayValue(values=[_any(each) for each in value]))


def _error(message: str) -> bytes:
    """The text with lone surrogates replaced: UTF-8 cannot express them, and the whole export would fail."""
    text = message.encode("utf-8", "replace").decode()
    return bytes(Span(status=Status(code=Status.STATUS_CODE_ERROR, message=text)).SerializeToString())
